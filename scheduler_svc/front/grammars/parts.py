"""The grammars that a client may ask for, as the parts that a grammar of the matcher is made of.

A part follows one thing: a schema, a regular expression, some texts, a grammar in Lark's notation. The whole is one
part, or a Lark grammar that names several. Parts are only measured here: `reading.py` reads them, in the compiler's
process.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

from pydantic_core import to_json

from octavo_shared.errors import InvalidFieldError
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES

if TYPE_CHECKING:  # the compiler's process does not need it
    from octavo.generation.v1 import generation_pb2

MAX_CHOICES = 1024

# The noun for each kind of part, for errors.
_NOUNS = {
    "json_schema": "a JSON schema",
    "json_object": "true",
    "regex": "a regular expression",
    "choice": "a list of texts",
    "lark": "a grammar in Lark's notation",
}


@dataclass(frozen=True, slots=True)
class Part:
    """What an output follows, or a stretch of it, as a client sent it.

    Attributes:
        kind: The native API's field for it.
        text: As it was sent; choices are JSON.
        field: The field's name in errors.
    """

    kind: str
    text: str
    field: str

    @property
    def noun(self) -> str:
        """What it is, for errors."""
        return _NOUNS[self.kind]


@dataclass(frozen=True)
class AskedGrammar:
    """A grammar as clients asked for it.

    Attributes:
        parts: What it is made of, by name.
        field: The field that asks for it.
        main: Rules in Lark's notation, in which `@name` is a part; empty: the only part is the whole.
    """

    parts: Mapping[str, Part]
    field: str
    main: str = ""

    @cached_property
    def frame(self) -> bytes:
        """All of it, as JSON."""
        parts = {name: (part.kind, part.text, part.field) for name, part in self.parts.items()}
        return json.dumps([parts, self.field, self.main]).encode()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the frame, 32 bytes."""
        return hashlib.sha256(self.frame).digest()

    @classmethod
    def of_frame(cls, frame: bytes) -> Self:
        """Return the grammar of a frame."""
        parts, field, main = json.loads(frame)
        return cls({name: Part(*part) for name, part in parts.items()}, field, main)


def whole(part: Part) -> AskedGrammar:
    """Return the grammar of outputs that follow one part."""
    return AskedGrammar({"whole": part}, part.field)


def message_part(message: "generation_pb2.Grammar", name: str, *, is_whole_path: bool = False) -> Part:
    """Return the grammar of a request as a part.

    Args:
        message: The request's grammar.
        name: The field's name in errors.
        is_whole_path: Whether `name` includes the field inside the grammar.

    Raises: InvalidFieldError: it is absent or too large; other faults are found later.
    """
    kind = message.WhichOneof("grammar")
    path = name if is_whole_path else f"{name}.{kind}"
    match kind:
        case None:
            raise InvalidFieldError(name, "empty", "one of json_schema, regex, choice, json_object and lark")
        case "json_object":
            if not message.json_object:
                raise InvalidFieldError(path, "false", "true, or absent")
            return object_part(path)
        case "choice":
            choices = list(message.choice.choices)
            return _measured(Part(kind, json.dumps(choices), path), sum(len(choice.encode()) for choice in choices))
        case _:
            text = str(getattr(message, kind))
            return _measured(Part(kind, text, path), len(text.encode()))


def schema_part(schema: str | Mapping[str, object], path: str) -> Part:
    """Return JSON by a schema, which is a JSON text or the object itself. Raises InvalidFieldError: it is too large."""
    text = schema if isinstance(schema, str) else to_json(schema).decode()
    return _measured(Part("json_schema", text, path), len(text.encode()))


def object_part(path: str) -> Part:
    """Return any JSON object."""
    return Part("json_object", "true", path)


def lark_text(text: str) -> str:
    """Return a text as it stands in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def check_size(num_bytes: int, part: Part) -> None:
    """Refuse a part that is too large, as it was sent or converted. Raises InvalidFieldError."""
    if num_bytes > MAX_GRAMMAR_BYTES:
        rule = f"{part.noun} of at most {MAX_GRAMMAR_BYTES} bytes"
        raise InvalidFieldError(part.field, f"{num_bytes} bytes long", rule)


def _measured(part: Part, num_bytes: int) -> Part:
    check_size(num_bytes, part)
    return part
