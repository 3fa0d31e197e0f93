"""Grammars that clients send: schemas, regular expressions, texts, and Lark's notation."""

import json
import random
import time
from collections.abc import Sequence
from typing import Any

from octavo.generation.v1 import generation_pb2
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.grammars.compiler import LIMIT_S
from scheduler_svc.front.grammars.keywords import KEYWORDS
from scheduler_svc.front.grammars.mask_cost import too_dear
from scheduler_svc.front.grammars.parts import message_part, whole
from scheduler_svc.front.grammars.reading import read_grammar
from tests.fuzz.target import Case, Target, flipped
from tests.fuzz.values import changed_json

_NAMED: dict[str, Any] = {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "$defs": {"a": _NAMED, "b": {"$ref": "#/$defs/a"}},
        "oneOf": [{"$ref": "#/$defs/b"}, {**_NAMED, "properties": {"kind": {"enum": ["b", "c"]}}}],
    },
    {
        "type": "object",
        "properties": {"a~/b": {"type": "string", "pattern": r"^\d{2,9}[\w-]?(x|)$"}, "n": {"multipleOf": 0.5}},
        "patternProperties": {r"^x_\s*": {"anyOf": [{"format": "date"}, {"$ref": "#/properties/n"}]}},
        "minProperties": 1,
        "required": ["n"],
    },
    {"items": {"allOf": [{"minimum": 1}, True]}, "prefixItems": [{"type": ["string", "null"]}], "$id": "x"},
)
LARK = r"""start: a "b"i? (A | B)~2 // text
a: "\"x" b* | [A] -> c
b.2: /x\/(?x: [ab] # c
)/s
%ignore /[ \t]+/
A: "a".."z" {1,3}
B[stop="x"]: A A? | %regex { "pattern": "a" }
"""
PIECES = (
    *(
        '"',
        "/",
        "\\",
        "\\\\",
        '\\"',
        "//",
        "#",
        "\n",
        "|",
        "(",
        ")",
        "[",
        "[^",
        "]",
        "{",
        "}",
        "?",
        "*",
        "+",
        "~2",
        ":",
    ),
    *("a?", "(a|)", "(?x)", "(?:", "{0,}", "{,9}", r"\x{0", r"\cA", r"\d", r"\u0000", "%json", "@a", "%ignore ", "A: "),
    *(
        " A",
        " b",
        ' "x"',
        " /x/",
        "\x00",
        "\x7f",
        "\u2028",
        "é",
        "\U0001f600",
        '{"$ref": "#"}',
        "#/$defs/a",
        "~1",
        "%25",
    ),
)


class Grammars(Target):
    """The compiler's reading of a grammar, and its look at the masks' cost. A case is a kind and a text."""

    name = "grammars"
    allowed = (InvalidFieldError,)

    def corpus(self) -> Sequence[Case]:
        """Return a grammar of each kind, and schemas of most keywords."""
        texts = [("json_schema", json.dumps(schema)) for schema in SCHEMAS]
        texts += [("regex", r"(?i)a/b\/[\d\w]{0,3}(c|)|\s*?"), ("choice", '["a", "b\\n", "\u00e9"]'), ("lark", LARK)]
        return [(kind.encode(), text.encode()) for kind, text in texts]

    def change(self, case: Case, chance: random.Random) -> Case:
        """Return a grammar with another value, another keyword, other bytes, or a piece many times."""
        kind, text = case
        action = chance.random()
        if action < 0.5 and kind in (b"json_schema", b"choice"):
            if kind == b"json_schema" and chance.random() < 0.5:
                text = _below_a_keyword(text, chance)
            text = changed_json(text, chance)
        elif action < 0.7:
            text = flipped(text, chance)
        for _ in range(chance.choice([0, 0, 1, 2]) if action < 0.7 else chance.choice([1, 2, 4])):
            text = _with_piece(text, chance)
        return kind, text

    def one(self, case: Case) -> None:
        """Read it, within the time that reading and compiling have together."""
        kind, text = case[0].decode(), case[1].decode(errors="replace")
        message = generation_pb2.Grammar()
        if kind == "choice":
            message.choice.choices.extend(_texts(text))
        else:
            setattr(message, kind, text)
        begun_at_s = time.thread_time()
        try:
            parts, _ = read_grammar(whole(message_part(message, "grammar")))
            for part in parts:
                too_dear(part.rules)
        finally:
            took_s = time.thread_time() - begun_at_s
            assert took_s < LIMIT_S, f"it takes {took_s:.1f} s"


def _below_a_keyword(text: bytes, chance: random.Random) -> bytes:
    """Return a schema inside another one."""
    schema = json.loads(text)
    return json.dumps({chance.choice([*KEYWORDS]): chance.choice([schema, [schema], {"a": schema}])}).encode()


def _with_piece(text: bytes, chance: random.Random) -> bytes:
    """Return a text with a piece of it, or another one, once or many times at some place."""
    place, end = sorted((chance.randrange(len(text) + 1), chance.randrange(len(text) + 1)))
    piece = chance.choice(PIECES).encode() if chance.random() < 0.7 else text[place : min(end, place + 40)]
    return text[:place] + piece * chance.choice([1, 1, 1, 3, 50, 2000]) + text[place:]


def _texts(text: str) -> list[str]:
    """Return the texts of a JSON list; of all else, and of what no message can hold, the text itself."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = [text]
    texts = [str(value) for value in values] if isinstance(values, list) else [text]
    return [each.encode(errors="replace").decode() for each in texts]
