import numpy as np
import pytest

from octavo.bench.plan import arrival_times
from tests.support.each_row import each_row


def gaps(burstiness: float) -> "np.typing.NDArray[np.float64]":
    times = arrival_times(50.0, burstiness, np.random.default_rng(3), count=20_000)
    return np.diff(times, prepend=0.0)


@each_row(0.25, 1.0, 4.0)
def test_the_mean_rate_is_the_one_asked_for(burstiness: float) -> None:
    assert 1 / gaps(burstiness).mean() == pytest.approx(50, rel=0.02)


@each_row(0.25, 1.0, 4.0)
def test_the_variation_of_gaps_is_that_of_the_gamma_distribution(burstiness: float) -> None:
    found = gaps(burstiness)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_poisson_gaps_are_exponential() -> None:
    found = gaps(1.0) * 50
    for time in (0.1, 0.5, 1.0, 2.0):
        assert (found > time).mean() == pytest.approx(np.exp(-time), abs=0.012)


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    times = arrival_times(50.0, 1.0, np.random.default_rng(4), count=20_000)
    counts = np.histogram(times, np.arange(0, 399, 1.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.2)


def test_a_duration_takes_the_first_of_the_same_arrivals() -> None:
    times = arrival_times(100.0, 1.0, np.random.default_rng(5), duration_s=30.0)
    assert times == sorted(times) == arrival_times(100.0, 1.0, np.random.default_rng(5), count=len(times))
    assert len(times) > 2048  # more than two chunks
    assert 29.8 < times[-1] < 30
    assert times[:100] == arrival_times(100.0, 1.0, np.random.default_rng(5), count=100, duration_s=30.0)
