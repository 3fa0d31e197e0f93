"""Scenarios and how they are measured: the ways of a scenario take turns, and the table has medians over the turns.

A pair is one turn of each way, in the opposite order to the pair before, so that a slow spell of the machine hits all.
"""

import asyncio
import math
import os
import statistics
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from octavo.bench.provenance import Provenance, markdown_table
from octavo.bench.summary import distribution

T = TypeVar("T")

Figures: TypeAlias = Mapping[str, float]  # by name, the unit behind a comma

# With fewer pairs the interval of 95 % is wider than all that was seen.
MIN_PAIRS_OF_INTERVAL = 6
_DOUBT = 0.05
_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """One way of doing what a scenario measures."""

    name: str  # in the table
    measure: Callable[[], Awaitable[Figures]]
    beside: str = ""  # name of the way that it is compared with; empty: none


Groups: TypeAlias = AsyncGenerator[Sequence[Way], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How large a scenario is; `model` None: the demo model in float32."""

    is_smallest: bool = False
    model: Path | None = None

    def of(self, full: T, smallest: T) -> T:
        """Return a value for this size."""
        return smallest if self.is_smallest else full

    def directory(self) -> Path:
        from benchmarks.float32_model import float32_model  # torch takes seconds to load

        return self.model or float32_model()


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is measured, in a sentence."""

    name: str  # on the command line and in the table
    what: str
    # Yields ways that take turns, while what they need runs; the next group comes after all their pairs.
    groups: Callable[[Size], Groups]
    num_pairs: int  # how many pairs it takes


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, what: str, pairs: int) -> Callable[[Callable[[Size], Groups]], None]:
    def add(groups: Callable[[Size], Groups]) -> None:
        SCENARIOS[name] = Scenario(name, what, groups, pairs)

    return add


def in_turn(measure: Callable[..., Figures], *arguments: object) -> Callable[[], Awaitable[Figures]]:
    """Return how a turn is taken that computes in this process."""

    async def take() -> Figures:
        return await asyncio.to_thread(measure, *arguments)

    return take


def median_and_p99(name: str, values_us: Iterable[float]) -> dict[str, float]:
    found = distribution(values_us)
    assert found is not None, "something was measured"
    return {f"{name}, µs": found.p50, f"{name} p99, µs": found.p99}


@dataclass(frozen=True, slots=True)
class Line:
    """The values of one figure of one way, pair by pair, and the values that they are compared with."""

    scenario: str
    way: str
    figure: str
    values: list[float]
    beside: str
    others: list[float]

    def cells(self) -> list[str]:
        ratios = [value / other for value, other in zip(self.values, self.others, strict=False) if other]
        ratio = f"{_with_interval(ratios)} of {self.beside}" if ratios else ""
        return [self.scenario, self.way, self.figure, _with_interval(self.values), ratio]


async def run_scenario(
    chosen: Scenario, size: Size, num_pairs: int, only: str = "", say: Callable[[str], None] = lambda _: None
) -> list[Line]:
    """Let the ways with `only` in their names take turns."""
    lines: dict[tuple[str, str], Line] = {}
    async with aclosing(chosen.groups(size)) as groups:
        async for group in groups:
            ways = [way for way in group if only in way.name]
            found: dict[Way, list[Figures]] = {way: [] for way in ways}
            for number in range(num_pairs):
                for way in ways if number % 2 == 0 else reversed(ways):
                    say(f"{chosen.name}, pair {number + 1} of {num_pairs}: {way.name}")
                    found[way].append(await way.measure())
            for way, turns in found.items():
                for name in turns[0]:
                    values = [turn[name] for turn in turns]
                    other = lines.get((way.beside, name))
                    others = other.values if other is not None else []
                    lines[way.name, name] = Line(chosen.name, way.name, name, values, way.beside, others)
    return list(lines.values())


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the ends of its 95 % interval by the order of the values (binomial)."""
    ordered, number = sorted(values), len(values)
    below = 0
    while sum(math.comb(number, count) for count in range(below + 1)) / 2**number <= _DOUBT / 2:
        below += 1
    first = max(0, below - 1)
    return statistics.median(ordered), ordered[first], ordered[number - 1 - first]


def _with_interval(values: Sequence[float]) -> str:
    median, low, high = map(_shown, median_interval(values))
    return median if low == high else f"{median} ({low} to {high})"


def _shown(value: float) -> str:
    digits = _DIGITS - 1 - math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    return f"{value:,.{max(0, digits)}f}"


def table(lines: Sequence[Line]) -> str:
    heading = ["scenario", "way", "figure", "median (interval)", "ratio (interval)"]
    return markdown_table(heading, (line.cells() for line in lines), num_texts=3)


def about(made: Provenance) -> str:
    """Return what stands below a table: where the figures are from, the machine's load, what intervals are."""
    return (
        f"{made}; load {os.getloadavg()[0]:.1f}. Intervals hold the true median with 95 %; with fewer than "
        f"{MIN_PAIRS_OF_INTERVAL} pairs they are all that was seen."
    )
