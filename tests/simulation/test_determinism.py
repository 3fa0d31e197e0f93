"""A run is a function of its plan: of nothing that differs between two processes, or two runs in one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

from tests.simulation.draw import draw_plan
from tests.simulation.plan import MODES, Plan
from tests.simulation.run import simulate

SEEDS = (4, 11)

# Enough of a plan that everything takes part, and not more: the tests are for every commit.
NUM_REQUESTS, NUM_FAULTS, QUIET_AT_S = 8, 6, 6.0

Seen = dict[str, object]


def short_plan(seed: int, mode: str) -> Plan:
    plan = draw_plan(seed, mode)
    return replace(plan, quiet_at_s=QUIET_AT_S, requests=plan.requests[:NUM_REQUESTS], faults=plan.faults[:NUM_FAULTS])


def seen_of(plan: Plan) -> Seen:
    """Return all that came of a run."""
    outcome = simulate(plan)
    return {
        "broken": outcome.broken,
        "digest": outcome.digest,
        "num_steps": outcome.num_steps,
        "num_callbacks": outcome.num_callbacks,
        "virtual_s": outcome.virtual_s,
        "seen": dict(sorted(outcome.seen.items())),
    }


def with_hash_of_a_string(plan: Plan) -> Plan:
    """Let something hang on what PYTHONHASHSEED decides."""
    first, *others = plan.requests
    return replace(plan, requests=(replace(first, at_s=first.at_s + hash(plan.mode) % 1000 * 1e-3), *others))


def with_address_in_memory(plan: Plan) -> Plan:
    """Let something hang on where an object lies."""
    first, *others = plan.requests
    return replace(plan, requests=(replace(first, at_s=first.at_s + id(plan) % 100_003 * 1e-6), *others))


PLANTED = {"": lambda plan: plan, "hash": with_hash_of_a_string, "address": with_address_in_memory}


@cache
def seen_in_a_fresh_process(hash_seed: int) -> dict[str, Seen]:
    """Return what came of all runs in another process, by mode and what was planted."""
    ran = subprocess.run(
        [sys.executable, "-m", __name__],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(ran.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_can_be_repeated_in_this_process_and_in_fresh_ones(mode: str) -> None:
    seen = json.loads(json.dumps(seen_of(short_plan(SEEDS[0], mode))))

    assert seen["num_steps"] > 0
    assert seen_of(short_plan(SEEDS[0], mode)) == seen
    assert seen_in_a_fresh_process(1)[mode] == seen
    assert seen_in_a_fresh_process(2)[mode] == seen


def test_other_seeds_and_modes_are_other_runs() -> None:
    digests = {seen_of(short_plan(seed, mode))["digest"] for seed in SEEDS for mode in MODES}

    assert len(digests) == len(SEEDS) * len(MODES)


@pytest.mark.parametrize("planted", [name for name in PLANTED if name])
def test_a_run_that_hangs_on_something_else_is_noticed(planted: str) -> None:
    one, other = (seen_in_a_fresh_process(hash_seed)[planted] for hash_seed in (1, 2))

    assert one["digest"] != other["digest"]


def main() -> None:
    """Print what comes of all runs; in a process of its own."""
    runs = {mode: seen_of(short_plan(SEEDS[0], mode)) for mode in MODES}
    runs |= {name: seen_of(plant(short_plan(SEEDS[0], MODES[0]))) for name, plant in PLANTED.items() if name}
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
