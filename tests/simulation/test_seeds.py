"""The first seeds, in every `make test`; thousands run by `python -m tests.simulation` (docs/testing.md)."""

import pytest

from tests.simulation.plan import MODES, draw_plan
from tests.simulation.run import simulate

# They share their shapes, whose answers are computed alone once.
NUM_SEEDS = 20


def _rows() -> list[object]:
    """Each seed runs in one mode for every commit, and in the other one at night."""
    return [
        pytest.param(seed, mode, id=f"{mode}-{seed}", marks=() if seed % 2 == number else pytest.mark.slow)
        for seed in range(NUM_SEEDS)
        for number, mode in enumerate(MODES)
    ]


@pytest.mark.parametrize(("seed", "mode"), _rows())
def test_every_promise_is_kept(seed: int, mode: str) -> None:
    outcome = simulate(draw_plan(seed, mode))

    assert not outcome.broken, f"{outcome.broken}\nreplay it: python -m tests.simulation --mode {mode} --seed {seed}"
    assert outcome.num_faults
