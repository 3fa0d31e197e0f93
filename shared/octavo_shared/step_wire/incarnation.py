"""Incarnations: numbers that order the engines of one scheduler id.

An engine takes the wall clock in milliseconds, or one more than the largest number that it is told. So a number is
never far beyond the clock. Such a number is from no engine, and no engine could ever follow a peer that believes it.
"""

from octavo.values.wording import counted
from octavo_shared.errors import InvalidFieldError

# A clock that was never set begins in 1970: that is no reason to call other numbers absurd.
_CLOCKS_BEGIN_MS = 1_767_225_600_000  # 2026-01-01
_DAY_MS = 86_400_000
_MAX_AHEAD_DAYS = 3650


def require_believable(
    incarnation: int, unix_s: float, field: str = "incarnation", max_ahead_days: int = _MAX_AHEAD_DAYS
) -> None:
    """Raise InvalidFieldError if a number is too far ahead of our clock: by default ten years."""
    most = max(int(unix_s * 1000), _CLOCKS_BEGIN_MS) + max_ahead_days * _DAY_MS
    if incarnation > most:
        ahead = "ten years" if max_ahead_days == _MAX_AHEAD_DAYS else counted(max_ahead_days, "day")
        raise InvalidFieldError(field, incarnation, f"at most {most}, {ahead} ahead of the clock here")
