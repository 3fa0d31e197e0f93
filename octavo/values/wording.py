"""How sentences for people are put together, and what of other people's text a terminal may show."""

import difflib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress


def did_you_mean(name: str, candidates: Iterable[str], *, prefix: str = "") -> str:
    """Return "; did you mean NAME?" with the nearest candidate, behind `prefix`; or "" if none is near."""
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def kind_of(value: object) -> str:
    """Return what a value is, for a sentence about a wrong value, such as "a dict" or "None"."""
    if value is None or isinstance(value, bytes):
        return "None" if value is None else "bytes"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def counted(number: int, noun: str) -> str:
    """Return "1 block", "2,000 blocks": the noun's plural takes an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """Return text on one line that cannot steer a terminal: each character that is not printable becomes "�"."""
    return "".join(character if character.isprintable() else "�" for character in text)


def shown(text: str, most: int = 100) -> str:
    """Return what comes from outside, for a sentence: on one line, cut, and unable to steer a terminal."""
    return _escaped(text if len(text) <= most else f"{text[:most]}...")


def sentence(text: str, most: int = 2000) -> str:
    """Return a message that may have text from outside in it, cut in its middle and unable to steer a terminal."""
    if len(text) > most:
        text = f"{text[: most * 3 // 4]} ... {text[-most // 4 :]}"
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def json_line(value: object, default: Callable[[object], object] | None = None) -> str:
    """Return a value as one line of JSON that a person can read and that cannot steer a terminal; `default`: json's."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def said(line: str) -> str:
    """Return what a process says in a line of its output, which is text, or JSON with it as `message`."""
    if line.startswith("{"):
        with suppress(ValueError):
            return str(json.loads(line).get("message", line))
    return line


def how_to_install(*extras: str) -> str:
    """Return the command that brings extras. Nothing is installed by name: at the package index it is not ours yet."""
    return f"pip install '.[{','.join(extras)}]' in a clone"


def temporary_folder_trouble(error: OSError) -> str:
    """Return the sentence about a failed attempt to write where the system keeps temporary files."""
    return (
        f"temporary files cannot be written ({error.strerror}); free space, or set TMPDIR to a directory with room "
        "that this user may write"
    )
