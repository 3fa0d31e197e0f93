"""CoreService: the engine's side of the link, where fronts join."""

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from octavo.admin.v1 import admin_pb2
from octavo.core.v1 import core_service_pb2 as pb
from octavo.core.v1 import core_service_pb2_grpc as pb_grpc
from octavo_shared.errors import CallerError, FencedError, UnavailableError
from octavo_shared.grpc.interceptor import peer_address
from octavo_shared.process.events import Event
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from scheduler_svc.engine.engine import Engine
from scheduler_svc.executors.fleet_model import LoadTokenizer
from scheduler_svc.link.early_aborts import EarlyAborts
from scheduler_svc.link.front_metrics import FrontMetrics
from scheduler_svc.link.front_session import FrontSession
from scheduler_svc.link.messages import EngineState
from scheduler_svc.processes.incarnation import Incarnation

log = logging.getLogger(__name__)

MIN_VERSION = MAX_VERSION = 1

CHUNK_BYTES = 2**20

# Of how many fronts the past is kept, and how long their names may be, which they choose themselves.
MAX_FRONTS_KEPT = 1000
MAX_FRONT_ID_CHARS = 256

# How often the state of the engine is looked at, and told if it has changed.
STATE_INTERVAL_S = 0.05


@dataclass(slots=True)
class _Past:
    """What is known of a front beside its session.

    Attributes:
        num_sessions: How often it has joined.
        num_restarts: How often as another process.
        num_output_tokens: That went to it in sessions that have ended.
    """

    num_sessions: int = 0
    num_restarts: int = 0
    num_output_tokens: int = 0
    _pid: int = 0

    def begin(self, pid: int) -> None:
        """It joins."""
        self.num_restarts += self.num_sessions > 0 and pid != self._pid
        self.num_sessions, self._pid = self.num_sessions + 1, pid


