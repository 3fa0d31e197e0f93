"""Of a large table of cases the quick suite runs some, chosen by what is in them, and `make test-all` all of them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

# What compares arithmetic or parses texts, in tables that multiply parameters with each other.
TESTS = Path(__file__).parents[1]
AREAS = (TESTS / "numerics", TESTS / "kernels", TESTS / "unit/scheduler_svc/front/tool_calls")
SMALL, STEP = 8, 6


def quick_rows(rows: Sequence[Sequence[object]]) -> set[int]:
    """Return the places of the rows that stay: a sixth, and as many as it takes for every value of every parameter.

    Beyond that they have as many pairs of values as they can. A value that one row alone has tells the rows of a list
    apart; a list stays by place.
    """
    named = [[(column, repr(value)) for column, value in enumerate(row)] for row in rows]
    counts = Counter(value for row in named for value in row)
    values = [{value for value in row if counts[value] > 1} for row in named]
    pairs, wanted = [set(combinations(sorted(row), 2)) for row in values], set[object]().union(*values)
    left, chosen, seen, used = list(range(len(rows))), set[int](), set[object](), Counter[object]()

    def gain(place: int) -> tuple[int, int, int]:
        return len(values[place] - seen), len(pairs[place] - seen), -sum(used[value] for value in values[place])

    while len(chosen) * STEP < len(rows) or not wanted <= seen:
        best = max(left, key=gain)
        if gain(best)[:2] == (0, 0):
            return chosen | set(left[:: STEP * len(left) // (len(rows) - STEP * len(chosen))])
        left.remove(best)
        chosen.add(best)
        used.update(values[best])
        seen |= values[best] | pairs[best]
    return chosen


def is_thinned(path: Path, areas: Sequence[Path] = AREAS) -> bool:
    """Whether a file is in one of the areas."""
    return any(map(path.is_relative_to, areas))


def thin(items: Sequence[pytest.Item], areas: Sequence[Path] = AREAS) -> None:
    """Mark what large tables leave out."""
    tables = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("slow") is None:
            tables[item.path, item.originalname].append(item)
    for (path, _), cases in tables.items():
        if len(cases) > SMALL and is_thinned(path, areas):
            quick = quick_rows([list(case.callspec.params.values()) for case in cases])
            for place, case in enumerate(cases):
                if place not in quick:
                    case.add_marker(pytest.mark.further_case)
