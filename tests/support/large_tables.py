"""Of a large table of cases the quick suite runs every fourth or so, and `make test-all` all of them."""

from collections import defaultdict
from collections.abc import Sequence
from math import gcd
from pathlib import Path

import pytest

# What compares arithmetic or parses texts, in tables that multiply parameters with each other.
TESTS = Path(__file__).parents[1]
AREAS = (TESTS / "numerics", TESTS / "kernels", TESTS / "unit/scheduler_svc/front/tool_calls")
SMALL, STEP = 8, 4


def step_of(num_cases: int) -> int:
    """Return a step that does not stay at the same value of any parameter.

    It has no common divisor with the size of the table, thus none with the number of values of a parameter.
    """
    return next(step for step in range(STEP, num_cases + STEP + 1) if gcd(step, num_cases) == 1)


def is_thinned(path: Path, areas: Sequence[Path] = AREAS) -> bool:
    """Whether a file is in one of the areas."""
    return any(map(path.is_relative_to, areas))


def thin(items: Sequence[pytest.Item], areas: Sequence[Path] = AREAS) -> None:
    """Mark what a step through each large table leaves out."""
    tables = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("slow") is None:
            tables[item.path, item.originalname].append(item)
    for (path, _), cases in tables.items():
        if len(cases) > SMALL and is_thinned(path, areas):
            step = step_of(len(cases))
            for index, case in enumerate(cases):
                if index % step:
                    case.add_marker(pytest.mark.further_case)
