"""CoreService: the core's side of the link, where fronts join."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc.aio

from octavo.core.v1 import core_service_pb2 as pb
from octavo.core.v1 import core_service_pb2_grpc as pb_grpc
from scheduler_svc.engine.engine import Engine
from scheduler_svc.link.front_metrics import FrontMetrics
from scheduler_svc.link.front_session import FrontSession
from scheduler_svc.link.state import CoreState
from scheduler_svc.link.tokenizer_files import TokenizerFiles
from shared.errors import CallerError, FencedError
from shared.events import Event

log = logging.getLogger(__name__)

MIN_VERSION = MAX_VERSION = 1

CHUNK_BYTES = 2**20

# How often the state of the core is looked at, and told if it has changed.
STATE_INTERVAL_S = 0.05


class CoreServicer(pb_grpc.CoreServiceServicer):
    """Serves fronts. Errors of the service's tree become statuses outside.

    Args:
        engine: Computes their requests.
        tokenizer: The files of the served model's tokenizer.
        unix_s: Returns the seconds since 1970.
        state_interval_s: How often it is looked whether fronts have to be told how the core is, in seconds.

    Attributes:
        incarnation: Orders the cores of a scheduler.
        metrics: What the fronts have counted.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerFiles,
        unix_s: Callable[[], float] = time.time,
        state_interval_s: float = STATE_INTERVAL_S,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._state_interval_s = state_interval_s
        self._sessions: dict[str, tuple[int, FrontSession]] = {}
        self._numbers = itertools.count()
        self.metrics = FrontMetrics()
        self._changed = asyncio.Event()
        self.incarnation = int(unix_s() * 1000)

    @property
    def sessions(self) -> list[FrontSession]:
        """The fronts that have joined."""
        return [session for _, session in self._sessions.values()]

    async def wait_until_listening(self, num_fronts: int) -> None:
        """Return once so many fronts have opened their ports."""
        while sum(session.is_listening for session in self.sessions) < num_fronts:
            await self._next_change()

    async def wait_until_ready(self, num_fronts: int) -> None:
        """Return once so many fronts take calls."""
        while sum(session.is_ready for session in self.sessions) < num_fronts:
            await self._next_change()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def Join(  # type: ignore[override]  # noqa: N802 (named by the proto; writes by the context)
        self,
        requests: AsyncIterator[pb.JoinRequest],
        context: grpc.aio.ServicerContext[pb.JoinRequest, pb.JoinResponse],
    ) -> None:
        """Serve one front until its stream ends; its requests end with it."""
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            raise CallerError("a front says hello first")
        hello = first.hello
        version = agreed_version(hello)
        number = next(self._numbers)
        session = FrontSession(
            self._engine,
            lambda: core_state(self._engine),
            hello.front_id,
            self._changed.set,
            lambda content: self.metrics.take(number, content),
            self._state_interval_s,
        )
        self._begin(hello, session)
        log.info(Event("front_joined", front=hello.front_id, version=version))
        try:
            await session.run(
                pb.CoreWelcome(version=version, incarnation=self.incarnation), first.credits, requests, context.write
            )
        finally:
            if self._sessions.get(hello.front_id, (0, None))[1] is session:
                del self._sessions[hello.front_id]
            self.metrics.end(number)
            log.info(Event("front_left", front=hello.front_id))

    async def GetTokenizer(  # noqa: N802
        self,
        request: pb.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[pb.GetTokenizerRequest, pb.GetTokenizerResponse],
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """Send the tokenizer's files."""
        for file in self._tokenizer.files():
            for begin in range(0, max(1, len(file.content)), CHUNK_BYTES):
                yield pb.GetTokenizerResponse(name=file.name, content=file.content[begin : begin + CHUNK_BYTES])

    def _begin(self, hello: pb.FrontHello, session: FrontSession) -> None:
        """Let a session begin; an older one of the same front ends first, with all its requests."""
        number, older = self._sessions.get(hello.front_id, (0, None))
        if older is not None:
            if hello.session <= number:
                raise FencedError(f"session {hello.session} of front {hello.front_id!r} is not newer than {number}")
            older.end(FencedError(f"session {hello.session} of front {hello.front_id!r} has begun"))
        self._sessions[hello.front_id] = hello.session, session


def agreed_version(hello: pb.FrontHello) -> int:
    """Return the version to speak. Raises FencedError: there is none."""
    version = min(MAX_VERSION, hello.max_version)
    if version < max(MIN_VERSION, hello.min_version):
        raise FencedError(
            f"front {hello.front_id!r} speaks versions {hello.min_version} to {hello.max_version} of octavo.core.v1; "
            f"this core speaks {MIN_VERSION} to {MAX_VERSION}"
        )
    return version


def core_state(engine: Engine) -> CoreState:
    """Return how the core is."""
    return CoreState(
        model=engine.model,
        why_not_ready=engine.why_not_ready,
        is_draining=engine.is_draining,
        last_trouble=engine.last_trouble,
        has_executor=bool(engine.fleet.cores),
        num_waiting=engine.waiting.num_waiting,
        max_waiting=engine.settings.max_waiting_requests,
        retry_after_s=engine.settings.queue_retry_after_s,
        load=engine.load,
        max_requests=engine.max_requests,
    )
