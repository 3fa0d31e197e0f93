"""When the requests of an open loop are sent: a renewal process with gamma-distributed gaps."""

import numpy as np


def arrival_times(rate: float, burstiness: float, count: int, generator: np.random.Generator) -> list[float]:
    """Return the times of so many arrivals, in seconds from the beginning, ascending.

    The gaps are independent, with mean 1 / rate and squared coefficient of variation 1 / burstiness. With burstiness 1
    they are exponential: a Poisson process.

    Args:
        rate: Arrivals a second, above 0.
        burstiness: Shape of the gamma distribution, above 0. Below 1: in bursts; above 1: more even than Poisson.
        count: How many.
        generator: Where the gaps come from.
    """
    gaps = generator.gamma(burstiness, 1 / (rate * burstiness), count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def arrival_times_until(
    duration_s: float, rate: float, burstiness: float, generator: np.random.Generator
) -> list[float]:
    """Return the arrivals before `duration_s`; the first of those that `arrival_times` would return."""
    # In chunks of one size, so that the same seed gives the same gaps whatever the duration is.
    begin_s = 0.0
    times: list[float] = []
    while begin_s < duration_s:
        chunk = arrival_times(rate, burstiness, _CHUNK, generator)
        times += (begin_s + time_s for time_s in chunk)
        begin_s = times[-1]
    return [time_s for time_s in times if time_s < duration_s]


_CHUNK = 1024
