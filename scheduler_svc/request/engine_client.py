"""The engine as a front has it: token ids, and no text.

    front ── EngineRequest, abort ──> EngineClient    the engine
      ^  └── finish_output, abort ──> RequestHandle     │
      └────────────────────────────── TokenSink <───────┘   tokens and ends of one request

The engine tells a front everything by calls that do not wait and return nothing. The front uses the handle, at once or
later, to end an output or a request, for example when its text holds a stop string.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo_shared.errors import OctavoServiceError
from scheduler_svc.request.continuation import Continuation
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.provenance import Span
from scheduler_svc.request.served_model import ServedModel

if TYPE_CHECKING:  # only the type stub of the generated module has it
    from octavo.admin.v1.admin_service_pb2_grpc import AdminServiceAsyncStub


class RequestHandle(Protocol):
    """A live request, for the front that submitted it. Calls do nothing once it has ended."""

    def finish_output(self, output_index: int, num_tokens: int, reason: FinishReason) -> None:
        """End a sampled output with `num_tokens`; only for a request with stop strings.

        Either its text holds a stop string, and later tokens are dropped and never count, or the sink was told that it
        has ended, and the front agrees.
        """

    def abort(self, error: OctavoServiceError) -> None:
        """End the request with an error and free its blocks."""


class TokenSink(Protocol):
    """Takes the tokens of one request as they are computed. No call waits, and none raises."""

    def begin(self, handle: RequestHandle) -> None:
        """The request is queued: the first call."""

    def begin_span(self, span: Span) -> None:
        """Other numerics make the tokens from `span.begin` on; may be called before their first token."""

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> None:
        """Take the next token of a sampled output.

        It may have a `logprob` because another request of the step asked for one.
        """

    def push_prompt(self, logprobs: Sequence[float], alternatives: Alternatives) -> None:
        """Take the log-probabilities of the next tokens of the prompt."""

    def finish_output(self, output_index: int, reason: FinishReason) -> None:
        """A sampled output has ended: its last token was pushed. With stop strings, its front has to agree."""

    def finish_search(self, hypotheses: Sequence[Hypothesis]) -> None:
        """The beam search has ended; its hypotheses, best first."""

    def pooled(self, values: Float32Array) -> None:
        """Take the answer of a pooling request: its vector, or its scores."""

    def end(self, ended: EndedRequest, error: OctavoServiceError | None) -> None:
        """The request has ended, with its last output or with an error: always the last call."""


class AnswerSink(TokenSink, Protocol):
    """The sink of a front, which keeps the answer."""

    def so_far(self) -> Continuation:
        """Return the answer so far, for an engine that is to go on with the request."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine has to compute, and how much it can compute at once, over all attached executors."""

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
    """The engine, for fronts."""

    @property
    def admin(self) -> "AdminServiceAsyncStub":
        """What operators ask of it: its methods with one answer; they raise OctavoServiceError, as its servicer does.

        Of several engines each is asked, and the answer is the first one's. A front asks only for operators.
        """

    @property
    def model(self) -> ServedModel | None:
        """The model that is served, or was last; None: no executor has been attached yet."""

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
        """The load now."""

    def waits_for(self, request_id: str, tenant: str) -> str:
        """Say in a few words where a live request without tokens stands in line; empty: it does not wait."""

    @property
    def max_requests(self) -> int | None:
        """Requests that one caller may have here at once, waiting and running; None: executors are missing."""

    async def wait_until_reachable(self) -> None:
        """Return once the engine can be reached, or is not expected back soon: its process may be restarting."""

    def checking(self, request_id: str, tenant: str) -> AbstractContextManager[ServedModel]:
        """Let a new request count as waiting while it is tokenized and checked; gives the model to check against.

        Raises: UnavailableError, NoExecutorError, RequestExistsError, QueueFullError: it would not be queued.
        """

    async def submit(self, request: EngineRequest, sink: AnswerSink, checked_for: ServedModel) -> None:
        """Queue a request that was checked for a model, right after `checking`.

        Raises:
            UnavailableError, NoExecutorError, RequestExistsError, QueueFullError: it was not queued.
            CacheTooSmallError: no executor can ever hold it.
            DeadlineTooShortError: it would miss its deadline by far.
        """

    async def abort_request(self, request_id: str, tenant: str | None) -> bool:
        """End the live request to which a tenant gave an id; False: there is none.

        `tenant` None: the requests of all tenants.
        """
