"""One engine process as a front in a process of its own has it; `cell.py` makes one engine of all that it joins.

One stream carries all requests that the front has there (`engine_stream.py`). When it breaks, the front joins the
engine that answers at the address then, which goes on with the live requests: their clients notice nothing.
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import grpc
import grpc.aio
from google.protobuf.message import Message

from octavo.core.v1 import core_service_pb2 as pb
from octavo.core.v1 import core_service_pb2_grpc as pb_grpc
from octavo_shared.errors import (
    OctavoServiceError,
    RequestAbortedError,
    UnavailableError,
)
from octavo_shared.grpc.grpc_status import failure_text
from octavo_shared.process.events import Event
from octavo_shared.process.metric import Family
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from scheduler_svc.link.absence import LIMIT_S, Absence
from scheduler_svc.link.engine_stream import EngineStream, Incarnations, Outbox, fetch_tokenizer
from scheduler_svc.link.messages import REASONS, UNREACHABLE, EngineState, decode_state, encode_failure
from scheduler_svc.link.remote_admin import Asked, call_remote
from scheduler_svc.link.remote_request import RemoteRequest, deliver
from scheduler_svc.request.engine_client import AnswerSink
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.served_model import ServedModel

log = logging.getLogger(__name__)

MIN_VERSION = MAX_VERSION = 1

LOADING = "the tokenizer is loading"

ReadTokenizer = Callable[[ExecutorInfo, Callable[[], Awaitable[tuple[TokenizerFile, ...]]]], Awaitable[None]]


class RemoteEngine:
    """An engine process at an address.

    Args:
        open_channel: Opens a channel to it.
        front_id: Our name.
        read_tokenizer: Called before a model counts as served here: its tokenizer may be another one.
        on_change: Called when it may take requests, or no more, and when it has gone.
        collect: Returns what this front has counted, for the metrics of the scheduler.
        loop_lag_s: Returns how late a timer of this front was at most in the last minute, in seconds.
        on_welcome: Called with the engine's first word, at each of them.
        explain: Says why a stream broke or did not begin.
        unix_s: Returns the seconds since 1970: sessions are numbered by their beginning.
        incarnations: Shared by all engines of a front.

    Attributes:
        state: How it is, as it last told.
        model: What it serves, or served last; None: it has not said it, or its tokenizer is not here.
        scheduler_id: The scheduler that it belongs to; "": it has not been joined.
        incarnation, prefix_key_fingerprint: See `CoreWelcome`.
        is_joined_elsewhere: Whether we are joined to it at another address: a second session would end that one.
    """

    def __init__(
        self,
        open_channel: Callable[[], grpc.aio.Channel],
        front_id: str,
        read_tokenizer: ReadTokenizer,
        on_change: Callable[[], None],
        collect: Callable[[], Iterable[Family]] = tuple,
        loop_lag_s: Callable[[], float] = float,
        on_welcome: Callable[[pb.CoreWelcome], None] = lambda _: None,
        explain: Callable[[grpc.aio.AioRpcError], str] = failure_text,
        unix_s: Callable[[], float] = time.time,
        incarnations: Incarnations | None = None,
    ) -> None:
        self._unix_s = unix_s
        self._on_welcome = on_welcome
        self.front_id = front_id
        self._read_tokenizer = read_tokenizer
        self._on_change = on_change
        self._is_front_ready: bool | None = None  # None: this session has not said it
        self.state = UNREACHABLE
        self.model: ServedModel | None = None
        self._tokenizer_of = ""
        self._tokenizer_trouble = ""
        self._loading: asyncio.Task[None] | None = None
        self._outbox = Outbox()
        self._stream = EngineStream(self, open_channel, self._outbox, collect, loop_lag_s, explain)
        self._numbers = itertools.count(1)
        self._calls = itertools.count(1)
        self._requests: dict[int, RemoteRequest] = {}
        self._num_untold = 0  # sequences that began here since `state` was told, less sequences that ended
        self._abort_calls: dict[int, tuple[pb.AbortCall, asyncio.Future[bool]]] = {}
        self._absence = Absence(self._give_up)
        self.scheduler_id = ""
        self.incarnation = 0
        self.prefix_key_fingerprint = b""
        self._incarnations = Incarnations() if incarnations is None else incarnations
        self.is_joined_elsewhere: Callable[[], bool] = lambda: False
        self._trouble = ""  # that broke the last stream

    @property
    def engine_trouble(self) -> str:
        """Why it did not answer, when it last did not; "": it has welcomed us."""
        return self._stream.trouble

    @property
    def is_reachable(self) -> bool:
        """Whether we are joined to it."""
        return self.state is not UNREACHABLE

    @property
    def is_away(self) -> bool:
        """Whether it has gone, or has no executor yet, and is expected back."""
        return self._absence.is_on

    @property
    def has_spoken(self) -> bool:
        """Whether it has told what it serves, if anything, or did not answer."""
        return bool(self.engine_trouble) or (self.is_reachable and self.why_not_ready != LOADING)

    @property
    def why_not_ready(self) -> str:
        """Why it takes no requests, in words; "": it takes some."""
        is_loading = self.model is None and self.state.model is not None
        return self._tokenizer_trouble or self.state.why_not_ready or (LOADING if is_loading else "")

    @property
    def last_trouble(self) -> str:
        """See `EngineClient`."""
        if not self.is_reachable and self.engine_trouble:
            return f"{UNREACHABLE.why_not_ready}: {self.engine_trouble}"
        return self._tokenizer_trouble or self.state.last_trouble or self.why_not_ready

    @property
    def num_slots(self) -> int:
        """Places in the batches of its executors, as `Place` has them."""
        return self.state.load.max_num_seqs

    @property
    def num_taken(self) -> int:
        """How many of them are taken or waited for, as it told, and by what we know since."""
        return max(0, self.state.load.num_taken_slots + self.state.load.num_waiting + self._num_untold)

    async def submit(self, request: EngineRequest, sink: AnswerSink, checked_for: ServedModel) -> None:
        """Queue a request there, once it is back if it is away; errors as in `EngineClient.submit`."""
        await self._absence.wait()
        self.require_reachable()
        number = next(self._numbers)
        remote = RemoteRequest(self, number, request, sink, checked_for)
        submission = remote.submission(self.model)
        self._requests[number] = remote
        self._num_untold += request.width
        self._outbox.submit(submission)
        try:
            await remote.queued
        except asyncio.CancelledError:
            remote.abort(RequestAbortedError("the client cancelled the call or disconnected"))
            raise

    async def abort_request(self, request_id: str, tenant: str | None) -> bool:
        """See `EngineClient`; if it has gone, the answer comes from the next one at its address.

        Raises: UnavailableError: it does not answer.
        """
        if self.is_away and (own := self._held(request_id, tenant)) is not None:
            self.abort(own, RequestAbortedError(f"request {request_id!r} was aborted"))
            return True
        await self._absence.wait()
        self.require_reachable()
        call = pb.AbortCall(call=next(self._calls), request_id=request_id, tenant=tenant)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._abort_calls[call.call] = call, answer
        self._outbox.message.abort_calls.append(call)
        self._outbox.wake()
        return await answer

    def _held(self, request_id: str, tenant: str | None) -> int | None:
        """Return the number of a request of this front; None: it has none of that name."""
        for number, held in self._requests.items():
            if held.request.request_id == request_id and tenant in (None, held.request.tenant):
                return number
        return None

    async def call_admin(self, method: str, request: Asked) -> Message:
        """Call a method of its AdminService; errors as in `EngineClient.admin`."""
        self.require_reachable()
        if (admin := self._stream.admin) is None:
            raise UnavailableError("the connection to the scheduler's engine has just ended; retry in a moment")
        return await call_remote(getattr(admin, method), request)

    def require_reachable(self) -> None:
        """Raise UnavailableError if we are not joined to it."""
        if not self.is_reachable:
            raise UnavailableError(f"{UNREACHABLE.why_not_ready}; retry in a moment")

    # Requests that go on at another engine -----------------------------------------------------------------------

    @property
    def waiting_requests(self) -> Sequence[tuple[int, EngineRequest]]:
        """The requests that wait for it while it is away or has no executor, and those put back, with their numbers."""
        waits = self.is_away or (self.is_reachable and not self.state.has_executor)
        live = ((number, remote) for number, remote in self._requests.items() if remote.aborted_with is None)
        return [(number, remote.request) for number, remote in live if waits or remote.is_put_back]

    def can_take_over(self, lost: "RemoteEngine") -> bool:
        """Whether it may go on with requests of another engine: of the same scheduler, or with the same bits."""
        if self.scheduler_id == lost.scheduler_id:
            return True
        if self.model is None or lost.model is None:
            return False
        own, other = self.model.reproducibility, lost.model.reproducibility
        has_same_weights = own.weights_digest == other.weights_digest != ""
        return has_same_weights and own.numerics_ids == other.numerics_ids and bool(own.numerics_ids)

    def take_over(self, lost: "RemoteEngine", number: int) -> None:
        """Go on with a request that another engine had under a number."""
        assert self.model is not None, "it takes requests"
        remote = lost._requests.pop(number)
        if not lost.is_away:
            lost.abort(number, RequestAbortedError("another scheduler has taken over this request"))
        own_number = next(self._numbers)
        remote.move_to(self, own_number)
        self._requests[own_number] = remote
        self._num_untold += remote.request.width
        self._resubmit(own_number, remote, self.model)

    def _resubmit(self, number: int, remote: RemoteRequest, model: ServedModel) -> None:
        try:
            self._outbox.submit(remote.resubmission(model))
        except UnavailableError as error:
            self._end_here(number, error)

    @property
    def num_requests(self) -> int:
        """Live requests of this front."""
        return len(self._requests)

    def tell_ready(self, *, is_ready: bool) -> None:
        """Tell it whether clients reach this front, and it finds an executor for them."""
        if is_ready != self._is_front_ready:
            self._is_front_ready = is_ready
            self._outbox.message.is_ready = is_ready
            self._outbox.wake()

    # What requests say -----------------------------------------------------------------------------------------

    def finish_output(self, number: int, output_index: int, num_tokens: int, reason: FinishReason) -> None:
        """A request says with how many tokens an output ends."""
        self._outbox.message.output_ends.add(
            number=number, output_index=output_index, num_tokens=num_tokens, reason=REASONS[reason]
        )
        self._outbox.wake()

    def abort(self, number: int, error: OctavoServiceError) -> None:
        """A request is to end."""
        if self.is_away or ((remote := self._requests.get(number)) is not None and remote.is_put_back):
            self._end_here(number, error)
            return
        self._outbox.message.aborts.add(number=number, failure=encode_failure(error))
        self._outbox.wake()

    def _end_here(self, number: int, error: OctavoServiceError) -> None:
        """End a request that no engine has."""
        if (request := self._requests.pop(number, None)) is not None:
            self._num_untold -= request.request.width
            request.fail(error)
            asyncio.get_running_loop().call_soon(self._on_change)  # not here: it may move others, and we are in a loop

    # The stream ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Be joined to the engine, and join again whenever the stream breaks; until cancelled."""
        await self._stream.run()

    def hello(self) -> pb.FrontHello:
        """Return the first word of a session, which begins."""
        self._is_front_ready = None
        return pb.FrontHello(
            min_version=MIN_VERSION,
            max_version=MAX_VERSION,
            front_id=self.front_id,
            session=int(self._unix_s() * 1e9),
            scheduler_id=self.scheduler_id,
            incarnation=self._incarnations.latest_of(self.scheduler_id),
            pid=os.getpid(),
        )

    async def lose(self, trouble: str) -> None:
        """The stream broke, or did not begin: what was asked of the engine waits for the next one."""
        if self.is_reachable:
            self._trouble = trouble
            self._absence.begin()
        self.state = UNREACHABLE
        for number, request in list(self._requests.items()):
            if request.aborted_with is not None:  # whether that engine heard of it or not: the next one must not go on
                self._end_here(number, request.aborted_with)
        self._num_untold = 0
        self._on_change()

    def _give_up(self, after_s: float) -> None:
        """No engine came: what waits for one ends."""
        if not self.is_reachable:
            error = UnavailableError(
                f"the scheduler's engine stopped ({self._trouble}), and no new one has started for {after_s:g} s; "
                "retry in a moment"
            )
        else:
            why = "the tokenizer did not load" if self.state.has_executor else "no executor was attached"
            error = UnavailableError(f"{why} within {after_s:g} s (--orphan-timeout-s); retry later")
        requests, self._requests = self._requests, {}
        self._num_untold = 0
        for request in requests.values():
            request.fail(error)
        calls, self._abort_calls = self._abort_calls, {}
        for _, answer in calls.values():
            if not answer.done():
                answer.set_exception(error)
        self._on_change()

    def _go_on(self) -> None:
        """Have the engine that we joined go on with the requests of the last one, once it can."""
        model = self.state.model
        has_model = model is not None and model.info.instance_id == self._tokenizer_of
        if not self._absence.is_on or not self.is_reachable:
            return
        if not self.state.has_executor or model is None or not has_model:
            self._absence.wait_for_executor(self.state.orphan_timeout_s or LIMIT_S)
            return
        for number, request in list(self._requests.items()):
            self._resubmit(number, request, model)
        self._outbox.message.abort_calls.extend(call for call, _ in self._abort_calls.values())
        self._absence.end()
        self._outbox.wake()
        log.info(Event("requests_go_on", front=self.front_id, requests=len(self._requests)))

    # What the engine says ----------------------------------------------------------------------------------------

    async def take(self, message: pb.JoinResponse, stub: "pb_grpc.CoreServiceAsyncStub") -> None:
        """Take a message of the engine. Raises OctavoServiceError, or what no engine sends does: the session ends."""
        if message.HasField("welcome"):
            welcome = message.welcome
            self.scheduler_id, self.incarnation = welcome.scheduler_id, welcome.incarnation
            self.prefix_key_fingerprint = welcome.prefix_key_fingerprint
            self._incarnations.require_latest(welcome.scheduler_id, welcome.incarnation, self._unix_s())
            self._stream.note_welcome()
            self._on_welcome(welcome)
            fields = {"version": welcome.version, "incarnation": welcome.incarnation}
            log.info(Event("engine_joined", front=self.front_id, **fields))
        deliver(message, self._requests)  # before the state, which may move requests to other engines
        had_requests, is_put_back = bool(self._requests), False
        for ended in message.ended:
            if (request := self._requests.get(ended.number)) is not None:
                request.end(ended)
                is_put_back |= request.is_put_back
                if not request.is_put_back:
                    del self._requests[ended.number]  # not before: an end that cannot be read ends nothing
                self._num_untold -= request.request.width
        if message.HasField("state"):
            await self._take_state(decode_state(message.state), stub)
        if is_put_back or (had_requests and not self._requests):
            self._on_change()
        if message.HasField("state"):  # it counts what the rest of the message accepted or ended
            self._num_untold = sum(one.request.width for one in self._requests.values() if not one.queued.done())
        for answer in message.abort_answers:
            _, waiting = self._abort_calls.pop(answer.call, (None, None))
            if waiting is not None and not waiting.done():
                waiting.set_result(answer.was_live)

    async def _take_state(self, state: EngineState, stub: "pb_grpc.CoreServiceAsyncStub") -> None:
        """Take how the engine is; a model with another tokenizer is served once we have that one."""
        self.state = state
        if state.model is not None:
            if self._tokenizer_of == state.model.info.instance_id:
                self.model = state.model
            elif self._loading is None or self._loading.done():  # streams go on meanwhile
                self._loading = self._stream.start(self._load(stub), "tokenizer")
        self._go_on()
        self._on_change()

    async def _load(self, stub: "pb_grpc.CoreServiceAsyncStub") -> None:
        """Load the tokenizer of the model that the engine serves, which may change while it loads."""
        try:
            while (model := self.state.model) is not None and model.info.instance_id != self._tokenizer_of:
                await self._read_tokenizer(model.info, lambda: fetch_tokenizer(stub))
                self._tokenizer_of, self._tokenizer_trouble = model.info.instance_id, ""
        except OctavoServiceError as error:
            if str(error) != self._tokenizer_trouble:
                log.warning(Event("no_tokenizer", front=self.front_id, cause=str(error)))
            self._tokenizer_trouble = str(error)
        else:
            if model is not None:
                self.model = model
            self._go_on()
        self._on_change()
