"""Incarnations: numbers that order the cores of one scheduler id.

A core takes the wall clock in milliseconds, or one more than the largest number that it is told. So a number is never
far beyond the clock, and one that is was not given by a core: whoever believed it could never be followed.
"""

from octavo_shared.errors import InvalidFieldError

# A clock that was never set begins in 1970: that is no reason to call the numbers of others absurd.
_CLOCKS_BEGIN_MS = 1_767_225_600_000  # 2026-01-01
_MAX_AHEAD_MS = 10 * 365 * 86_400_000


def require_believable(incarnation: int, unix_s: float, field: str = "incarnation") -> None:
    """Raise InvalidFieldError if a number is more than ten years ahead of our clock."""
    most = max(int(unix_s * 1000), _CLOCKS_BEGIN_MS) + _MAX_AHEAD_MS
    if incarnation > most:
        raise InvalidFieldError(field, incarnation, f"at most {most}, ten years ahead of the clock here")
