"""The seeds behind the first ones, where a change concerns the simulation."""

import pytest

from tests.simulation.test_seeds import NUM_QUICK_SEEDS, NUM_SEEDS, require_short_run


@pytest.mark.parametrize("seed", range(NUM_QUICK_SEEDS, NUM_SEEDS))
def test_every_promise_is_kept_in_a_short_run(seed: int) -> None:
    require_short_run(seed)
