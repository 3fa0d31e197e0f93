"""The grammars that a client may ask for, as the parts that a grammar of the matcher is made of.

A part follows one thing: a schema, a regular expression, some texts, a grammar in Lark's notation. The whole is one
part, or a Lark grammar that names others. llguidance reads it as JSON; nothing here needs the library.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import to_json

from octavo.generation.v1 import generation_pb2
from octavo_shared.errors import InvalidFieldError
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar
from scheduler_svc.front.grammars.patterns import with_ascii_classes
from scheduler_svc.front.grammars.schema import checked_schema
from scheduler_svc.front.text.json_text import MalformedJsonError, load_json, shown_json

MAX_CHOICES = 1024

# What a Lark grammar may not do: set the matcher's options, or hold schemas, whose keywords nobody would have checked.
_DIRECTIVE = re.compile(r"%(?!ignore\b|regex\b)\w+|(?m:^|(?<=[\s:|(]))@\w+")

# A text, a regular expression or a comment, whole; or a beginning of one, in one go: who looked for its end again
# behind each quotation mark would take seconds.
_TEXT = re.compile(
    r'(?P<whole>"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)++/|//[^\n]*|#[^\n]*)|"(?:[^"\\\n]|\\.)*+|/(?:[^/\\\n]|\\.)*+'
)

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Part:
    """What an output follows, or a stretch of it.

    Attributes:
        rules: As llguidance reads them: `json_schema` or `lark_grammar`.
        field: What errors call it.
        shown: Its beginning, for errors.
        noun: What it is, for errors.
        schema: The schema that was sent; None: it is none.
    """

    rules: Mapping[str, object]
    field: str
    shown: str
    noun: str
    schema: Mapping[str, object] | None = None


@dataclass(frozen=True)
class AskedGrammar:
    """A grammar with what errors need to name what is wrong in it.

    Attributes:
        grammar: What travels.
        field: The field that asks for it.
        parts: What it is made of, as clients sent it.
    """

    grammar: Grammar
    field: str
    parts: Sequence[Part]


def whole(part: Part) -> AskedGrammar:
    """Return the grammar of outputs that follow one part. Raises InvalidFieldError: it is too large."""
    return AskedGrammar(grammar_of([part.rules], part), part.field, [part])


def joined(main: str, named: Mapping[str, Part], field: str) -> AskedGrammar:
    """Return the grammar of outputs that follow rules in Lark's notation, in which `@name` is a part.

    Args:
        main: The rules.
        named: The parts.
        field: What asks for it.

    Raises: InvalidFieldError: it is too large.
    """
    parts = list(named.values())
    rules = [{"name": name, **part.rules} for name, part in named.items()]
    return AskedGrammar(grammar_of([{"name": "main", "lark_grammar": main}, *rules], parts[0]), field, parts)


def grammar_of(rules: Sequence[Mapping[str, object]], part: Part) -> Grammar:
    """Return a grammar of the matcher's; the first rules are those of the output."""
    body = to_json({"grammars": list(rules)})
    _check_size(len(body), part.field, part.noun)
    return Grammar(body)


def message_part(message: generation_pb2.Grammar, name: str, *, is_whole_path: bool = False) -> Part:
    """Return what a request asks for.

    Args:
        message: Its grammar.
        name: What errors call it.
        is_whole_path: Whether that names the field in it, too.

    Raises: InvalidFieldError: it is refused; what only compiling it shows is found later.
    """
    kind = message.WhichOneof("grammar")
    path = name if is_whole_path else f"{name}.{kind}"
    match kind:
        case "json_schema":
            return schema_part(message.json_schema, path)
        case "regex":
            return _regex_part(message.regex, path)
        case "choice":
            return _choice_part(message.choice.choices, path)
        case "lark":
            return _lark_part(message.lark, path)
        case "json_object":
            if not message.json_object:
                raise InvalidFieldError(path, "false", "true, or absent")
            return object_part(path)
    raise InvalidFieldError(name, "empty", "one of json_schema, regex, choice, json_object and lark")


def schema_part(schema: str | Mapping[str, object], path: str) -> Part:
    """Return JSON by a schema, which is a JSON text or the object itself. Raises InvalidFieldError: it is refused."""
    noun = "a JSON schema"
    if not isinstance(schema, str):
        schema = to_json(schema).decode()
    _check_size(len(schema.encode()), path, noun)
    try:
        parsed = load_json(schema.encode())
    except MalformedJsonError as error:
        raise InvalidFieldError(path, schema or "empty", f"a JSON schema ({error})") from error
    return Part({"json_schema": checked_schema(parsed, path)}, path, shown_json(parsed), noun, parsed)


def object_part(path: str) -> Part:
    """Return any JSON object."""
    return Part({"json_schema": checked_schema(ANY_OBJECT, path)}, path, "true", "true")


def _regex_part(regex: str, path: str) -> Part:
    noun = "a regular expression"
    _check_size(len(regex.encode()), path, noun)
    if not regex:
        raise InvalidFieldError(path, "empty", "at least 1 character long")
    # A `/` would end it, and so would the end of a line.
    escapes = {"/": r"\/", "\n": r"\n"}
    escaped = re.sub(
        r"(\\.)|[/\n]", lambda match: match[1] or escapes[match[0]], with_ascii_classes(regex), flags=re.DOTALL
    )
    return Part({"lark_grammar": f"start: /{escaped}/"}, path, regex, noun)


def _choice_part(choices: Sequence[str], path: str) -> Part:
    shown = shown_json(list(choices))
    _check_size(sum(len(choice.encode()) for choice in choices), path, "a list of texts")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidFieldError(path, f"{len(choices)} texts long", f"1 to {MAX_CHOICES} texts long")
    if len(set(choices)) < len(choices) or "" in choices:
        raise InvalidFieldError(path, shown, "texts of at least 1 character, none of them twice")
    return Part({"lark_grammar": f"start: {' | '.join(map(lark_text, choices))}"}, path, shown, "a list of texts")


def _lark_part(text: str, path: str) -> Part:
    noun = "a grammar in Lark's notation"
    _check_size(len(text.encode()), path, noun)
    if directive := _DIRECTIVE.search(_without_texts(text)):
        raise InvalidFieldError(
            path, f"one with {directive[0]}", f"{noun} whose only directives are %ignore and %regex"
        )
    return Part({"lark_grammar": text}, path, text or "empty", noun)


def lark_text(text: str) -> str:
    """Return a text as it stands in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def _without_texts(grammar: str) -> str:
    """Return a Lark grammar without its texts, regular expressions and comments, in which anything may stand.

    One without an end stays: the library refuses it.
    """
    return _TEXT.sub(lambda match: '""' if match["whole"] else match[0], grammar)


def _check_size(num_bytes: int, path: str, noun: str) -> None:
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidFieldError(path, f"{num_bytes} bytes long", f"{noun} of at most {MAX_GRAMMAR_BYTES} bytes")
