"""Values as models write them, in JSON or as in Python, as JSON text."""

import ast
import json

# What Python raises for a text that is nested too deeply, too long, or no value.
_NO_VALUE = (ValueError, SyntaxError, MemoryError, RecursionError, TypeError)


def value_of(text: str) -> tuple[str, object]:
    """Return a value as JSON text, and the value.

    Raises: ValueError: it is neither JSON nor a Python literal that JSON can express.
    """
    try:
        return text, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    try:
        written = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        written.encode()  # half of a surrogate pair is no text
        return written, json.loads(written)
    except _NO_VALUE as error:
        raise ValueError(f"{text[:64]!r} is not a JSON value") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
