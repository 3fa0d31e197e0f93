"""What became of one request, as the sender saw it."""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.values.outputs import Prompt

Float64Array = NDArray[np.float64]


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by us: the load was interrupted


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a load."""

    index: int  # its place in the load, from 0
    prompt: Prompt  # text, token ids, or a conversation
    # Length of the prompt, in token ids or in words; None: a text whose length is not known.
    num_prompt_tokens: int | None
    max_tokens: int  # output tokens that are asked for
    # When it is sent, in seconds from the beginning; None: when a client of a closed loop is free.
    scheduled_s: float | None
    json_schema: Mapping[str, Any] | None = None  # what the answer has to follow; None: nothing
    speculate: bool | None = None  # on which side of a comparison it is; None: nothing is compared


class TokenUsage(NamedTuple):
    """Tokens as the server counted them; None: it did not say."""

    num_prompt_tokens: int | None
    num_output_tokens: int
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request's times, in seconds of `time.perf_counter`, and its tokens."""

    planned: PlannedRequest
    scheduled_s: float | None  # when it should have been sent; None in a closed loop
    sent_s: float = math.nan
    ended_s: float = math.nan  # when the answer, or the failure, was complete
    # When each part of the answer that brought tokens came.
    event_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    event_num_tokens: "array[int]" = field(default_factory=lambda: array("q"))  # how many tokens each part brought
    usage: TokenUsage | None = None  # the server's count; None: there is none
    outcome: Outcome | None = None  # how it ended; None: it has not
    error: str | None = None
    token_ids: list[int] | None = None  # those that came; None: they are not kept

    def add_event(self, time_s: float, num_tokens: int) -> None:
        """Note a part of the answer that brought tokens."""
        self.event_times_s.append(time_s)
        self.event_num_tokens.append(num_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens by the server's count, else as they came."""
        return self.usage.num_output_tokens if self.usage is not None else sum(self.event_num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens by the server's count, else as planned; 0 if neither is known."""
        if self.usage is not None and self.usage.num_prompt_tokens is not None:
            return self.usage.num_prompt_tokens
        return self.planned.num_prompt_tokens or 0

    @property
    def lateness_s(self) -> float | None:
        """How late it was sent; None in a closed loop, which has no times to be late for."""
        return None if self.scheduled_s is None else self.sent_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """From sending to the end of the answer."""
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token; None: none came."""
        return self.event_times_s[0] - self.sent_s if self.event_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first part of the answer; None: it had one part only."""
        num_tokens = sum(self.event_num_tokens[1:])
        return (self.event_times_s[-1] - self.event_times_s[0]) / num_tokens if num_tokens else None

    @property
    def longest_gap_s(self) -> float | None:
        """Longest time between two parts of the answer; None: it had one part only."""
        return float(np.diff(self.event_times_s).max()) if len(self.event_times_s) > 1 else None

    def itls_s(self) -> Float64Array:
        """Return the inter-token latencies, one for each token after the first part.

        A part of k tokens that comes t seconds after the one before gives k times t / k, so that their mean is the
        TPOT.
        """
        counts = np.asarray(self.event_num_tokens[1:], np.int64)
        return np.repeat(np.diff(self.event_times_s) / np.maximum(counts, 1), counts)


class Target(Protocol):
    """A server that answers requests; its kinds are in octavo_target.py and openai_target.py."""

    async def describe(self) -> "TargetInfo":
        """Ask the server what it is.

        Raises:
            OctavoError: no server answers, or not as expected.
        """
        ...

    async def send(self, record: RequestRecord) -> None:
        """Send the planned request, wait for its whole answer, and note the events and `usage`.

        Notes `ended_s` too if it returns later than the answer is complete.

        Raises:
            OctavoError: there is no complete answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """The server."""

    api: str  # how it is called: "octavo", "octavo-stream", "completions" or "chat"
    address: str
    model_id: str
    max_model_len: int | None = None  # longest sequence, prompt and output together, in tokens; None: it does not say
    vocab_size: int | None = None  # number of token ids; None: it does not say
    has_chat_template: bool = False  # whether prompts may be conversations
    speculates: bool = False  # whether a request may get several tokens a step
    max_encoder_tokens: int = 0  # longest prompt of a model whose encoder reads it, in tokens; 0: it has none
