"""One front as the engine has it: its requests, what it wants, and what it is told."""

import asyncio
import math
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence

from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.errors import CallerError, OctavoServiceError, RequestAbortedError, UnavailableError
from octavo_shared.process.concurrency import in_turns
from scheduler_svc.engine.engine import Engine
from scheduler_svc.link.credit_gate import CreditGate
from scheduler_svc.link.early_aborts import EarlyAborts
from scheduler_svc.link.messages import (
    REASONS,
    EngineState,
    decode_failure,
    decode_reason,
    decode_submission,
    encode_ended,
    encode_failure,
    encode_losses,
    encode_pooled,
    encode_search_end,
    encode_span,
    encode_state,
)
from scheduler_svc.link.submission_check import check_size, check_submission
from scheduler_svc.request.engine_client import RequestHandle
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.request.losses import Losses
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.provenance import Span

# How long a front may take nothing.
SLOW_FRONT_S = 10.0

# Requests that are queued without letting others run: each takes some ten microseconds.
SUBMISSIONS_AT_ONCE = 8

# Requests that are aborted so.
ABORTS_AT_ONCE = 16

FRONT_GONE = "the front process that served the call exited"


class FrontSession:
    """Runs the requests of one front.

    Args:
        engine: Computes them.
        state: Returns how the engine is now.
        name: The front, for people.
        pid: Its process.
        on_readiness: Called when the front takes calls, or does no more.
        on_metrics: Called with what the front has counted, if this scheduler has started it.
        state_interval_s: How often it is looked whether `state` has changed.
        early_aborts: Of requests that some front still checks.
        address: From where it joined, host:port; empty: this scheduler has started it.

    Attributes:
        name: As above.
        pid: As above.
        is_ready: Whether it takes calls.
        num_output_tokens: Of sampled outputs, that were sent to it.
        loop_lag_us: How late a timer of its event loop was at most in the last minute.
        has_left: Set once its stream and all its requests have ended.
    """

    def __init__(
        self,
        engine: Engine,
        state: Callable[[], EngineState],
        name: str,
        pid: int,
        on_readiness: Callable[[], None],
        on_metrics: Callable[[bytes], Awaitable[None]],
        state_interval_s: float,
        early_aborts: EarlyAborts,
        address: str = "",
    ) -> None:
        self.name = name
        self.pid = pid
        self.address = address
        self.is_ready = False
        self.num_output_tokens = 0
        self.loop_lag_us = 0
        self.has_left = asyncio.Event()
        self._on_readiness = on_readiness
        self._on_metrics = on_metrics
        self._state_interval_s = state_interval_s
        self._early_aborts = early_aborts
        self._engine = engine
        self._state = state
        self._told_state: EngineState | None = None
        self._welcome = pb.CoreWelcome()
        self._batch = AnswerBatch()
        self._gate = CreditGate(0, SLOW_FRONT_S)
        self._requests: dict[int, _RemoteSink] = {}
        self._reading: asyncio.Task[None] | None = None
        self._last_number = 0

    @property
    def num_requests(self) -> int:
        """Its live requests."""
        return len(self._requests)

    @property
    def num_credits(self) -> int:
        """Messages that it takes now."""
        return self._gate.num_credits or 0

    def end(self, error: OctavoServiceError) -> None:
        """End the stream with an error, and with it all its requests; what the front has said since does not count."""
        if self._reading is not None:
            self._reading.cancel()
        self._gate.end(error)

    def close(self) -> None:
        """End the stream behind what there is for the front."""
        self._gate.end()

    async def run(
        self,
        welcome: pb.CoreWelcome,
        num_credits: int,
        requests: AsyncIterable[pb.JoinRequest],
        write: Callable[[pb.JoinResponse], Awaitable[None]],
    ) -> None:
        """Serve the front until its stream ends.

        Raises: SlowCallerError: it takes nothing. CallerError: it sends nonsense. What `end` was given.
        """
        self._welcome = welcome
        self._batch.response.welcome.CopyFrom(welcome)
        self._gate.grant(num_credits)
        self.tell_state()
        self._reading = asyncio.create_task(self._read(requests))
        tasks = [self._reading, asyncio.create_task(self._tell_state())]
        for task in tasks:
            task.add_done_callback(self._on_end)
        try:
            while await self._gate.wait():
                batch, self._batch = self._batch, AnswerBatch()
                self.num_output_tokens += batch.num_tokens
                async with self._gate.limit():
                    await write(batch.message())
        finally:
            for task in tasks:
                task.cancel()
            try:
                await self._abort_all()  # first: a cancel while we wait leaves none behind
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self.has_left.set()

    # What the front says ---------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterable[pb.JoinRequest]) -> None:
        async for message in requests:
            await self.take(message)
        self._gate.end()

    async def take(self, message: pb.JoinRequest) -> None:
        """Do what a message asks for. Raises CallerError: it is nonsense."""
        for place, submission in enumerate(message.submissions):
            await self._submit(submission)
            if place % SUBMISSIONS_AT_ONCE == SUBMISSIONS_AT_ONCE - 1:
                await asyncio.sleep(0)  # the step loop goes first
        try:
            for end in message.output_ends:
                if (sink := self._requests.get(end.number)) is not None:
                    sink.handle.finish_output(end.output_index, end.num_tokens, decode_reason(end.reason))
            await in_turns(message.aborts, self._abort, ABORTS_AT_ONCE)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CallerError(f"front {self.name} sent an invalid end of an output") from error
        for call in message.abort_calls:
            tenant = call.tenant if call.HasField("tenant") else None
            was_live = await self._engine.abort_request(call.request_id, tenant)
            if not was_live:
                self._early_aborts.add(call.request_id, tenant)
            self.batch().response.abort_answers.add(call=call.call, was_live=was_live)
        if message.credits:
            self._gate.grant(message.credits)
        if message.HasField("is_ready"):
            self.is_ready = message.is_ready
            self._on_readiness()
        if message.metrics and not self.address:  # a standalone front serves its own
            self.loop_lag_us = message.loop_lag_us
            await self._on_metrics(message.metrics)

    def _abort(self, abort: pb.RequestAbort) -> None:
        if (sink := self._requests.get(abort.number)) is not None:
            sink.handle.abort(decode_failure(abort.failure))

    async def _submit(self, submission: pb.Submission) -> None:
        number = submission.number
        if number <= self._last_number:
            raise CallerError(f"front {self.name} reused request number {number}")
        self._last_number = number
        try:
            check_size(submission.num_sequences, submission.beam_search.beam_width)
            request = decode_submission(submission)
            model = self._engine.model
            if model is not None and model.goes_on_with(submission.model_hash, ""):  # else it is refused for that
                check_submission(request, model, submission.max_model_len)
            if self._early_aborts.has(request.request_id, request.tenant, submission.received_before_us / 1e6):
                raise RequestAbortedError(f"request {request.request_id!r} was aborted")
            sink = self._requests[number] = _RemoteSink(self, number, request)
            await self._engine.submit_checked(
                request,
                sink,
                submission.model_hash,
                submission.max_model_len,
                was_queued=submission.was_queued,
                on_losses=sink.tell_losses,
            )
        except OctavoServiceError as error:
            self.refuse(number, error)
        except (IndexError, ValueError, AssertionError) as error:
            self._requests.pop(number, None)
            raise CallerError(f"front {self.name} submitted an invalid request") from error

    def refuse(self, number: int, error: OctavoServiceError) -> None:
        """A request was not queued."""
        self._requests.pop(number, None)
        self.batch().response.ended.add(number=number, failure=encode_failure(error))

    # What the front is told ------------------------------------------------------------------------------------

    def batch(self) -> "AnswerBatch":
        """Return where news goes; the front is told soon."""
        if not self._batch.is_announced:
            self._batch.is_announced = True
            self._gate.note_news()
        return self._batch

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._requests.pop(number, None)

    def tell_state(self) -> None:
        """Tell how the engine is, if that has changed."""
        state = self._state()
        if state != self._told_state:
            self._told_state = state
            self.batch().response.state.CopyFrom(encode_state(state))

    def tell_welcome(self, welcome: Callable[[int], pb.CoreWelcome]) -> None:
        """Say welcome again, in the version that was agreed."""
        self._welcome = welcome(self._welcome.version)
        self.batch().response.welcome.CopyFrom(self._welcome)

    async def _tell_state(self) -> None:
        while True:
            self.tell_state()
            await asyncio.sleep(self._state_interval_s)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._gate.end(error)

    async def _abort_all(self) -> None:
        gone = UnavailableError(FRONT_GONE)
        await in_turns(list(self._requests.values()), lambda sink: sink.handle.abort(gone), ABORTS_AT_ONCE)


