"""A stream of OpenAI's API: its server-sent events, what they say, and how many tokens each brought.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

import itertools
import json
import re
import time
from typing import Any

from octavo.bench.config import RequestFailedError
from octavo.bench.record import RequestRecord, TokenUsage
from octavo.values.wording import printable

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAX_LINE_BYTES = 16 * 2**20


class SseParser:
    """Takes a stream chunk by chunk and gives the data of each event; names, ids and comments are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._ended_in_cr = False
        self._is_at_start = True

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of the events that are complete with this chunk; lines of one event are joined by a newline.

        Raises:
            ValueError: a line of the stream is longer than 16 MiB, or no UTF-8.
        """
        if self._ended_in_cr and chunk:
            self._ended_in_cr = False
            chunk = chunk.removeprefix(b"\n")  # the second half of a line end that was cut in two
        text = self._rest + chunk
        if self._is_at_start:
            if len(text) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(text):
                self._rest = text
                return []
            self._is_at_start = False
            text = text.removeprefix(_BYTE_ORDER_MARK)
        *lines, self._rest = _LINE_END.split(text)
        if chunk:
            self._ended_in_cr = text.endswith(b"\r")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise ValueError(f"a line of the stream is longer than {_MAX_LINE_BYTES} bytes")
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data).decode())
                    self._data.clear()
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events


_DONE = "[DONE]"

# Of one prompt or answer; a usage that says more is wrong, and each ITL takes memory.
_MOST_TOKENS = 100_000_000

# Where the text of a delta of a chat may be; models that think have some of it in the others.
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class StreamReader:
    """Reads the data of one stream's events.

    A chunk says nothing about its tokens, unless it has the usage so far (`continuous_usage_stats` of some servers).
    So the tokens of the whole answer, which the last chunk has, are spread evenly over the parts that had text; without
    a usage each part counts as one token.
    """

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._totals: list[int | None] = []  # the usage so far, as of each part
        self._usage: TokenUsage | None = None
        self._is_finished = False

    def read_all(self, events: list[str]) -> bool:
        """Take in the data of events that came together; return whether the last one was among them.

        Raises:
            RequestFailedError: the server reports an error, or speaks something else.
        """
        now_s = time.perf_counter()
        for data in events:
            if data == _DONE:
                self._is_finished = True
                return True
            self._read(data, now_s)
        return False

    def _read(self, data: str, now_s: float) -> None:
        try:
            chunk = json.loads(data)
        except ValueError:
            raise RequestFailedError("the stream has an event that is not JSON") from None
        if not isinstance(chunk, dict):
            raise RequestFailedError("the stream has an event that is not a JSON object")
        if chunk.get("error"):
            raise RequestFailedError(f"the stream ended in an error: {error_message(chunk)}")
        usage = _usage(chunk.get("usage"))
        for choice in _choices(chunk):
            if _has_text(choice):
                self._times_s.append(now_s)
                self._totals.append(None if usage is None else usage.num_output_tokens)
            if choice.get("finish_reason"):
                self._is_finished = True
        self._usage = usage or self._usage

    def note(self, record: RequestRecord) -> None:
        """Put what has come so far into the record."""
        if self._usage is not None:
            record.usage = self._usage
        counts = _counts(self._totals, self._usage.num_output_tokens if self._usage else len(self._times_s))
        for time_s, num_tokens in zip(self._times_s, counts, strict=True):
            if num_tokens:
                record.add_event(time_s, num_tokens)

    def check_complete(self) -> None:
        """Raise RequestFailedError unless the stream came to its end and brought tokens."""
        if not self._is_finished:
            raise RequestFailedError("the stream ended early")
        if not self._times_s and (self._usage is None or not self._usage.num_output_tokens):
            raise RequestFailedError("the answer had no tokens")


def spread(num_tokens: int, num_parts: int) -> list[int]:
    """Return the tokens of each part if they are spread evenly; the first has at least one, if there is one."""
    ends = [-(-(index * num_tokens) // num_parts) for index in range(num_parts + 1)]  # rounded up
    return [end - begin for begin, end in itertools.pairwise(ends)]


def error_message(body: object) -> str:
    """Return the message in the JSON of an error, as the known servers write it, on one line that can be printed."""
    if isinstance(body, dict):
        for name in ("error", "message", "detail"):
            if body.get(name):
                return error_message(body[name])
    return printable(" ".join(body.split()) if isinstance(body, str) else json.dumps(body))


def _counts(totals: list[int | None], num_tokens: int) -> list[int]:
    known = [total for total in totals if total is not None]
    if len(known) == len(totals) and known == sorted(known) and known and known[0] > 0:
        return [known[0], *(later - earlier for earlier, later in itertools.pairwise(known))]
    return spread(num_tokens, len(totals)) if totals else []


def _choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    choices = chunk.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise RequestFailedError('the stream has an event whose "choices" are not a list of objects')
    return choices


def _usage(usage: Any) -> TokenUsage | None:
    """Return the counts of a usage; None: it has no number of output tokens."""
    if not isinstance(usage, dict):
        return None
    num_output_tokens = _count(usage.get("completion_tokens"))
    if num_output_tokens is None:
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(_count(usage.get("prompt_tokens")), num_output_tokens, _count(cached))


def _count(value: object) -> int | None:
    """Return a number of tokens; None: the server says none that can be."""
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else None


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in _TEXT_FIELDS)
    return bool(choice.get("text"))
