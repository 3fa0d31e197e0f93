"""What clients meet is the same whichever process holds their calls: tests of the contract, again through a front."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fronts import NUM_FRONTS_VARIABLE

ROOT = Path(__file__).resolve().parents[2]

# A broken tokenizer is the front's trouble then, and no reason to refuse the executor; the pace is set in the front;
# what has changed in the core a front knows a little later; and it refuses what the core would let wait while every
# executor leaves the fleet.
LEFT_OUT = {
    "test_accepted_length": [],
    "test_drain_executor": [],
    "test_executor_loss": ["test_an_executor_with_a_broken_tokenizer_is_refused"],
    "test_fleet": [
        "test_an_address_that_comes_back_while_its_executor_still_works_takes_requests_again",
        "test_an_address_that_vanished_does_not_count_for_what_is_served",
        "test_an_executor_that_starts_late_joins_and_one_that_shuts_down_leaves",
        "test_what_is_served_does_not_depend_on_who_attaches_first",
    ],
    "test_continuation": [],
    "test_generation_service": ["test_a_front_that_falls_behind_sends_fewer_and_larger_deltas"],
    "test_lean_finished": [],
    "test_numerics": [],
    "test_model_defaults": ["test_the_defaults_hold_beside_an_executor_that_does_not_tell_them"],
    "test_request_life": [],
    "test_request_stream": [],
    "test_several_outputs": [],
    "test_tokenization": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("module", LEFT_OUT)
def test_the_contract_holds_through_a_front(module: str) -> None:
    path = f"tests/contract/{module}.py"
    options = [f"--deselect={path}::{name}" for name in LEFT_OUT[module]]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", path, *options]
    environment = os.environ | {NUM_FRONTS_VARIABLE: "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:]