class _RemoteSink:
    """The sink of a request of a front in another process."""

    __slots__ = ("_num_tokens_of", "_session", "handle", "number")

    def __init__(self, session: FrontSession, number: int, request: EngineRequest) -> None:
        self.number = number
        self.handle: RequestHandle
        self._session = session
        self._num_tokens_of = request.num_known_tokens

    def begin(self, handle: RequestHandle) -> None:
        self.handle = handle
        self._session.batch().response.accepted.append(self.number)

    def begin_span(self, span: Span) -> None:
        self._session.batch().response.span_begins.add(number=self.number, span=encode_span(span))

    def tell_losses(self, losses: Losses) -> None:
        self._session.batch().response.losses.add(number=self.number, losses=encode_losses(losses))

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> None:
        position = self._num_tokens_of[output_index]
        self._num_tokens_of[output_index] = position + 1
        self._session.batch().add_token(self.number, output_index, position, token_id, logprob, alternatives)

    def push_prompt(self, logprobs: Sequence[float], alternatives: Alternatives) -> None:
        self._session.batch().add_prompt(self.number, logprobs, alternatives)

    def finish_output(self, output_index: int, reason: FinishReason) -> None:
        self._session.batch().response.output_ends.add(
            number=self.number,
            output_index=output_index,
            num_tokens=self._num_tokens_of[output_index],
            reason=REASONS[reason],
        )

    def finish_search(self, hypotheses: Sequence[Hypothesis]) -> None:
        self._session.batch().response.search_ends.append(encode_search_end(self.number, hypotheses))

    def pooled(self, values: Float32Array) -> None:
        self._session.batch().response.pooled_answers.append(encode_pooled(self.number, values))

    def end(self, ended: EndedRequest, error: OctavoServiceError | None) -> None:
        failure = None if error is None else encode_failure(error)
        self._session.batch().response.ended.add(number=self.number, failure=failure, ended=encode_ended(ended))
        self._session.forget(self.number)


