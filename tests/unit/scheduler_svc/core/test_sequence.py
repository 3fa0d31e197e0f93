"""Groups and their sequences."""

from tests.support.driving import group


def test_equal_requests_are_still_two_sequences() -> None:
    assert group(0, 2).sequences[0] != group(0, 2).sequences[0]
