"""The engine as a front in a process of its own has it: `EngineClient` over the wire.

One stream carries all requests of the front. When it breaks, the front joins again, as a new session, at whichever
engine answers, and has it go on with the requests that are live: their clients notice nothing. New ones wait meanwhile.
"""

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import grpc
import grpc.aio

from octavo.core.v1 import core_service_pb2 as pb
from octavo.core.v1 import core_service_pb2_grpc as pb_grpc
from octavo_shared.errors import (
    InvalidFieldError,
    MalformedMessageError,
    NoExecutorError,
    OctavoServiceError,
    QueueFullError,
    RequestAbortedError,
    UnavailableError,
)
from octavo_shared.grpc.grpc_status import failure_text
from octavo_shared.process.events import Event
from octavo_shared.process.metric import Family
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from octavo_shared.step_wire.incarnation import require_believable
from octavo_shared.step_wire.message_bytes import CheckedAnswers
from scheduler_svc.link.absence import LIMIT_S, Absence
from scheduler_svc.link.ends import REASONS, decode_reason, decode_search_end, decode_span
from scheduler_svc.link.failures import encode_failure
from scheduler_svc.link.front_metrics import encode_families
from scheduler_svc.link.outbox import Outbox
from scheduler_svc.link.remote_request import RemoteRequest
from scheduler_svc.link.state import UNREACHABLE, CoreState, decode_state
from scheduler_svc.link.tokenizer_fetch import fetch_tokenizer
from scheduler_svc.request.engine_client import AnswerSink, EngineLoad
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason
from scheduler_svc.request.served_model import ServedModel

log = logging.getLogger(__name__)

MIN_VERSION = MAX_VERSION = 1

# Messages of the engine that may be on their way: a step each, so that the engine never waits for a word of ours.
MAX_MESSAGES_ON_THEIR_WAY = 32

LEAVING = "this front of the scheduler is shutting down"

# From one attempt to join to the next one, in seconds: twice as long each time while none succeeds.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5

# From one word about metrics to the next one, in seconds: Prometheus asks every 15 s by default.
METRICS_INTERVAL_S = 2.0

# What reading a message raises that no engine sends.
_UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)

LoadTokenizer = Callable[[ExecutorInfo, Callable[[], Awaitable[tuple[TokenizerFile, ...]]]], Awaitable[None]]


class StaleCoreError(OctavoServiceError):
    """The engine that answers is an older one, or says nonsense of its place."""


class CoreFaultError(OctavoServiceError):
    """The engine sent what no engine sends: the session ends, and its requests go on behind what there is."""


