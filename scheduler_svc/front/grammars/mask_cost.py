r"""What one mask of a grammar may cost an executor, as far as the text of the grammar shows it.

The matcher has limits of its own, but checks them between pieces of work, and one piece grows with the square of what
may be absent in a row: `a?` 40,000 times costs 27 s. At the numbers here a mask takes up to 40 ms (49,152 tokens, AMD
EPYC with AVX2, 2026-11-28). Some large expressions that would be cheap are refused, too.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from scheduler_svc.front.grammars.schema import subschemas

# The sum of the squares of what may be absent in each expression; one of 1,000 costs a mask of some 15 ms.
MAX_OPTIONAL_SQUARES = 1_500_000

# Optional properties and alternatives of a schema, or symbols in the rules of a Lark grammar.
MAX_LOOSE = 5000

# Optional properties of one object: of one that requires none, and in front of the first that is required. A row of the
# matcher has 2,000 items, and each of them is 4 in the one and 3 in the other.
MAX_OPTIONAL, MAX_OPTIONAL_IN_FRONT = 498, 666

# An escape, the beginning of a group, or what lets something be absent. Classes and comments count too, as those of the
# verbose mode cannot be told from text.
_OPTIONAL = re.compile(
    r"\\.|(?P<empty>\((?:\?[^():?]*+:?)?\s*(?=[|)])|\A\s*(?=\|)|\|\s*(?=[|)]|\Z))|\(\?|(?P<mark>[?*]|\{\s*0*\s*[,}])",
    re.DOTALL,
)
_VERBOSE = re.compile(r"\(\?\w*x")

# Texts, expressions and comments of Lark, names, and what lets something be absent. A text without an end counts, too:
# searching for its end again behind each quotation mark would take minutes.
_LARK = re.compile(
    r'(?P<text>"(?:[^"\\\n]|\\.)*+"?)|(?P<regex>/(?:[^/\\\n]|\\.)++/?)|//[^\n]*|#[^\n]*|'
    r"(?P<name>\w+)(?P<head>\s*+(?:\[[^\]]{0,99}\]\s*+|\.-?\d+\s*+|\{[^}]{0,99}\}\s*+){0,4}:)?|(?P<mark>[?*|\[]|\{\s*+0|~)"
)


def too_dear(grammar: Mapping[str, object]) -> str:
    """Return why a mask may cost too much; "": none does.

    Args:
        grammar: Rules as llguidance reads them: `json_schema` or `lark_grammar`.
    """
    schema = grammar.get("json_schema")
    if isinstance(schema, dict) and (words := _too_many_in_a_row(schema)):
        return words
    optional, loose = _of_schema(schema) if isinstance(schema, dict) else _of_lark(str(grammar["lark_grammar"]))
    squares = sum(number * number for number in optional)
    if squares > MAX_OPTIONAL_SQUARES:
        return (
            "too much may be absent in its expressions, by ? and * and their like: the squares of their numbers in "
            f"each add up to {squares}; the limit is {MAX_OPTIONAL_SQUARES}"
        )
    if loose > MAX_LOOSE:
        return f"it has {loose} alternatives and parts that may be absent; the limit is {MAX_LOOSE}"
    return ""


def _too_many_in_a_row(schema: Mapping[str, Any]) -> str:
    """Return why the first properties of an object cannot be told apart; "": they can, of every object."""
    for place, inner in subschemas(schema):
        if not isinstance(inner, dict) or not isinstance(properties := inner.get("properties"), dict):
            continue
        names = _required(inner)
        num = next((index for index, name in enumerate(properties) if name in names), len(properties))
        if num > (most := MAX_OPTIONAL_IN_FRONT if names else MAX_OPTIONAL):
            where = "in front of its first required one" if names else "and none that is required"
            return f"the object at {place} has {num} optional properties {where}; the limit is {most}"
    return ""


def _required(schema: Mapping[str, Any]) -> set[str]:
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _num_optional(regex: str) -> int:
    num = sum(match.lastgroup is not None for match in _OPTIONAL.finditer(regex))
    return num + regex.count("|") if _VERBOSE.search(regex) else num


def _of_schema(schema: Mapping[str, Any]) -> tuple[list[int], int]:
    """Return how much may be absent in each expression, and how many alternatives and optional properties there are."""
    optional: list[int] = []
    loose = 0
    for _, inner in subschemas(schema):
        if not isinstance(inner, dict):
            continue
        optional += map(_num_optional, _expressions(inner))
        names, properties = _required(inner), inner.get("properties")
        loose += sum(len(value) for name in ("anyOf", "oneOf") if isinstance(value := inner.get(name), list))
        loose += sum(name not in names for name in properties) if isinstance(properties, dict) else 0
    return optional, loose


def _expressions(schema: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(pattern := schema.get("pattern"), str):
        yield pattern
    if isinstance(patterns := schema.get("patternProperties"), dict):
        yield from patterns


def _of_lark(text: str) -> tuple[list[int], int]:
    """As `_of_schema`; a terminal includes the terminals that it names, and a rule has symbols."""
    own: Counter[str] = Counter()
    named: dict[str, Counter[str]] = {}
    optional: list[int] = []
    loose, current = 0, ""
    for match in _LARK.finditer(text):
        is_terminal = current.isupper()
        if match["head"] is not None:
            current = match["name"]
            named.setdefault(current, Counter())
        elif match["regex"] is not None:
            num = _num_optional(match["regex"])
            own[current] += num if is_terminal else 0
            optional += [] if is_terminal else [num]
            loose += not is_terminal
        elif match["name"] is not None and is_terminal:
            named[current][match["name"]] += 1
        elif match["mark"] is not None and is_terminal:
            own[current] += 1
        else:
            loose += (match["name"] or match["text"] or match["mark"]) is not None
    totals: dict[str, int] = {}
    for name in named:
        _add_total(name, own, named, totals)
    return [*optional, *(totals[name] for name in named if name.isupper())], loose


def _add_total(name: str, own: Counter[str], named: Mapping[str, Counter[str]], totals: dict[str, int]) -> None:
    """Count what may be absent in a terminal; the library has refused terminals that lead to themselves."""
    todo = [name]
    while todo:
        inner = [one for one in named.get(todo[-1], ()) if one not in totals]
        if inner and len(todo) <= len(named):
            todo += inner
            continue
        last = todo.pop()
        counts = named.get(last, Counter())
        total = own[last] + sum(times * totals.get(one, 0) for one, times in counts.items())
        totals[last] = min(total, MAX_OPTIONAL_SQUARES)  # it may double in each line
