"""Finds markers in text that arrives in pieces."""

import re
from collections.abc import Sequence
from functools import lru_cache


def find_marker(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Return where the first marker begins, and which marker it is.

    None: the text ends with the beginning of a marker, or has none; the place is then the end of the text.
    """
    for match in _first_characters(tuple(markers)).finditer(text):
        marker, may_come = match_marker(text, match.start(), markers)
        if marker is not None or may_come:
            return match.start(), marker
    return len(text), None


def match_marker(text: str, position: int, markers: Sequence[str]) -> tuple[str | None, bool]:
    """Return the marker that begins at `position`, and whether more text may complete one there."""
    for marker in markers:
        if text.startswith(marker, position):
            return marker, False
    return None, any(marker.startswith(text[position : position + len(marker)]) for marker in markers)


@lru_cache(maxsize=64)
def _first_characters(markers: tuple[str, ...]) -> re.Pattern[str]:
    characters = "".join(re.escape(marker[0]) for marker in markers)
    return re.compile(f"[{characters}]" if characters else r"(?!)")
