r"""Regular expressions, rewritten so that the matcher and the validators of an output agree.

The matcher's `\\d` has the digits of all scripts, in a newer Unicode version than validators have; JSON Schema's is
0 to 9. So `\d`, `\w` and `\s` become the characters of ASCII, which fit by either rule. And where JSON has no short
escape for a control character, a text cannot have it: the matcher would leave it out where it alone may stand.
"""

import re

_ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": r" \t\n\r\f\v"}

# A control character without a short escape, as it is and as expressions spell it.
_CONTROL = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
_ESCAPED = r"\\(?:[av0]|c.|[xu]\{?0*(?:[01][0-9a-fA-F]|[0-9a-fA-F]|7[fF])(?![0-9a-fA-F])\}?)"
_SHORT_ESCAPE = re.compile(r"\\[xu]\{?0*[89aAcCdD]\}?")
# A class without an end goes to the end of the text, so that its end is not searched again behind each bracket.
_CLASS = r"\[\^?\]?(?:\\.|[^\\\]])*+(?:\]|\\?\Z)"
_PIECE = re.compile(rf"(?P<control>{_CONTROL}|{_ESCAPED}|\[(?:{_CONTROL}|{_ESCAPED})\])|{_CLASS}|\\.|.", re.DOTALL)

# RFC 3339's dates and times, without leap seconds. The matcher's own have 29 February in every year, and second 60.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_HOUR_MINUTE})"
FORMAT_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

# A character behind a backslash, or a bracket that begins or ends a class.
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


def lone_control(regex: str) -> str | None:
    """Return a control character as it is spelled where a text must have it, if JSON has no short escape for it."""
    for piece in _PIECE.finditer(regex):
        if (control := piece["control"]) is not None and not _SHORT_ESCAPE.fullmatch(control.strip("[]")):
            return control.strip("[]")
    return None


def control_in(value: object) -> str | None:
    """Return a control character in the texts of a JSON value for which JSON has no short escape."""
    if isinstance(value, str):
        control = re.search(_CONTROL, value)
        return None if control is None else control[0]
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for inner in inside if (found := control_in(inner)) is not None), None)
