"""What the front and the engine know of each other: token ids, and no text.

    front ── EngineRequest, abort ──> EngineClient    the engine
      ^  └── finish_output, abort ──> RequestHandle     │
      └────────────────────────────── TokenSink <───────┘   tokens and ends of one request

The front imports nothing else of `engine/`, `core/` and `executors/`; an import contract holds it. What the engine
tells a front it tells by calls that do not wait and ask for no answer; a front that has something to say of a request,
such as that its text holds a stop string, says it by the handle, at once or later.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_svc.core.beams.beam_search import BeamSearchParams, EarlyStopping, Hypothesis
from scheduler_svc.core.group_event import EventKind
from scheduler_svc.core.provenance import Numerics, Progress, Provenance, Span
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.results import Alternatives
from scheduler_svc.core.stopping import FinishReason, StopConditions
from scheduler_svc.engine.request_life import LifeEvent
from scheduler_svc.engine.request_times import RequestTimes
from scheduler_svc.executors.served_model import Reproducibility, ServedModel
from shared.errors import OctavoServiceError
from shared.step import NO_LOGPROBS, Int32Array, SamplingRow
from shared.token_rules import TokenRules

__all__ = [
    "Alternatives",
    "BeamSearchParams",
    "EarlyStopping",
    "EndedRequest",
    "EngineClient",
    "EngineLoad",
    "EngineRequest",
    "EventKind",
    "FinishReason",
    "Hypothesis",
    "LifeEvent",
    "Numerics",
    "Progress",
    "Provenance",
    "Reproducibility",
    "RequestHandle",
    "RequestTimes",
    "ServedModel",
    "Span",
    "StopConditions",
    "TokenSink",
]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A checked request; the names are those of `SequenceGroup`.

    `has_stop_strings`: whether the front looks for some; it then says of each sampled output how many tokens count.
    `trace_id`: the trace of its span, 32 hexadecimal digits, for the log; `traceparent`: the span, for the executors.
    """

    request_id: str
    prompt_token_ids: Int32Array
    sampling: SamplingRow
    stop_conditions: StopConditions
    num_sequences: int = 1
    beam_search: BeamSearchParams | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: int = 0
    token_rules: TokenRules | None = None
    num_prompt_logprobs: int = NO_LOGPROBS
    has_stop_strings: bool = False
    trace_id: str | None = None
    traceparent: str | None = None

    def to_group(self, arrival: int, max_model_len: int) -> SequenceGroup:
        """Return the group that the core is to run, where sequences of at most `max_model_len` tokens are served."""
        return SequenceGroup(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling,
            stop_conditions=self.stop_conditions.accept(len(self.prompt_token_ids), max_model_len),
            arrival=arrival,
            num_sequences=self.num_sequences,
            beam_search=self.beam_search,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            token_rules=self.token_rules,
            num_prompt_logprobs=self.num_prompt_logprobs,
            traceparent=self.traceparent,
        )


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is known of a request at its end: counts, times and events, and no token of it.

    Attributes:
        num_losses: How often an executor was lost that ran it.
        ended_at_unix_s: When it ended, in seconds since 1970.
        finish_reason: Why its first output ended; None: it failed.
        error_code: The name of the status of its error; None: it finished.
        error_message: The sentence of its error; empty: it finished.
        trace_id: The trace of its span; None: it has none.
        provenance: Which kind of executor made which of its tokens.
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

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return self.error_code is not None

    @property
    def outcome(self) -> str:
        """The finish reason of its first output, or the status code and the message of its error."""
        return f"{self.error_code}: {self.error_message}" if self.finish_reason is None else self.finish_reason.value


class RequestHandle(Protocol):
    """A live request, for the front that submitted it. Nothing happens once it has ended."""

    def finish_output(self, output_index: int, num_tokens: int, reason: FinishReason) -> None:
        """Say with how many tokens a sampled output ends, and why; only for a request with stop strings.

        Either its text holds a stop string, and later tokens are dropped and never count, or the sink was told that it
        has ended, for this reason.
        """

    def abort(self, error: OctavoServiceError) -> None:
        """End it with an error and free its blocks."""


class TokenSink(Protocol):
    """Takes the tokens of one request as steps bring them. No call waits, none of them raises."""

    def begin(self, handle: RequestHandle) -> None:
        """The request is queued: the first call."""

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> None:
        """Take the next token of a sampled output.

        `logprob` may be there because another request of the step asked for it.
        """

    def push_prompt(self, logprobs: Sequence[float], alternatives: Alternatives) -> None:
        """Take the log-probabilities of the next tokens of the prompt."""

    def finish_output(self, output_index: int, reason: FinishReason) -> None:
        """A sampled output has ended: its last token was pushed. The front of one with stop strings has to agree."""

    def finish_search(self, hypotheses: Sequence[Hypothesis]) -> None:
        """The beam search has ended; its hypotheses, best first."""

    def end(self, ended: EndedRequest, error: OctavoServiceError | None) -> None:
        """The request has ended, with its last output or with an error: the last call, and there is one for each."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How much the engine has to do, and how much it can do at once, over all attached executors."""

    num_requests: int
    num_running: int
    num_waiting_prompt_tokens: int
    max_num_seqs: int
    num_taken_slots: int
    num_cache_tokens: int
    num_used_cache_tokens: int

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place in a batch, or for an executor."""
        return self.num_requests - self.num_running


class EngineClient(Protocol):
    """The engine, for those who have requests."""

    @property
    def model(self) -> ServedModel | None:
        """What is served, or was last; None: no executor has been attached yet."""

    @property
    def why_not_ready(self) -> str:
        """Why new requests find no executor, in words; empty: they find one."""

    @property
    def is_draining(self) -> bool:
        """Whether admission was stopped."""

    @property
    def last_trouble(self) -> str:
        """Why executors are not attached, in one line; empty: no trouble is known."""

    @property
    def load(self) -> EngineLoad:
        """What it has to do now."""

    @property
    def max_requests(self) -> int | None:
        """Requests that one caller may have here at once, waiting and running; None: executors are missing."""

    def checking(self, request_id: str, tenant: str) -> AbstractContextManager[ServedModel]:
        """Let a new request count as waiting while it is tokenized and checked; gives the model to check against.

        Raises: UnavailableError, NoExecutorError, RequestExistsError, QueueFullError: it would not be queued.
        """

    async def submit(self, request: EngineRequest, sink: TokenSink, checked_for: ServedModel) -> None:
        """Queue a request that was checked for a model, right after `checking`.

        Raises:
            UnavailableError, NoExecutorError, RequestExistsError, QueueFullError: it was not queued.
            CacheTooSmallError: no executor can ever hold it.
        """

    async def abort_request(self, request_id: str, tenant: str | None) -> bool:
        """End a live request, whoever submitted it; False: there is none of this tenant. `tenant` None: of any."""
