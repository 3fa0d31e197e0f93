r"""Regular expressions as those read them who check an output.

The matcher's `\d` has the digits of all scripts, and those of a newer Unicode than others know; that of JSON Schema is
0 to 9. So `\d`, `\w` and `\s` become the characters of ASCII, which fit by either rule.
"""

import re

_ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": r" \t\n\r\f\v"}

# A character behind a backslash, or one that begins or ends a class.
_MARK = re.compile(r"\\.|[\[\]]", re.DOTALL)


def with_ascii_classes(regex: str) -> str:
    """Return a regular expression in which these three stand for ASCII only."""
    depth = 0  # classes may stand in classes

    def replace(match: re.Match[str]) -> str:
        nonlocal depth
        mark = match[0]
        if mark in "[]":
            depth = max(0, depth + (1 if mark == "[" else -1))
        characters = _ASCII.get(mark)
        if characters is None:
            return mark
        return characters if depth else f"[{characters}]"

    return _MARK.sub(replace, regex)
