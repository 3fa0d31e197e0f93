"""What `tests.support.each_row` makes of a test."""

from itertools import product

import pytest

from tests.support.each_row import each_row
from tests.support.large_tables import STEP, quick_rows


@each_row((1, 1), (2, 3), (4, 5), (6, 6))
def two_of_four(one: int, other: int) -> None:
    assert one == other


@each_row("a", ("b", "c"), "d")
async def one_of_three(value: object) -> None:
    if value != ("b", "c"):
        return
    with pytest.raises(ValueError, match="never"):
        pass


def test_every_row_that_fails_is_told() -> None:
    with pytest.raises(BaseExceptionGroup, match="2 of 4 rows fail") as told:
        two_of_four()
    assert [failure.__notes__ for failure in told.value.exceptions] == [["in the row (2, 3)"], ["in the row (4, 5)"]]


async def test_one_that_fails_is_told_as_it_is() -> None:
    with pytest.raises(pytest.fail.Exception) as told:
        await one_of_three()
    assert told.value.__notes__ == ["in the row (('b', 'c'),)"]


def test_a_row_has_all_parameters() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        each_row((1,))(lambda one, other: None)()


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="tests nothing"):
        each_row()(print)


@each_row(*range(3))
def test_fixtures_are_the_same_for_every_row(number: int, *, capsys: pytest.CaptureFixture[str]) -> None:
    print(number)
    assert capsys.readouterr().out == f"{number}\n"


@each_row([2, 20], [3, 6, 6], [2, 2, 2, 8])
def test_what_stays_of_a_large_table_has_every_value_whatever_its_place(sizes: list[int]) -> None:
    rows = list(product(*map(range, sizes)))
    for order in (rows, rows[::-1], sorted(rows, key=lambda row: row[::-1])):
        quick = [order[place] for place in quick_rows(order)]

        assert [len(set(column)) for column in zip(*quick, strict=True)] == sizes
        assert len(quick) == max(*sizes, -(-len(rows) // STEP))
