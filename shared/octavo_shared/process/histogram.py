"""A histogram that costs a plain addition for each value, and becomes a Prometheus one when it is read.

Pure: filling it needs no library; `octavo_shared/process/metric.py` makes it a metric.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts of values by size. Not thread-safe.

    Args:
        bounds: Upper bounds of the buckets, ascending, in the unit of the values; a value belongs to the first
            bound that is not below it. Beyond the last one is a bucket without a bound.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, num_times: int = 1) -> None:
        """Count a value, maybe several times."""
        self._counts[bisect_left(self._bounds, value)] += num_times
        self._sum += value * num_times

    @property
    def num_observed(self) -> int:
        """How many values were counted."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """The sum of the values."""
        return self._sum

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each bound as Prometheus writes it, and how many values are not above it."""
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
