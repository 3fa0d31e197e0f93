"""Times and events of a request: for metrics, traces, the log line at its end, and people who ask.

`RequestTimes` has what happens once to every request, `LifeEvent` the rest; `EndedRequest` has both, at its end.
"""

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.provenance import Provenance

# A tenant, and the id that it gave a request, which is unique among the tenant's live requests.
RequestKey: TypeAlias = tuple[str, str]


class EventKind(enum.Enum):
    """What can happen to a request between its arrival and its first token, or between two tokens."""

    ADMITTED = "admitted"
    """It got blocks and slots; of `num_tokens`, `num_computed_tokens` were in the cache; `cause`: from where."""
    PREEMPTED = "preempted"
    """It left the batch, and its blocks were freed: `num_tokens` are to be computed again."""
    SWAPPED_OUT = "swapped_out"
    """It left the batch, and its blocks moved to the host pool."""
    SWAPPED_IN = "swapped_in"
    """Its blocks moved back from the host pool."""
    DROPPED = "dropped"
    """Its blocks in the host pool were freed: `num_tokens` are to be computed again."""
    EXECUTOR_LOST = "executor_lost"
    """The executor that had it is gone."""
    WEIGHTS_CHANGED = "weights_changed"
    """It goes on with other weights, and with the blocks of its `num_tokens` as they are."""
    PARKED = "parked"
    """It may have broken executors, and waits until other suspects have been computed."""


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """One thing that happened to a request.

    Attributes:
        at_s: Monotonic time in seconds.
        executor: Address of the executor concerned; empty: none is.
        step_id: The step of the executor that it happened with; None: with none.
        num_tokens: Known tokens, prompt and output, of the first live sequence.
        num_computed_tokens: How many of these needed no computation.
        cause: Why, in words; empty: `kind` says it.
    """

    kind: EventKind
    at_s: float
    executor: str = ""
    step_id: int | None = None
    num_tokens: int = 0
    num_computed_tokens: int = 0
    cause: str = ""


@dataclass(slots=True)
class RequestTimes:
    """Monotonic times in seconds; None: it has not happened, and may never.

    Attributes:
        arrived_at_s: It was queued: its fields are checked, its prompt is tokenized.
        first_scheduled_at_s: Its first admission was decided; known from its first token or its end on.
        first_token_at_s: Its first token came, of any output.
        last_token_at_s: Its last token so far came.
        ended_at_s: It ended: finished, failed, or aborted.
    """

    arrived_at_s: float
    first_scheduled_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    ended_at_s: float | None = None

    @property
    def queue_s(self) -> float | None:
        """From the arrival to the first step; the wait after a preemption does not count."""
        return _between(self.arrived_at_s, self.first_scheduled_at_s)

    @property
    def time_to_first_token_s(self) -> float | None:
        """From the arrival to the first token."""
        return _between(self.arrived_at_s, self.first_token_at_s)

    @property
    def duration_s(self) -> float | None:
        """From the arrival to the end."""
        return _between(self.arrived_at_s, self.ended_at_s)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request at its end: counts, times and events, without tokens.

    Attributes:
        num_losses: How often an executor that ran it was lost.
        ended_at_unix_s: When it ended, in seconds since 1970.
        finish_reason: Why its first output ended; None: it failed.
        error_code: The name of the status of its error; None: it finished.
        error_message: The sentence of its error; empty: it finished.
        trace_id: The trace of its span; None: it has none.
        provenance: Which numerics made which of its tokens.
        num_earlier_tokens: Output tokens of the calls that it continues.
        num_draft_tokens: Output tokens that came as drafts.
        lora_adapter: The name of its adapter; empty: it had none, or a front keeps it.
        num_encoder_tokens: Tokens of its encoder's input; 0: it had none, or a front keeps it.
    """

    request_id: str
    tenant: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_losses: int
    times: RequestTimes
    events: tuple[LifeEvent, ...]
    ended_at_unix_s: float
    finish_reason: FinishReason | None
    error_code: str | None
    error_message: str
    trace_id: str | None = None
    provenance: Provenance = field(default_factory=Provenance)
    num_earlier_tokens: int = 0
    num_draft_tokens: int = 0
    lora_adapter: str = ""
    num_encoder_tokens: int = 0

    @property
    def num_input_tokens(self) -> int:
        """Tokens of the prompt, and of the encoder's input."""
        return self.num_prompt_tokens + self.num_encoder_tokens

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return self.error_code is not None

    @property
    def outcome(self) -> str:
        """The finish reason of its first output, or the status code and the message of its error."""
        return f"{self.error_code}: {self.error_message}" if self.finish_reason is None else self.finish_reason.value


def _between(begin_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - begin_s
