"""Rules, in Lark's notation, of calls as a model family writes them: one for each way that has JSON arguments.

They allow what the readers of `tool_calls/` read: the model takes the form that its chat template taught it.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.grammars.parts import lark_text
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.front.tool_calls.formats import HarmonyBody, JsonBody, NamedBody, Slot, ToolCallFormat

_ID = "/[A-Za-z0-9]{1,9}/"

# Rules that the others use. Text never holds a special token.
COMMON = r"""
ws: /[ \n]{0,4}/
TEXT: /(.|\n)*/
"""


def check_format(tool_format: ToolCallFormat, field: str, shown: str) -> None:
    """Refuse a format whose calls have no JSON in them. Raises InvalidFieldError: naming it."""
    if not isinstance(tool_format.body, JsonBody | NamedBody | HarmonyBody):
        rule = f"unset: the format {tool_format.name} of this model has no JSON in its calls, so they cannot be held"
        raise InvalidFieldError(field, shown, rule)


class Markers:
    """Writes markers: a special token is named by its id, as no text matches it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = {tokenizer.token_of(token_id): token_id for token_id in tokenizer.special_token_ids}
        longest_first = sorted(filter(None, self._ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def rule(self, marker: str) -> str:
        """Return what matches a marker."""
        texts, specials = self._special.split(marker), self._special.findall(marker)
        pieces = chain.from_iterable(zip(texts, [*specials, ""], strict=True))
        written = (f"<[{self._ids[piece]}]>" if piece in self._ids else lark_text(piece) for piece in pieces if piece)
        return " ".join(written)

    def text_until(self, name: str, marker: str) -> tuple[str, str]:
        """Return what matches text up to the first marker, that included, and the rule that it needs.

        The text may be empty, and goes on behind the beginning of a marker that does not come.
        """
        if self._special.match(marker):
            return f"TEXT {self.rule(marker)}", ""
        [*_, last] = self._special.split(marker)
        assert last == marker, f"{marker} begins as text and has a special token"
        return name, f"{name}[lazy]: /(.|\\n)*{_escaped(marker)}/\n"


def call_rules(
    tool_format: ToolCallFormat, arguments: Mapping[str, str], markers: Markers, *, is_parallel: bool
) -> str:
    """Return the rules `calls`, all calls of an output; `behind_begin`, what follows the marker in front; and theirs.

    Args:
        tool_format: How the model writes.
        arguments: The name of the rule of each tool's arguments.
        markers: Of the model.
        is_parallel: Whether there may be several calls.
    """
    more = "*" if is_parallel else "{0}"
    begins, ends = list(map(markers.rule, tool_format.begin)), list(map(markers.rule, tool_format.ends))
    rules = [_body_rules(tool_format, arguments, markers, is_parallel=is_parallel)]
    if _has_sections(tool_format):
        inner = " ".join(f"ws {end}" for end in ends[:-1])
        again = f"(ws {begins[1]} ws call {inner})*" if is_parallel else ""
        rules += [f"behind_begin: ws call {inner} {again} ws {ends[-1]} ws", f"calls: {begins[0]} behind_begin"]
        return "\n".join(rules)
    end = f"ws ({' | '.join(ends)})" if ends else ""
    if tool_format.may_be_bare:
        end = f"({end})?" if end else ""
        first = f"({' | '.join(begins)})?" if begins else ""
        rules += [f"behind_begin: ws call {end} ws", f"calls: {first} behind_begin"]
        if is_parallel:
            rules[-1] = f"calls: {first} behind_begin (/[;,]/ {first} behind_begin)*"
    else:
        rules += [
            f"behind_begin: ws call {end} ws",
            f"calls: one_call one_call{more}" if is_parallel else "calls: one_call",
        ]
        rules.append(f"one_call: ({' | '.join(begins)}) behind_begin")
    return "\n".join(rules)


def _has_sections(tool_format: ToolCallFormat) -> bool:
    """Return whether all calls stand between one pair of markers, and each between another one."""
    begin = tool_format.begin
    return len(begin) == 2 and begin[0].endswith(begin[1])


def _body_rules(
    tool_format: ToolCallFormat, arguments: Mapping[str, str], markers: Markers, *, is_parallel: bool
) -> str:
    """Return the rule `call`, between the markers, and what it needs."""
    match tool_format.body:
        case JsonBody():
            return f"call: {_objects(is_parallel=is_parallel)}\n{_object_rules(arguments)}"
        case NamedBody() as body:
            forms = [
                f"{_header(header, name, markers)} ws {rule}"
                for header in body.headers
                for name, rule in arguments.items()
            ]
            objects = ""
            if body.may_be_list:
                more = '(ws "," ws object)*' if is_parallel else ""
                forms.append(f'"[" ws object {more} ws "]"')
                objects = f"\n{_object_rules(arguments)}"
            return f"call: {' | '.join(forms)}{objects}"
        case _:
            raise AssertionError(f"{tool_format.name} was refused")


def _objects(*, is_parallel: bool) -> str:
    more = '(ws "," ws object)*' if is_parallel else ""
    return f'object | "[" ws object {more} ws "]"'


def _object_rules(arguments: Mapping[str, str]) -> str:
    """Return the rule `object`: the name, then the arguments by either of their keys."""
    key = r'("\"arguments\"" | "\"parameters\"")'
    forms = [
        f'"{{" ws "\\"name\\"" ws ":" ws {lark_text(lark_text(name))} ws "," ws {key} ws ":" ws {rule} ws "}}"'
        for name, rule in arguments.items()
    ]
    return f"object: {' | '.join(forms)}"


def _header(header: Sequence[str | Slot], name: str, markers: Markers) -> str:
    written = {Slot.NAME: lark_text(name), Slot.ID: _ID}
    return " ".join(written[part] if isinstance(part, Slot) else markers.rule(part) for part in header)


def _escaped(text: str) -> str:
    """Return a regular expression of a text, between slashes."""
    return re.sub(r"[^\w ]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)
