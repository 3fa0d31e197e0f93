"""The stream of a front to the engine at an address: begun again, as a new session, whenever it breaks."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from octavo.admin.v1 import admin_service_pb2_grpc
from octavo.core.v1 import core_service_pb2 as pb
from octavo.core.v1 import core_service_pb2_grpc as pb_grpc
from octavo_shared.errors import InvalidFieldError, MalformedMessageError, OctavoServiceError, UnavailableError
from octavo_shared.grpc.grpc_status import failure_text
from octavo_shared.process.events import Event
from octavo_shared.process.metric import Family
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.incarnation import require_believable
from octavo_shared.step_wire.message_bytes import CheckedAnswers
from scheduler_svc.link.front_metrics import encode_families

if TYPE_CHECKING:
    from octavo.admin.v1.admin_service_pb2_grpc import AdminServiceAsyncStub
    from scheduler_svc.link.remote_engine import RemoteEngine

log = logging.getLogger(__name__)

# Messages of the engine that may be on their way: a step each, so that the engine never waits for a word of ours.
MAX_MESSAGES_ON_THEIR_WAY = 32

# From one attempt to join to the next one, in seconds: twice as long each time while none succeeds.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5

# From one word about metrics to the next one, in seconds: Prometheus asks every 15 s by default.
METRICS_INTERVAL_S = 2.0

# What reading a message raises that no engine sends.
_UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


class EngineFaultError(OctavoServiceError):
    """The engine sent what no engine sends: the session ends, and its requests go on behind what there is."""


class EngineStream:
    """Keeps a front joined to the engine at an address.

    Args:
        owner: What is joined.
        open_channel: Opens a channel to the engine.
        outbox: What the front has to say.
        collect: Returns what this front has counted, for the metrics of the scheduler.
        loop_lag_s: Returns how late a timer of this front was at most in the last minute, in seconds.
        explain: Says why a stream broke or did not begin.

    Attributes:
        trouble: Why the engine did not answer, when it last did not; "": it has welcomed us.
        admin: Its AdminService, on the channel of the session; None: there is none.
    """

    def __init__(
        self,
        owner: "RemoteEngine",
        open_channel: Callable[[], grpc.aio.Channel],
        outbox: "Outbox",
        collect: Callable[[], Iterable[Family]],
        loop_lag_s: Callable[[], float],
        explain: Callable[[grpc.aio.AioRpcError], str],
    ) -> None:
        self.trouble = ""
        self.admin: AdminServiceAsyncStub | None = None
        self._owner = owner
        self._open_channel = open_channel
        self._outbox = outbox
        self._collect = collect
        self._loop_lag_s = loop_lag_s
        self._explain = explain
        self._pause_s = FIRST_PAUSE_S
        self._num_taken = 0  # messages for which no credit has been given again
        self._tasks: list[asyncio.Task[None]] = []  # of the session

    async def run(self) -> None:
        """Be joined to the engine, and join again whenever the stream breaks; until cancelled."""
        while True:
            if self._owner.is_joined_elsewhere():
                await asyncio.sleep(LONGEST_PAUSE_S)
                continue
            trouble = "it closed the stream"
            try:
                async with self._open_channel() as channel:
                    checked: Any = CheckedAnswers(channel, "the engine", EngineFaultError)
                    self.admin = admin_service_pb2_grpc.AdminServiceStub(checked)
                    try:
                        await self._run_session(pb_grpc.CoreServiceStub(checked))
                    finally:
                        self.admin = None
            except grpc.aio.AioRpcError as error:
                trouble = self._explain(error)
            except OctavoServiceError as error:
                trouble = str(error)
                if isinstance(error, EngineFaultError):  # it may be the same again
                    self._pause_s = LONGEST_PAUSE_S
            finally:
                await self._owner.lose(trouble)
            if trouble != self.trouble:
                self.trouble = trouble
                level = logging.WARNING if self._owner.is_away else logging.INFO  # else there was none yet
                log.log(level, Event("engine_lost", front=self._owner.front_id, cause=trouble))
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def note_welcome(self) -> None:
        """The engine has welcomed us."""
        self.trouble, self._pause_s = "", FIRST_PAUSE_S

    def start(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Run something beside the session, which cancels it at its end."""
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        return task

    async def _run_session(self, stub: "pb_grpc.CoreServiceAsyncStub") -> None:
        self._outbox.clear()
        self._num_taken, self._tasks = 0, []
        call = stub.Join()
        await call.write(pb.JoinRequest(hello=self._owner.hello(), credits=MAX_MESSAGES_ON_THEIR_WAY))
        try:
            async for message in call:
                if not self._tasks:  # a write before the welcome could fail first, and hide why we are refused
                    self.start(self._outbox.write_to(call), "outbox")
                    self.start(self._tell_metrics(), "metrics")
                await self._take(message, stub)
                self._grant()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            call.cancel()

    async def _take(
        self, message: pb.JoinResponse | MalformedMessageError, stub: "pb_grpc.CoreServiceAsyncStub"
    ) -> None:
        """Have the owner take a message. Raises EngineFaultError: no engine sends it; and what the owner raises."""
        if isinstance(message, MalformedMessageError):
            raise EngineFaultError("the engine sent a message that cannot be decoded") from message
        try:
            await self._owner.take(message, stub)
        except _UNREADABLE as error:
            words = " ".join(f"{type(error).__name__} {error}".split())
            raise EngineFaultError(f"the engine sent an invalid message: {words[:200]}") from error

    def _grant(self) -> None:
        self._num_taken += 1
        if self._num_taken >= MAX_MESSAGES_ON_THEIR_WAY // 2:
            self._outbox.message.credits += self._num_taken
            self._num_taken = 0
            self._outbox.wake()

    async def _tell_metrics(self) -> None:
        while True:
            self._outbox.message.metrics = encode_families(self._collect())
            self._outbox.message.loop_lag_us = round(1e6 * self._loop_lag_s())
            self._outbox.wake()
            await asyncio.sleep(METRICS_INTERVAL_S)


