"""What `make test` runs of a large table."""

from itertools import product
from pathlib import Path

import pytest

from tests.support.large_tables import SMALL, STEP, step_of, thin


@pytest.mark.parametrize("sizes", [(4, 4), (8, 8), (5, 4, 7), (12, 8), (6, 5, 4), (10, 30)])
def test_every_value_of_every_parameter_is_met(sizes: tuple[int, ...]) -> None:
    cases = list(product(*map(range, sizes)))
    kept = cases[:: step_of(len(cases))]
    assert [len(set(values)) for values in zip(*kept, strict=True)] == list(sizes)
    assert len(kept) <= len(cases) // STEP + 1


@pytest.mark.parametrize("number", range(2 * SMALL))
def test_a_large_table(number: int) -> None:
    assert step_of(number + 1) >= STEP


def test_what_is_left_out_of_an_area_has_the_marker(request: pytest.FixtureRequest) -> None:
    folder = Path(__file__).parent
    table = [item for item in request.session.items if item.path == Path(__file__) and "a_large_table[" in item.name]

    def left_out() -> list[pytest.Item]:
        return [item for item in table if item.get_closest_marker("further_case")]

    thin(table, [folder / "elsewhere"])
    assert left_out() == []
    thin(table, [folder])
    kept = table[:: step_of(len(table))] if len(table) > SMALL else table
    assert left_out() == [item for item in table if item not in kept]
