"""Reads calls with the name in front of the arguments, such as Mistral's `get_weather[ARGS]{...}`."""

import re

from scheduler_svc.front.tool_calls.call_writer import CallReader, CallWriter, Progress
from scheduler_svc.front.tool_calls.formats import NamedBody, Slot
from scheduler_svc.front.tool_calls.json_calls import JsonCalls
from scheduler_svc.front.tool_calls.json_scanner import END, JsonScanner

# The longest text of a slot: OpenAI's limit for names, and more than any family writes for ids.
MAX_SLOT_CHARS = 64
# Slots, fixed texts and whitespace; each new character is compared with all of them.
MAX_HEADER_CHARS = 512
_SLOTS = {Slot.NAME: re.compile(r"[A-Za-z0-9_-]*"), Slot.ID: re.compile(r"[A-Za-z0-9]*")}


class NamedCall(CallReader):
    """Reads one call."""

    def __init__(self, writer: CallWriter, body: NamedBody) -> None:
        super().__init__(writer)
        self._body = body
        self._header = ""
        self._rest: JsonCalls | CallArguments | None = None  # reads what is behind the header

    def plain_run(self, text: str, position: int) -> int:
        """See CallReader."""
        return position if self._rest is None else self._rest.plain_run(text, position)

    def take(self, piece: str) -> Progress:
        """See CallReader."""
        if self._rest is not None:
            return self._rest.take(piece)
        if not self._header and piece.isspace():
            return Progress.MORE
        if not self._header and piece == "[" and self._body.may_be_list:
            self._rest = JsonCalls(self._writer)
            return self._rest.take(piece)
        return self._take_header(piece)

    def _take_header(self, character: str) -> Progress:
        self._header += character
        may_come = False
        for header in self._body.headers:
            slots = self._match(header)
            if slots is None:
                may_come = True
            elif slots:
                self._writer.begin(slots["name"], self._body.call_id.format_map(slots))
                self._rest = CallArguments(self._writer)
                return self._rest.take(character)
        return Progress.MORE if may_come and len(self._header) <= MAX_HEADER_CHARS else Progress.FAILED

    def _match(self, header: tuple[str | Slot, ...]) -> dict[str, str] | None:
        """Return the texts of the slots if the header and a `{` have come; None: they may come; {}: they cannot."""
        slots: dict[str, str] = {}
        rest = self._header
        for part in header:
            if isinstance(part, str):
                if not rest.startswith(part):
                    return None if part.startswith(rest) else {}
                rest = rest[len(part) :]
                continue
            match = _SLOTS[part].match(rest)
            text = match[0] if match else ""
            if len(text) == len(rest):
                may_fit = part is Slot.ID or self._writer.may_become_tool(text)
                return None if may_fit and len(text) <= MAX_SLOT_CHARS else {}
            if not text or (part is Slot.NAME and not self._writer.is_tool(text)):
                return {}
            slots[part.name.lower()], rest = text, rest[len(text) :]
        if isinstance(header[-1], str):  # a name ends where the arguments begin
            rest = rest.lstrip()
        return None if not rest else slots if rest == "{" else {}


class CallArguments(CallReader):
    """Reads the object of the arguments of a call that has begun."""

    def __init__(self, writer: CallWriter) -> None:
        super().__init__(writer)
        self._scanner = JsonScanner()

    def plain_run(self, text: str, position: int) -> int:
        """See CallReader."""
        return self._scanner.plain_run(text, position)

    def take(self, piece: str) -> Progress:
        """See CallReader."""
        is_next_argument = piece == '"' and self._scanner.expects_another_key(depth=1)
        if not self._scanner.take(piece[0]):  # in a plain run all characters are alike
            return Progress.FAILED
        self._writer.add_arguments(piece)
        if is_next_argument:
            self._writer.show()
        if self._scanner.state is not END:
            return Progress.MORE
        self._writer.complete()
        return Progress.DONE