# Prompts in one message, in bytes, but for the last of them: a message has a limit.
MAX_PROMPT_BYTES = 4 * 2**20


class Outbox:
    """Belongs to one front, over all of its sessions.

    Attributes:
        message: The message that grows; after adding to it, call `wake`.
    """

    def __init__(self) -> None:
        self.message = pb.JoinRequest()
        self._num_prompt_bytes = 0  # in `message`
        self._full: deque[pb.JoinRequest] = deque()  # before `message`
        self._has_news = asyncio.Event()

    def wake(self) -> None:
        """There is something to write."""
        self._has_news.set()

    def submit(self, submission: pb.Submission) -> None:
        """Add a request; the message is closed behind it if its prompts are large enough."""
        self.message.submissions.append(submission)
        self._num_prompt_bytes += len(submission.prompt_token_ids)
        if self._num_prompt_bytes >= MAX_PROMPT_BYTES:
            self._full.append(self._take())
        self.wake()

    def clear(self) -> None:
        """A session begins: what was for the last session is void."""
        self._take()
        self._full.clear()

    async def write_to(self, call: "grpc.aio.StreamStreamCall[pb.JoinRequest, pb.JoinResponse]") -> None:
        """Write to a stream whatever there is, until cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            while self._full:
                await call.write(self._full.popleft())
            await call.write(self._take())

    def _take(self) -> pb.JoinRequest:
        message, self.message, self._num_prompt_bytes = self.message, pb.JoinRequest(), 0
        return message


class StaleEngineError(OctavoServiceError):
    """The engine that answers is an older one, or says nonsense of its place."""


class Incarnations:
    """The largest incarnation of each scheduler."""

    def __init__(self) -> None:
        self._latest_of: dict[str, int] = {}

    def latest_of(self, scheduler_id: str) -> int:
        """Return the incarnation of the latest engine of a scheduler; 0: none was joined."""
        return self._latest_of.get(scheduler_id, 0)

    def require_latest(self, scheduler_id: str, incarnation: int, unix_s: float) -> None:
        """Keep the incarnation of an engine that is joined. Raises StaleEngineError: a later engine was joined."""
        if not incarnation:  # it is new, and waits for its executors
            return
        try:
            require_believable(incarnation, unix_s)
        except InvalidFieldError as error:
            raise StaleEngineError(
                f"the engine of scheduler {scheduler_id!r} sent an invalid incarnation: {error}"
            ) from error
        if incarnation < (former := self.latest_of(scheduler_id)):
            raise StaleEngineError(
                f"the engine of scheduler {scheduler_id!r} has the incarnation {incarnation}; this front has joined a "
                f"later one, {former}"
            )
        self._latest_of[scheduler_id] = incarnation


async def fetch_tokenizer(stub: "pb_grpc.CoreServiceAsyncStub") -> tuple[TokenizerFile, ...]:
    """Fetch the files. Raises UnavailableError: the engine does not give them."""
    contents: dict[str, bytearray] = {}
    chunk: Any
    try:
        async for chunk in stub.GetTokenizer(pb.GetTokenizerRequest()):
            if isinstance(chunk, MalformedMessageError):
                raise UnavailableError(
                    "the engine answered GetTokenizer with a message that cannot be decoded"
                ) from chunk
            contents.setdefault(chunk.name, bytearray()).extend(chunk.content)
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(f"the engine did not send the tokenizer files: {failure_text(error)}") from error
    return tuple(TokenizerFile(name, bytes(content)) for name, content in contents.items())
