"""The ways of writing a call that `formats.py` has rows for; a reader stands behind each class here."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class JsonBody:
    """An object with `name` and `arguments` (or `parameters`), or a list of such objects (json_calls.py)."""


class Slot(Enum):
    """What stands between the fixed texts of a header."""

    NAME = "the name of a tool"
    ID = "letters and digits that tell calls apart"


@dataclass(frozen=True, slots=True)
class NamedBody:
    """A header with the tool's name, then the object of the arguments (named_call.py).

    Attributes:
        headers: What may stand in front of the object.
        may_be_list: Whether a list of objects as in `JsonBody` may stand there instead of the header.
        call_id: Makes the call's id of `name` and `id`, the texts of the slots. Empty: the server makes one.
    """

    headers: tuple[tuple[str | Slot, ...], ...]
    may_be_list: bool = False
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class XmlBody:
    """The name and each argument between tags (xml_call.py).

    Attributes:
        function: In front of the name; empty: nothing.
        name_end: Behind the name; empty: whitespace, or the next tag.
        key, key_end: Around the name of an argument.
        value: In front of its value; empty: nothing.
        value_end: Behind it.
        function_end: Behind the arguments.
        breaks_lines: Whether a line break next to the tags of a value belongs to them.
    """

    function: str = "<function="
    name_end: str = ">"
    key: str = "<parameter="
    key_end: str = ">"
    value: str = ""
    value_end: str = "</parameter>"
    function_end: str = "</function>"
    breaks_lines: bool = True


@dataclass(frozen=True, slots=True)
class PythonicBody:
    """A call as in Python, with named arguments, or a list of such calls (pythonic_calls.py)."""


Body = JsonBody | NamedBody | XmlBody | PythonicBody
