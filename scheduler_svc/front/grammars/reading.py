"""Reads grammars as clients sent them, and finds errors: in the compiler's process, as it may take long.

llguidance takes the whole as JSON: rules that name each other, of schemas or in Lark's notation.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from pydantic_core import to_json

from octavo_shared.errors import InvalidFieldError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grammar.matcher import MatcherTokenizer, reason_against
from octavo_shared.process.clock import monotonic_s
from scheduler_svc.front.grammars.mask_cost import too_dear
from scheduler_svc.front.grammars.parts import MAX_CHOICES, AskedGrammar, Part, check_size, lark_text
from scheduler_svc.front.grammars.schema import Place, alone, checked_schema, subschemas, with_ascii_classes
from scheduler_svc.front.text.json_text import MalformedJsonError, load_json, shown_json

# How long parts of a schema are compiled alone to find the place of what is wrong, in seconds.
SEARCH_S = 0.2

# What a Lark grammar may not do: set the matcher's options, or hold schemas, whose keywords would go unchecked.
_DIRECTIVE = re.compile(r"%(?!ignore\b|regex\b)\w+|(?m:^|(?<=[\s:|(]))@\w+")

# A text, a regular expression or a comment, whole; or the beginning of one without an end, in one go: searching for
# the end again behind each quotation mark would take seconds.
_TEXT = re.compile(
    r'(?P<whole>"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)++/|//[^\n]*|#[^\n]*)|"(?:[^"\\\n]|\\.)*+|/(?:[^/\\\n]|\\.)*+'
)

_ANY_OBJECT = {"type": "object"}

Verdict: TypeAlias = Grammar | InvalidFieldError


@dataclass(frozen=True)
class ReadPart:
    """A part that was read.

    Attributes:
        rules: As llguidance reads them: `json_schema` or `lark_grammar`.
        shown: Its beginning, for errors.
        schema: The schema that was sent; None: it is none.
    """

    part: Part
    rules: Mapping[str, object]
    shown: str
    schema: Mapping[str, object] | None = None


def verdicts(tokenizer: MatcherTokenizer, asked: AskedGrammar) -> Iterator[Verdict]:
    """Yield verdicts on a grammar: its wire form, or its error, then the error once more with a better place.

    Call it in a thread with a large stack.
    """
    try:
        read, grammar = read_grammar(asked)
    except InvalidFieldError as error:
        yield error
        return
    if not (words := reason_against(tokenizer, grammar)):
        dear = next(((one, found) for one in read if (found := too_dear(one.rules))), None)
        yield grammar if dear is None else refusal(dear[0].part, dear[0].shown, dear[1])
        return
    yield refusal(read[0].part, read[0].shown, words)
    found_in = (
        (one, found) for one in read if (found := reason_against(tokenizer, _grammar_of([one.rules], one.part)))
    )
    wrong, words = next(found_in, (read[0], words))
    place = None if wrong.schema is None else _place(wrong.schema, words, tokenizer)
    is_inside = place is not None and place.above is not None
    shown = f"a schema that cannot be held at {place}" if is_inside else wrong.shown
    yield refusal(wrong.part, shown, words)


def read_grammar(asked: AskedGrammar) -> tuple[Sequence[ReadPart], Grammar]:
    """Return the parts of a grammar, and its wire form. Raises InvalidFieldError: it is wrong, or too large."""
    read = {name: _read(part) for name, part in asked.parts.items()}
    first = next(iter(read.values()))
    if not asked.main:
        return [first], _grammar_of([first.rules], first.part)
    rules = [{"name": name, **one.rules} for name, one in read.items()]
    return list(read.values()), _grammar_of([{"name": "main", "lark_grammar": asked.main}, *rules], first.part)


def _grammar_of(rules: Sequence[Mapping[str, object]], part: Part) -> Grammar:
    """Return a grammar of the matcher's; the first rules are those of the output."""
    body = to_json({"grammars": list(rules)})
    check_size(len(body), part)
    return Grammar(body)


def _read(part: Part) -> ReadPart:
    match part.kind:
        case "json_schema":
            return _read_schema(part)
        case "json_object":
            return ReadPart(part, {"json_schema": checked_schema(_ANY_OBJECT, part.field)}, part.text)
        case "regex":
            return _read_regex(part)
        case "choice":
            return _read_choices(part)
        case "lark":
            return _read_lark(part)
    raise AssertionError(f"the front asks for {part.kind}")


def _read_schema(part: Part) -> ReadPart:
    try:
        parsed = load_json(part.text.encode())
    except MalformedJsonError as error:
        raise InvalidFieldError(part.field, part.text or "empty", f"{part.noun} ({error})") from error
    return ReadPart(part, {"json_schema": checked_schema(parsed, part.field)}, shown_json(parsed), parsed)


def _read_regex(part: Part) -> ReadPart:
    if not part.text:
        raise InvalidFieldError(part.field, "empty", "at least 1 character long")
    # A `/` would end it, and so would the end of a line.
    escapes = {"/": r"\/", "\n": r"\n"}
    escaped = re.sub(
        r"(\\.)|[/\n]", lambda match: match[1] or escapes[match[0]], with_ascii_classes(part.text), flags=re.DOTALL
    )
    return ReadPart(part, {"lark_grammar": f"start: /{escaped}/"}, part.text)


def _read_choices(part: Part) -> ReadPart:
    choices: list[str] = json.loads(part.text)
    shown = shown_json(choices)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidFieldError(part.field, f"{len(choices)} texts long", f"1 to {MAX_CHOICES} texts long")
    if len(set(choices)) < len(choices) or "" in choices:
        raise InvalidFieldError(part.field, shown, "texts of at least 1 character, none of them twice")
    return ReadPart(part, {"lark_grammar": f"start: {' | '.join(map(lark_text, choices))}"}, shown)


def _read_lark(part: Part) -> ReadPart:
    if directive := _DIRECTIVE.search(_without_texts(part.text)):
        rule = f"{part.noun} whose only directives are %ignore and %regex"
        raise InvalidFieldError(part.field, f"one with {directive[0]}", rule)
    return ReadPart(part, {"lark_grammar": part.text}, part.text or "empty")


def _without_texts(grammar: str) -> str:
    """Return a Lark grammar without its texts, regular expressions and comments, in which anything may stand.

    One without an end stays: the library refuses it.
    """
    return _TEXT.sub(lambda match: '""' if match["whole"] else match[0], grammar)


def refusal(part: Part, shown: str, words: str) -> InvalidFieldError:
    """Return the refusal of a part that does not compile."""
    return InvalidFieldError(part.field, shown, f"{part.noun} that outputs can follow: {' '.join(words.split())}")


def _place(schema: Mapping[str, object], words: str, tokenizer: MatcherTokenizer) -> Place:
    """Return the place of the innermost schema that alone is wrong in the same words, if that is found in time."""
    found, end_s = Place(), monotonic_s() + SEARCH_S
    for place, inner in islice(subschemas(schema), 1, None):
        if monotonic_s() > end_s:
            break
        tried = Grammar(to_json({"grammars": [{"json_schema": alone(schema, inner)}]}))
        if place.is_in(found) and reason_against(tokenizer, tried) == words:
            found = place
    return found