class EngineServicer(pb_grpc.CoreServiceServicer):
    """Serves fronts. Errors of the service's tree become statuses outside.

    Args:
        engine: Computes their requests.
        tokenizer: The files of the served model's tokenizer.
        incarnation: Orders the engines of our scheduler.
        state_interval_s: How often it is looked whether fronts have to be told how the engine is, in seconds.
        prefix_key_fingerprint: See `CoreWelcome`.

    Attributes:
        incarnation: As above.
        metrics: What the fronts have counted.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: "TokenizerFiles",
        incarnation: Incarnation,
        state_interval_s: float = STATE_INTERVAL_S,
        prefix_key_fingerprint: bytes = b"",
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._state_interval_s = state_interval_s
        self._sessions: dict[tuple[bool, str], tuple[int, FrontSession]] = {}  # of our own machine or not, and its name
        self._prefix_key_fingerprint = prefix_key_fingerprint
        self._numbers = itertools.count()
        self._early_aborts = EarlyAborts()
        self.metrics = FrontMetrics()
        self._is_closed = False
        self._changed = asyncio.Event()
        self._past: defaultdict[tuple[bool, str], _Past] = defaultdict(_Past)
        self.incarnation = incarnation
        self.incarnation.on_granted = self.tell_welcome

    @property
    def sessions(self) -> list[FrontSession]:
        """The fronts that have joined."""
        return [session for _, session in self._sessions.values()]

    @property
    def own_sessions(self) -> list[FrontSession]:
        """The fronts that this scheduler has started."""
        return [session for session in self.sessions if not session.address]

    def states(self, num_own: int) -> list[admin_pb2.FrontState]:
        """Return how each front is: our own by number, then the standalone ones that have joined."""
        own = {session.name: session for session in self.own_sessions}
        named: list[tuple[str, FrontSession | None]] = [(name, own.get(name)) for name in map(str, range(num_own))]
        named += [(session.name, session) for session in self.sessions if session.address]
        return [self._state_of(name, session) for name, session in named]

    def _state_of(self, name: str, session: FrontSession | None) -> admin_pb2.FrontState:
        """Return how a front is; without a session it is one of ours, and away."""
        past = self._past[session is not None and bool(session.address), name]
        state = admin_pb2.FrontState(
            front_id=name,
            num_restarts=past.num_restarts,
            num_sessions=past.num_sessions,
            num_output_tokens=past.num_output_tokens,
        )
        if session is not None:
            state.pid = 0 if session.address else session.pid
            state.is_ready = session.is_ready
            state.num_requests = session.num_requests
            state.address = session.address
            state.num_output_tokens += session.num_output_tokens
            state.num_credits = session.num_credits
            state.loop_lag_us = session.loop_lag_us
        return state

    async def wait_until_ready(self, num_fronts: int) -> None:
        """Return once so many fronts of ours take calls."""
        while sum(session.is_ready for session in self.own_sessions) < num_fronts:
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
        if self._is_closed:
            raise UnavailableError("the scheduler is shutting down")
        if first is None or not first.HasField("hello"):
            raise CallerError("the first message of a front must be its hello")
        hello = first.hello
        version = agreed_version(hello)
        if (num_chars := len(hello.front_id)) > MAX_FRONT_ID_CHARS:
            raise CallerError(f"a front's id has {num_chars:,} characters; it must have at most {MAX_FRONT_ID_CHARS}")
        await self._keep_order(hello)
        await context.send_initial_metadata(())  # see `grpc_status.abort`: a front may be cut in its first message
        key = bool(peer_address(context)), hello.front_id
        await self._end_older(key, hello)
        if self._is_closed:
            raise UnavailableError("the scheduler is shutting down")
        number = next(self._numbers)
        session = FrontSession(
            self._engine,
            lambda: engine_state(self._engine),
            hello.front_id,
            hello.pid,
            self._changed.set,
            lambda content: self.metrics.take(number, content),
            self._state_interval_s,
            self._early_aborts,
            address=peer_address(context),
        )
        self._begin(key, hello, session)
        log.info(Event("front_joined", front=hello.front_id, version=version, address=session.address or "here"))
        try:
            await session.run(self._welcome(version), first.credits, requests, context.write)
        finally:
            del self._sessions[key]
            self._past[key].num_output_tokens += session.num_output_tokens
            self.metrics.end(number)
            self._changed.set()
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

    async def _keep_order(self, hello: pb.FrontHello) -> None:
        """Be later than every engine that the front has joined. Raises: see `Incarnation.follow_front`."""
        if hello.scheduler_id in ("", self.incarnation.scheduler_id):
            who = f"front {hello.front_id!r}"
            await self.incarnation.follow_front(hello.incarnation, who, self._ask_executors)

    async def _ask_executors(self) -> bool:
        """Follow the engines that the executors know; return whether one answers. Raises SupersededError."""
        clients = [driver.client for driver in self._engine.drivers.values()]
        return any(await asyncio.gather(*(client.ask_incarnation(self.incarnation) for client in clients)))

    def tell_welcome(self) -> None:
        """Our number counts from now on, or other tenants are served: tell the fronts that have joined before."""
        for session in self.sessions:
            session.tell_welcome(self._welcome)

    async def close(self, timeout_s: float) -> None:
        """The engine ends: let each front have what there is for it, end its stream, and let none join."""
        await self._end_sessions(lambda _: True, timeout_s)

    async def let_go(self, timeout_s: float) -> None:
        """The engine ends before live requests do: standalone fronts have theirs go on at another one, or the next."""
        await self._end_sessions(lambda session: bool(session.address), timeout_s)

    async def _end_sessions(self, which: Callable[[FrontSession], bool], timeout_s: float) -> None:
        self._is_closed = True
        for session in filter(which, self.sessions):
            session.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(map(which, self.sessions)):
                    await self._next_change()

    def _welcome(self, version: int) -> pb.CoreWelcome:
        return pb.CoreWelcome(
            version=version,
            incarnation=self.incarnation.granted,
            scheduler_id=self.incarnation.scheduler_id,
            tenants=sorted(self._engine.tenants.served or ()),
            has_priorities=self._engine.settings.has_priorities,
            prefix_key_fingerprint=self._prefix_key_fingerprint,
        )

    async def _end_older(self, key: tuple[bool, str], hello: pb.FrontHello) -> None:
        """End an older session of the same front, and wait until none of its requests is left.

        Raises: FencedError: the older one is newer.
        """
        while key in self._sessions:
            number, older = self._sessions[key]
            if hello.session <= number:
                raise FencedError(f"session {hello.session} of front {hello.front_id!r} is not newer than {number}")
            older.end(FencedError(f"session {hello.session} of front {hello.front_id!r} has begun"))
            await older.has_left.wait()

    def _begin(self, key: tuple[bool, str], hello: pb.FrontHello, session: FrontSession) -> None:
        self._sessions[key] = hello.session, session
        self._past[key].begin(hello.pid)
        if len(self._past) > MAX_FRONTS_KEPT:
            gone = (each for each in self._past if each[0] and each not in self._sessions)
            self._past.pop(next(gone, key), None)


def agreed_version(hello: pb.FrontHello) -> int:
    """Return the version to speak. Raises FencedError: there is none."""
    version = min(MAX_VERSION, hello.max_version)
    if version < max(MIN_VERSION, hello.min_version):
        raise FencedError(
            f"front {hello.front_id!r} supports versions {hello.min_version} to {hello.max_version} of octavo.core.v1; "
            f"this engine supports {MIN_VERSION} to {MAX_VERSION}"
        )
    return version


def engine_state(engine: Engine) -> EngineState:
    """Return how the engine is."""
    return EngineState(
        model=engine.model,
        why_not_ready=engine.why_not_ready,
        is_draining=engine.is_draining,
        last_trouble=engine.last_trouble,
        has_executor=bool(engine.fleet.planners),
        num_waiting=engine.waiting.num_waiting,
        max_waiting=engine.settings.max_waiting_requests,
        retry_after_s=engine.estimate.retry_after_s(),
        load=engine.load,
        max_requests=engine.max_requests,
        max_waiting_tokens=engine.settings.max_waiting_tokens,
        orphan_timeout_s=engine.settings.orphan_timeout_s,
        tenants_at_share=engine.waiting.tenants_at_share,
    )


class TokenizerFiles:
    """Keeps the files that the first executor of the fleet has, and reads none of them.

    Args:
        load: Reads them for a front in the engine's own process; None: there is none.
    """

    def __init__(self, load: LoadTokenizer | None = None) -> None:
        self._load = load
        self._files: tuple[TokenizerFile, ...] | None = None

    async def load(self, info: ExecutorInfo, fetch: Callable[[], Awaitable[Sequence[TokenizerFile]]]) -> None:
        """Another executor process is the first one of the fleet: its model is about to be served."""
        files = tuple(await fetch())
        if self._load is not None:
            await self._load(info, _given(files))
        self._files = files

    def files(self) -> tuple[TokenizerFile, ...]:
        """Return them. Raises UnavailableError: no executor has been attached yet."""
        if self._files is None:
            raise UnavailableError("no executor has been attached yet; retry in a moment")
        return self._files


def _given(files: tuple[TokenizerFile, ...]) -> Callable[[], Awaitable[tuple[TokenizerFile, ...]]]:
    async def fetch() -> tuple[TokenizerFile, ...]:
        return files

    return fetch
