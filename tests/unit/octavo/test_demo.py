"""What `octavo demo` makes of two answers; the command itself is in tests/e2e/test_up.py."""

import pytest

from octavo.commands.demo import compare
from octavo.errors import InternalError
from tests.support.each_row import each_row


@each_row(([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0))
def test_answers_that_differ_are_an_error(one: list[int], other: list[int], index: int) -> None:
    with pytest.raises(InternalError, match=f"differ from token {index} on"):
        compare(one, other)


def test_equal_answers_are_fine() -> None:
    compare([1, 2], (1, 2))