class AnswerBatch:
    """Collects answers; a protobuf message takes whole lists faster than single numbers.

    Attributes:
        response: Where everything but tokens goes.
        is_announced: Whether the session knows that it is not empty.
    """

    def __init__(self) -> None:
        self.response = pb.JoinResponse()
        self.is_announced = False
        self._numbers: list[int] = []
        self._output_indexes: list[int] = []
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._logprobs: list[float] = []
        self._has_logprobs = False
        self._alternative_counts: list[int] = []
        self._alternatives = Alternatives([], [])

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return len(self._numbers)

    def add_token(
        self,
        number: int,
        output_index: int,
        position: int,
        token_id: int,
        logprob: float | None,
        alternatives: Alternatives | None,
    ) -> None:
        """Add a token of a request's output."""
        self._numbers.append(number)
        self._output_indexes.append(output_index)
        self._positions.append(position)
        self._token_ids.append(token_id)
        if logprob is None:
            self._logprobs.append(math.nan)
        else:
            self._logprobs.append(logprob)
            self._has_logprobs = True
        if alternatives is None:
            self._alternative_counts.append(0)
        else:
            self._alternative_counts.append(len(alternatives.token_ids))
            self._alternatives.extend(alternatives)

    def add_prompt(self, number: int, logprobs: Sequence[float], alternatives: Alternatives) -> None:
        """Add log-probabilities of a request's prompt."""
        self.response.prompt_logprobs.add(
            number=number,
            logprobs=logprobs,
            alternative_token_ids=alternatives.token_ids,
            alternative_logprobs=alternatives.logprobs,
        )

    def message(self) -> pb.JoinResponse:
        """Return all of it; the batch is not used again."""
        if self._numbers:
            tokens = self.response.tokens
            tokens.numbers.extend(self._numbers)
            if any(self._output_indexes):
                tokens.output_indexes.extend(self._output_indexes)
            tokens.token_ids.extend(self._token_ids)
            tokens.positions.extend(self._positions)
            if self._has_logprobs:
                tokens.logprobs.extend(self._logprobs)
            if self._alternatives.token_ids:
                tokens.alternative_counts.extend(self._alternative_counts)
                tokens.alternative_token_ids.extend(self._alternatives.token_ids)
                tokens.alternative_logprobs.extend(self._alternatives.logprobs)
        return self.response
