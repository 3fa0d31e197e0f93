"""A recorded run of real processes, decided and computed again to the last step."""

from pathlib import Path

import pytest

from benchmarks.replay_run import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.model
async def test_a_run_of_the_demo_model_is_computed_again_bit_for_bit(demo_model: Path, tmp_path: Path) -> None:
    assert await run(tmp_path / "step-log", seconds=30.0, num_streams=32, is_fake=False) == 0


async def test_a_run_of_fake_executors_is_computed_again_bit_for_bit(tmp_path: Path) -> None:
    assert await run(tmp_path / "step-log", seconds=15.0, num_streams=32, is_fake=True) == 0
