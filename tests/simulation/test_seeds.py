"""The first seeds, in every `make test`; thousands run by `python -m tests.simulation` (docs/testing.md)."""

import pytest

from tests.simulation.draw import draw_plan
from tests.simulation.plan import MODES, Plan, shortened
from tests.simulation.run import simulate

# They share their shapes, whose answers are computed alone once.
NUM_SEEDS = 20
NUM_QUICK_SEEDS = 12  # the further ones are in test_further_seeds.py


def _require_promises(plan: Plan, *options: str) -> None:
    outcome = simulate(plan)

    words = " ".join((f"--mode {plan.mode} --seed {plan.seed}", *options))
    assert not outcome.broken, f"{outcome.broken}\nreplay it: python -m tests.simulation {words}"
    assert outcome.num_faults


def require_short_run(seed: int) -> None:
    """Run a seed, shortened, in one of the modes."""
    _require_promises(shortened(draw_plan(seed, MODES[seed % 2])), "--short")


@pytest.mark.parametrize("seed", range(NUM_QUICK_SEEDS))
def test_every_promise_is_kept_in_a_short_run(seed: int) -> None:
    require_short_run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_promise_is_kept(seed: int, mode: str) -> None:
    _require_promises(draw_plan(seed, mode))