class RemoteEngine:
    """See `EngineClient`.

    Args:
        open_channel: Opens a channel to the engine.
        front_id: Our name.
        load_tokenizer: Called before a model is served whose tokenizer is another one.
        set_ready: Called with whether new requests find an executor, when that changes.
        collect: Returns what this front has counted, for the metrics of the scheduler.
        unix_s: Returns the seconds since 1970: sessions are numbered by their beginning.
        loop_lag_s: Returns how late a timer of this front was at most in the last minute, in seconds.
        on_welcome: Called with the engine's first word, at each of them.
        explain: Says why a stream broke or did not begin.

    Attributes:
        core_trouble: Why the engine did not answer, when it last did not.
    """

    def __init__(
        self,
        open_channel: Callable[[], grpc.aio.Channel],
        front_id: str,
        load_tokenizer: LoadTokenizer,
        set_ready: Callable[[bool], Awaitable[None]],
        collect: Callable[[], Iterable[Family]] = tuple,
        loop_lag_s: Callable[[], float] = float,
        on_welcome: Callable[[pb.CoreWelcome], None] = lambda _: None,
        explain: Callable[[grpc.aio.AioRpcError], str] = failure_text,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._unix_s = unix_s
        self._collect = collect
        self._loop_lag_s = loop_lag_s
        self._on_welcome = on_welcome
        self._explain = explain
        self._pause_s = FIRST_PAUSE_S
        self.core_trouble = ""
        self.front_id = front_id
        self._open_channel = open_channel
        self._load_tokenizer = load_tokenizer
        self._set_ready = set_ready
        self._takes_calls = False
        self._is_leaving = False
        self._is_ready: bool | None = None  # None: this session has not said it
        self._is_told = asyncio.Event()
        self._state = UNREACHABLE
        self._model: ServedModel | None = None  # the last one, also while the engine is away
        self._tokenizer_of = ""
        self._tokenizer_trouble = ""
        self._loading: asyncio.Task[None] | None = None
        self._outbox = Outbox()
        self._numbers = itertools.count(1)
        self._calls = itertools.count(1)
        self._requests: dict[int, RemoteRequest] = {}
        self._num_checked_of: Counter[str] = Counter()  # by tenant
        self._abort_calls: dict[int, tuple[pb.AbortCall, asyncio.Future[bool]]] = {}
        self._absence = Absence(self._give_up)
        self._scheduler_id = ""  # of the engine that we joined last
        self._incarnations: dict[str, int] = {}  # the largest one of each scheduler
        self._trouble = ""  # that broke the last stream
        self._num_taken = 0
        self._has_news = asyncio.Event()

    # EngineClient ----------------------------------------------------------------------------------------------

    @property
    def model(self) -> ServedModel | None:
        """See `EngineClient`."""
        return self._model

    @property
    def why_not_ready(self) -> str:
        """See `EngineClient`."""
        if self._is_leaving:
            return LEAVING
        is_loading = self._model is None and self._state.model is not None
        return (
            self._tokenizer_trouble or self._state.why_not_ready or ("the tokenizer is loading" if is_loading else "")
        )

    @property
    def is_draining(self) -> bool:
        """See `EngineClient`."""
        return self._state.is_draining

    @property
    def last_trouble(self) -> str:
        """See `EngineClient`."""
        if self._state is UNREACHABLE and self.core_trouble:
            return f"{UNREACHABLE.why_not_ready}: {self.core_trouble}"
        return self._tokenizer_trouble or self._state.last_trouble or self.why_not_ready

    @property
    def load(self) -> EngineLoad:
        """See `EngineClient`."""
        return self._state.load

    def waits_for(self, request_id: str, tenant: str) -> str:
        """See `EngineClient`; the place of one request is not known here."""
        num_waiting = self._state.load.num_waiting
        return f"{num_waiting} in line" if num_waiting else ""

    @property
    def max_requests(self) -> int | None:
        """See `EngineClient`."""
        return self._state.max_requests

    @contextmanager
    def checking(self, request_id: str, tenant: str) -> Iterator[ServedModel]:
        """See `EngineClient`: from what the engine has told; the share of a tenant is for the engine to say.

        So others than those it names are refused only when their prompts that are being checked here fill the queue.
        """
        state = self._state
        self._require_core()
        if self._is_leaving and not state.is_draining:
            raise UnavailableError(f"{LEAVING}; connect again, and send the request there")
        if state.is_draining:
            raise UnavailableError(f"{state.why_not_ready}; retry with another scheduler")
        if not state.has_executor or self._model is None or self._tokenizer_trouble:
            raise NoExecutorError("no executor is attached", self.last_trouble)
        if tenant in state.tenants_at_share or self._num_checked_of[tenant] >= state.max_waiting:
            num_waiting, num_tokens = state.num_waiting + self._num_checked_of.total(), None
            if num_waiting < state.max_waiting:
                num_tokens = state.load.num_waiting_prompt_tokens
            raise QueueFullError(num_waiting, state.retry_after_s, num_waiting_tokens=num_tokens)
        self._num_checked_of[tenant] += 1
        try:
            yield self._model
        finally:
            self._num_checked_of[tenant] -= 1
            self._num_checked_of += Counter()  # forgets tenants with none

    async def submit(self, request: EngineRequest, sink: AnswerSink, checked_for: ServedModel) -> None:
        """See `EngineClient`."""
        await self.wait_until_reachable()
        self._require_core()
        number = next(self._numbers)
        remote = self._requests[number] = RemoteRequest(self, number, request, sink, checked_for)
        self._outbox.submit(remote.submission())
        try:
            await remote.queued
        except asyncio.CancelledError:
            remote.abort(RequestAbortedError("the client cancelled the call or disconnected"))
            raise

    async def abort_request(self, request_id: str, tenant: str | None) -> bool:
        """See `EngineClient`. Raises UnavailableError: the engine does not answer, or goes away before it does."""
        if self._absence.is_on and (own := self._held(request_id, tenant)) is not None:
            self.abort(own, RequestAbortedError(f"request {request_id!r} was aborted"))
            return True
        await self.wait_until_reachable()
        self._require_core()
        call = pb.AbortCall(call=next(self._calls), request_id=request_id, tenant=tenant)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._abort_calls[call.call] = call, answer
        self._outbox.message.abort_calls.append(call)
        self._outbox.wake()
        return await answer

    async def wait_until_reachable(self) -> None:
        """See `EngineClient`."""
        await self._absence.wait()

    def _held(self, request_id: str, tenant: str | None) -> int | None:
        """Return the number of a request of this front; None: it has none of that name."""
        for number, held in self._requests.items():
            if held.request.request_id == request_id and tenant in (None, held.request.tenant):
                return number
        return None

    def _require_core(self) -> None:
        if self._state is UNREACHABLE:
            raise UnavailableError(f"{UNREACHABLE.why_not_ready}; retry in a moment")

    @property
    def num_requests(self) -> int:
        """Live requests of this front."""
        return len(self._requests)

    async def leave(self) -> None:
        """Take no new requests, and return once none is live: this front ends, and the scheduler may not."""
        self._is_leaving = True
        await self._tell_readiness()
        while self._requests:
            self._has_news.clear()
            await self._has_news.wait()

    async def wait_until_told(self) -> None:
        """Return once the engine has said how it is."""
        await self._is_told.wait()

    async def take_calls(self) -> None:
        """Clients reach us from now on."""
        self._takes_calls = True
        await self._tell_readiness()

    # What requests say -----------------------------------------------------------------------------------------

    def finish_output(self, number: int, output_index: int, num_tokens: int, reason: FinishReason) -> None:
        """A request says with how many tokens an output ends."""
        self._outbox.message.output_ends.add(
            number=number, output_index=output_index, num_tokens=num_tokens, reason=REASONS[reason]
        )
        self._outbox.wake()

    def abort(self, number: int, error: OctavoServiceError) -> None:
        """A request is to end."""
        if self._absence.is_on:
            self._end_here(number, error)
            return
        self._outbox.message.aborts.add(number=number, failure=encode_failure(error))
        self._outbox.wake()

    def _end_here(self, number: int, error: OctavoServiceError) -> None:
        """End a request that no engine has."""
        if (request := self._requests.pop(number, None)) is not None:
            request.fail(error)
            self._has_news.set()

    # The stream ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Be joined to the engine, and join again whenever the stream breaks; until cancelled."""
        while True:
            trouble = "it closed the stream"
            try:
                async with self._open_channel() as channel:
                    checked: Any = CheckedAnswers(channel, "the engine", CoreFaultError)
                    await self._run_session(pb_grpc.CoreServiceStub(checked))
            except grpc.aio.AioRpcError as error:
                trouble = self._explain(error)
            except OctavoServiceError as error:
                trouble = str(error)
                if isinstance(error, CoreFaultError):  # it may be the same again
                    self._pause_s = LONGEST_PAUSE_S
            finally:
                await self._lose(trouble)
            if trouble != self.core_trouble:
                self.core_trouble = trouble
                is_lost = self._absence.is_on  # else there was none yet
                log.log(
                    logging.WARNING if is_lost else logging.INFO, Event("core_lost", front=self.front_id, cause=trouble)
                )
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _run_session(self, stub: "pb_grpc.CoreServiceAsyncStub") -> None:
        self._outbox.clear()
        self._num_taken, self._is_ready = 0, None
        call = stub.Join()
        hello = pb.FrontHello(
            min_version=MIN_VERSION,
            max_version=MAX_VERSION,
            front_id=self.front_id,
            session=int(self._unix_s() * 1e9),
            scheduler_id=self._scheduler_id,
            incarnation=self._incarnations.get(self._scheduler_id, 0),
            pid=os.getpid(),
        )
        await call.write(pb.JoinRequest(hello=hello, credits=MAX_MESSAGES_ON_THEIR_WAY))
        tasks: list[asyncio.Task[None]] = []
        try:
            async for message in call:
                if not tasks:  # a write before the welcome could fail first, and hide why we are refused
                    tasks += [
                        asyncio.create_task(self._outbox.write_to(call)),
                        asyncio.create_task(self._tell_metrics()),
                    ]
                await self._take_checked(message, stub)
        finally:
            if self._loading is not None:
                tasks.append(self._loading)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _tell_metrics(self) -> None:
        while True:
            self._outbox.message.metrics = encode_families(self._collect())
            self._outbox.message.loop_lag_us = round(1e6 * self._loop_lag_s())
            self._outbox.wake()
            await asyncio.sleep(METRICS_INTERVAL_S)

    async def _lose(self, trouble: str) -> None:
        """The engine is gone: what was asked of it waits for the next one."""
        if self._state is not UNREACHABLE:
            self._trouble = trouble
            self._absence.begin()
        self._state = UNREACHABLE
        for number, request in list(self._requests.items()):
            if request.aborted_with is not None:  # whether that engine heard of it or not: the next one must not go on
                self._end_here(number, request.aborted_with)
        await self._tell_readiness()

    def _give_up(self, after_s: float) -> None:
        """No engine came: what waits for one ends."""
        if self._state is UNREACHABLE:
            error = UnavailableError(
                f"the scheduler's engine stopped ({self._trouble}), and no new one has started for {after_s:g} s; "
                "retry in a moment"
            )
        else:
            why = "the tokenizer did not load" if self._state.has_executor else "no executor was attached"
            error = UnavailableError(f"{why} within {after_s:g} s (--orphan-timeout-s); retry later")
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.fail(error)
        calls, self._abort_calls = self._abort_calls, {}
        for _, answer in calls.values():
            if not answer.done():
                answer.set_exception(error)
        self._has_news.set()

    def _go_on(self) -> None:
        """Have the engine that we joined go on with what the one before it had, once it can."""
        model = self._state.model
        has_model = model is not None and model.info.instance_id == self._tokenizer_of
        if not self._absence.is_on or self._state is UNREACHABLE:
            return
        if not self._state.has_executor or model is None or not has_model:
            self._absence.wait_for_executor(self._state.orphan_timeout_s or LIMIT_S)
            return
        for number, request in list(self._requests.items()):
            try:
                self._outbox.submit(request.resubmission(model))
            except UnavailableError as error:
                del self._requests[number]
                request.fail(error)
        self._outbox.message.abort_calls.extend(call for call, _ in self._abort_calls.values())
        self._absence.end()
        self._outbox.wake()
        self._has_news.set()
        log.info(Event("requests_go_on", front=self.front_id, requests=len(self._requests)))

    # What the engine says ----------------------------------------------------------------------------------------

    async def _take_checked(
        self, message: pb.JoinResponse | MalformedMessageError, stub: "pb_grpc.CoreServiceAsyncStub"
    ) -> None:
        """Take a message. Raises CoreFaultError: no engine sends it. TokenGapError, StaleCoreError: see there."""
        if isinstance(message, MalformedMessageError):
            raise CoreFaultError("the engine sent a message that cannot be decoded") from message
        try:
            await self._take(message, stub)
        except _UNREADABLE as error:
            words = " ".join(f"{type(error).__name__} {error}".split())
            raise CoreFaultError(f"the engine sent an invalid message: {words[:200]}") from error
        self._grant()

    async def _take(self, message: pb.JoinResponse, stub: "pb_grpc.CoreServiceAsyncStub") -> None:
        if message.HasField("welcome"):
            self._keep_order(message.welcome)
            self._pause_s = FIRST_PAUSE_S
            self.core_trouble = ""
            self._on_welcome(message.welcome)
            fields = {"version": message.welcome.version, "incarnation": message.welcome.incarnation}
            log.info(Event("core_joined", front=self.front_id, **fields))
        if message.HasField("state"):
            await self._take_state(decode_state(message.state), stub)
        for number in message.accepted:
            if (request := self._requests.get(number)) is not None:
                request.begin()
        for prompt in message.prompt_logprobs:
            if (request := self._requests.get(prompt.number)) is not None:
                alternatives = Alternatives(list(prompt.alternative_token_ids), list(prompt.alternative_logprobs))
                request.sink.push_prompt(list(prompt.logprobs), alternatives)
        for begin in message.span_begins:
            if (request := self._requests.get(begin.number)) is not None:
                request.sink.begin_span(decode_span(begin.span))
        if message.HasField("tokens"):
            self._take_tokens(message.tokens)
        for end in message.output_ends:
            if (request := self._requests.get(end.number)) is not None:
                request.end_output(end.output_index, end.num_tokens, decode_reason(end.reason))
        for search in message.search_ends:
            if (request := self._requests.get(search.number)) is not None:
                request.sink.finish_search(decode_search_end(search))
        for ended in message.ended:
            if (request := self._requests.get(ended.number)) is not None:
                request.end(ended)
                del self._requests[ended.number]  # not before: one that cannot be read ends nothing
        for answer in message.abort_answers:
            _, waiting = self._abort_calls.pop(answer.call, (None, None))
            if waiting is not None and not waiting.done():
                waiting.set_result(answer.was_live)
        self._has_news.set()

    def _keep_order(self, welcome: pb.CoreWelcome) -> None:
        """Join no engine that is older than one of its scheduler that we have joined. Raises StaleCoreError: it is."""
        self._scheduler_id = welcome.scheduler_id
        if not welcome.incarnation:  # it is new, and waits for its executors
            return
        former = self._incarnations.get(welcome.scheduler_id, 0)
        try:
            require_believable(welcome.incarnation, self._unix_s())
        except InvalidFieldError as error:
            raise StaleCoreError(
                f"the engine of scheduler {welcome.scheduler_id!r} sent an invalid incarnation: {error}"
            ) from error
        if welcome.incarnation < former:
            raise StaleCoreError(
                f"the engine of scheduler {welcome.scheduler_id!r} has the incarnation {welcome.incarnation}; this "
                f"front has joined a later one, {former}"
            )
        self._incarnations[welcome.scheduler_id] = welcome.incarnation

    def _take_tokens(self, tokens: pb.Tokens) -> None:
        """Give tokens to their requests, in the order in which they came.

        Raises: TokenGapError: some are missing. ValueError: columns do not fit each other.
        """
        num_tokens, requests = len(tokens.numbers), self._requests
        num_alternatives = sum(tokens.alternative_counts)
        if {len(tokens.alternative_token_ids), len(tokens.alternative_logprobs)} != {num_alternatives}:
            raise ValueError(f"{num_alternatives} alternatives were counted")
        rows = zip(
            tokens.numbers,
            tokens.output_indexes or repeat(0, num_tokens),
            tokens.positions,
            tokens.token_ids,
            tokens.logprobs or repeat(None, num_tokens),
            tokens.alternative_counts or repeat(0, num_tokens),
            strict=True,
        )
        first = 0
        for number, output_index, position, token_id, logprob, num_alternatives in rows:
            alternatives = None
            if num_alternatives:
                ends = first + num_alternatives
                alternatives = Alternatives(
                    list(tokens.alternative_token_ids[first:ends]), list(tokens.alternative_logprobs[first:ends])
                )
                first = ends
            request = requests.get(number)
            if request is not None:
                known = None if logprob is None or logprob != logprob else logprob  # NaN: not computed
                request.push(output_index, position, token_id, known, alternatives)

    async def _take_state(self, state: CoreState, stub: "pb_grpc.CoreServiceAsyncStub") -> None:
        """Take how the engine is; a model with another tokenizer is served once we have that one."""
        self._state = state
        if state.model is not None:
            if self._tokenizer_of == state.model.info.instance_id:
                self._model = state.model
            elif self._loading is None or self._loading.done():  # streams go on meanwhile
                self._loading = asyncio.create_task(self._load(state.model, stub), name="tokenizer")
        self._is_told.set()
        self._go_on()
        await self._tell_readiness()

    async def _load(self, model: ServedModel, stub: "pb_grpc.CoreServiceAsyncStub") -> None:
        try:
            await self._load_tokenizer(model.info, lambda: fetch_tokenizer(stub))
        except OctavoServiceError as error:
            if str(error) != self._tokenizer_trouble:
                log.warning(Event("no_tokenizer", front=self.front_id, cause=str(error)))
            self._tokenizer_trouble = str(error)
        else:
            self._tokenizer_of, self._tokenizer_trouble, self._model = model.info.instance_id, "", model
            self._go_on()
        await self._tell_readiness()

    async def _tell_readiness(self) -> None:
        is_ready = not self.why_not_ready
        if self._takes_calls and is_ready != self._is_ready:
            self._is_ready = is_ready
            await self._set_ready(is_ready)
            self._outbox.message.is_ready = is_ready
            self._outbox.wake()

    def _grant(self) -> None:
        self._num_taken += 1
        if self._num_taken >= MAX_MESSAGES_ON_THEIR_WAY // 2:
            self._outbox.message.credits += self._num_taken
            self._num_taken = 0
            self._outbox.wake()
