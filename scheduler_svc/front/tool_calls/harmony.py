"""Reads OpenAI's harmony format, which gpt-oss writes: messages, whose headers say what their texts are.

    <|channel|>analysis<|message|>I look it up.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"a": 1}<|call|>

The prompt has the first `<|start|>assistant`. A message with a recipient is a call if the request has that tool, else a
thought: it is not for the user. Without a recipient, the channel `analysis` has thoughts, and every other one content.

Decisions follow from the characters alone, so any split of the text gives the same joined events. No marker and no
header is in an event.
"""

import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import TypeAlias

from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.front.tool_calls.call_writer import CallWriter, Progress
from scheduler_svc.front.tool_calls.events import ContentDelta, OutputEvent, ReasoningDelta, merged
from scheduler_svc.front.tool_calls.formats import HARMONY, HARMONY_MARKERS
from scheduler_svc.front.tool_calls.marker_search import find_marker
from scheduler_svc.front.tool_calls.named_call import CallArguments

_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS = HARMONY_MARKERS
_IN_HEADER = (_MESSAGE, _START, *_ENDS)

_ASSISTANT = "assistant"
_TO = "to="
_RECIPIENT = re.compile(r"(?:^|\s|\|>)to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"\s*(\w*)")
_FUNCTIONS = "functions."

# A longer header is none: names of tools have 128 characters at most.
MAX_HEADER_CHARS = 512
# Between the texts of two messages, as neither ends with a line break.
BETWEEN_MESSAGES = "\n\n"
# Text that is decided at a time: each decision copies the rest of it.
_PIECE_CHARS = 512

# What a message is to the client: thoughts, content, the name of the tool that it calls; None: nothing.
_Kind: TypeAlias = type[ReasoningDelta] | type[ContentDelta] | str | None


def kind_of(header: str, tool_names: Collection[str]) -> _Kind:
    """Return what the message behind a header is; the header has no `<|start|>` and no `<|message|>`."""
    role, _, channel = header.partition(_CHANNEL)
    who = role.split()
    if who and not who[0].startswith((_ASSISTANT, _TO, _CONSTRAIN)):
        return None  # the model plays a tool or the user
    if recipient := _RECIPIENT.search(header):
        name = recipient[1].removeprefix(_FUNCTIONS)
        return name if name in tool_names else ReasoningDelta
    named = _CHANNEL_NAME.match(channel)
    return ReasoningDelta if named is not None and named[1] == "analysis" else ContentDelta


class HarmonyParser:
    """Parses one output.

    Args:
        tool_names: The tools of the request.
        output_id: The output's; the ids of its calls derive from it.
        prompt: The end of the prompt, which begins the first message.
        tells_reasoning: Whether thoughts are reasoning; otherwise they are content.
    """

    def __init__(
        self, tool_names: Collection[str], output_id: str, prompt: str = "", *, tells_reasoning: bool = True
    ) -> None:
        self._tool_names = frozenset(tool_names)
        self._writer = CallWriter(tool_names, partial(HARMONY.call_id, output_id))
        self._thought: type[ReasoningDelta] | type[ContentDelta] = ReasoningDelta if tells_reasoning else ContentDelta
        self._text = ""  # not decided yet
        self._is_in_header = True
        self._has_start = False  # the header has its <|start|>
        self._kind: _Kind = ContentDelta
        self._arguments: CallArguments | None = None  # of the call that is read
        self._is_new = True  # nothing of the message is in an event
        self._told: set[_Kind] = set()
        self._events: list[OutputEvent] = []
        _, start, header = prompt.rpartition(_START)
        self.feed(start + header if start else "")
        self._told.clear()

    def feed(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that it makes certain."""
        for begin in range(0, len(text), _PIECE_CHARS):
            self._text += text[begin : begin + _PIECE_CHARS]
            while self._text and (self._pass_header() if self._is_in_header else self._pass_text()):
                pass
        events, self._events = self._events, []
        return merged(events)

    def finish(self) -> list[OutputEvent]:
        """Return the remaining events: the output has ended. A marker that broke off is no text."""
        rest, self._text = self._text, ""
        if not self._is_in_header:
            self._add("" if rest.startswith("<|") else rest)
        elif find_marker(rest, HARMONY_MARKERS)[1] is None:
            named = rest.lstrip()
            is_named = named.startswith(_ASSISTANT)
            text = named.removeprefix(_ASSISTANT) if is_named else "" if self._has_start else rest
            self._begin(ContentDelta)
            self._add("" if text.strip().startswith((_TO, "<|")) or (self._told and not text.strip()) else text)
        self._give_up()
        return self.feed("")

    def _pass_header(self) -> bool:
        """Decide on the text of a header; return whether anything was decided."""
        end, marker = find_marker(self._text, _IN_HEADER)
        header, behind = self._text[:end], self._text[end + len(marker or "") :]
        if (plain := self._plain_start()) is not None:
            self._begin(ContentDelta)
            self._text = self._text[plain:]
        elif end > MAX_HEADER_CHARS:
            self._begin(None)
            self._text = self._text[MAX_HEADER_CHARS + 1 :]
        elif marker is None:
            return False
        elif marker == _MESSAGE:
            self._begin(kind_of(header, self._tool_names))
            self._text = behind
        else:
            self._text, self._has_start = behind, marker == _START
        return True

    def _plain_start(self) -> int | None:
        """Return where text begins that the model wrote without a header; None: it may be a header."""
        head = self._text[: find_marker(self._text, HARMONY_MARKERS)[0]]
        named = head.lstrip()
        start = 0
        if named.startswith(_ASSISTANT):
            start = len(head) - len(named) + len(_ASSISTANT)
        elif self._has_start or _ASSISTANT.startswith(named):
            return None if len(head) <= MAX_HEADER_CHARS or self._has_start else 0
        words = head[start:].split(maxsplit=2)
        may_be_recipient = len(words) == 1 and (words[0].startswith(_TO) or _TO.startswith(words[0]))
        is_header = (not words or may_be_recipient) and len(head) <= MAX_HEADER_CHARS
        return None if is_header else start

    def _begin(self, kind: _Kind) -> None:
        """Begin the text of a message."""
        self._is_in_header, self._is_new = False, True
        self._kind = self._thought if kind is ReasoningDelta else kind
        if isinstance(kind, str):
            self._writer.begin(kind)
            self._arguments = CallArguments(self._writer)

    def _pass_text(self) -> bool:
        """Decide on the text of a message; return whether anything was decided."""
        end, marker = find_marker(self._text, HARMONY_MARKERS)
        self._add(self._text[:end])
        self._text = self._text[end + len(marker or "") :]
        if marker is None:
            return False
        if marker not in (_MESSAGE, _CONSTRAIN):  # models leave out the end of a message, also with <|start|>
            if self._arguments is not None and self._is_new:
                self._add("{}")  # nothing: the tool has no arguments
            self._give_up()
            self._is_in_header, self._has_start = True, marker == _START
            if marker == _CHANNEL:
                self._text = marker + self._text
        return True

    def _add(self, text: str) -> None:
        """Add to the text of the message."""
        if self._arguments is not None:
            self._read(self._arguments, text)
        elif text and self._kind is not None and not isinstance(self._kind, str):
            if self._is_new and self._kind in self._told:
                text = BETWEEN_MESSAGES + text
            self._is_new = False
            self._told.add(self._kind)
            self._events.append(self._kind(text))

    def _read(self, arguments: CallArguments, text: str) -> None:
        """Read arguments. What stands behind them is dropped; if they are none, they are content."""
        position, progress = 0, Progress.MORE
        if self._is_new:
            position = len(text) - len(text.lstrip())
        while position < len(text) and progress is Progress.MORE:
            self._is_new = False
            end = max(arguments.plain_run(text, position), position + 1)
            self._writer.take(text[position:end])
            progress = arguments.take(text[position:end])
            position = end
        if progress is Progress.DONE:
            self._arguments = None
        self._events += self._writer.take_events()
        if progress is Progress.FAILED:
            self._give_up()
            self._is_new = False
            self._add(text[position:])

    def _give_up(self) -> None:
        """Make content of a call that is open: it broke off."""
        if self._arguments is None:
            return
        self._arguments, self._kind, self._is_new = None, ContentDelta, True
        text = self._writer.give_up()
        self._events += self._writer.take_events()
        self._add(text)


def num_reasoning_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], tool_names: Collection[str]) -> int | None:
    """Return the number of tokens in thoughts, with their headers and ends; None: the markers are no tokens."""
    marker_of = {tokenizer.id_of(marker): marker for marker in HARMONY_MARKERS}
    if None in marker_of:
        return None
    number = begin = 0
    is_thought = is_in_header = True
    for place, token_id in enumerate(token_ids):
        match marker_of.get(token_id):
            case None | "<|constrain|>":
                continue
            case "<|message|>":
                if is_in_header:
                    header = tokenizer.decode(token_ids[begin:place], skip_special_tokens=False).removeprefix(_START)
                    is_thought, is_in_header = kind_of(header, tool_names) is ReasoningDelta, False
            case "<|start|>" | "<|channel|>":
                if not is_in_header:
                    number += (place - begin) * is_thought
                    begin, is_in_header = place, True
            case _:
                number += (place + 1 - begin) * (is_thought and not is_in_header)
                begin, is_in_header = place + 1, True
    return number + (len(token_ids) - begin) * (is_thought and not is_in_header)
