"""Where a scene is played: real gRPC on loopback, or the simulated network. Next: `unary.py`, a table of scenes."""

import asyncio
import contextlib
import logging
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from octavo_shared.grpc.grpc_status import failure_text
from tests.simulation.loop import SimulationLoop
from tests.simulation.network.client import SimulatedChannel
from tests.simulation.network.link import Network, Weather
from tests.simulation.network.server import SimulatedServer
from tests.simulation.processes import SimulatedProcess
from tests.simulation.scenes.proxy import Proxy

Handlers = Mapping[str, Any]
Interceptors = Sequence[grpc.aio.ServerInterceptor]
Scene = Callable[["Stage"], Awaitable[None]]
Notes = dict[str, list[Any]]

SERVICE = "scene.Service"

# A scene that takes longer has got stuck.
LONGEST_SCENE_S = 20.0

# A deadline within which a handler begins, on any machine.
LONG_ENOUGH_S = 0.5

# So long silence lasts until the client of a scene gives its connection up.
KEEPALIVE_S = 0.2

_KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 500)),
    ("grpc.keepalive_timeout_ms", round(KEEPALIVE_S * 500)),
    ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_S * 500)),
    ("grpc.http2.max_pings_without_data", 0),
]
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
_SERVER_OPTIONS = [("grpc.http2.min_ping_interval_without_data_ms", 10), ("grpc.http2.max_ping_strikes", 0)]


class Server(Protocol):
    """What serves in a scene."""

    async def stop(self, grace: float | None) -> None:
        """Take no more calls; end those that run after so many seconds."""


class Stage(Protocol):
    """What a scene sees.

    Attributes:
        notes: What each of those who act has seen, in its order; stages are compared by them.
    """

    notes: Notes

    async def serve(self, handlers: Handlers, interceptors: Interceptors = ()) -> Server:
        """Start a server."""

    def channel(self, *, keeps_alive: bool = False) -> Any:
        """Return a new channel to the server's address, whether or not it listens."""

    def reset(self) -> None:
        """Break all connections; both sides are told."""

    def silence(self) -> None:
        """Let nothing pass any more on the connections that there are, nor any word of that."""

    async def stand_still(self, duration_s: float) -> None:
        """Let the client's process do nothing for so long, as if it were stopped."""

    async def close(self) -> None:
        """End what is left."""


class RealStage:
    """grpc.aio over loopback, through a proxy that can break things."""

    def __init__(self) -> None:
        self.notes: Notes = defaultdict(list)
        self._proxy = Proxy()
        self._servers: list[grpc.aio.Server] = []
        self._channels: list[grpc.aio.Channel] = []

    async def open(self) -> None:
        """Find an address."""
        await self._proxy.open()

    async def serve(self, handlers: Handlers, interceptors: Interceptors = ()) -> Server:
        """See `Stage`."""
        server = grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, dict(handlers))])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await self._proxy.lead_to(port)
        self._servers.append(server)
        return server

    def channel(self, *, keeps_alive: bool = False) -> Any:
        """See `Stage`."""
        options = [*_OPTIONS, *(_KEEPALIVE_OPTIONS if keeps_alive else ())]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._proxy.port}", options=options)
        self._channels.append(channel)
        return channel

    def reset(self) -> None:
        """See `Stage`."""
        self._proxy.reset()

    def silence(self) -> None:
        """See `Stage`."""
        self._proxy.is_silent = True

    async def stand_still(self, duration_s: float) -> None:
        """See `Stage`; the server's callbacks stand still, too."""
        time.sleep(duration_s)  # noqa: ASYNC251 -- the loop is what is to stand still

    async def close(self) -> None:
        """See `Stage`."""
        for channel in self._channels:
            await channel.close()
        for server in self._servers:
            await server.stop(0)
        await self._proxy.close()


class SimulatedStage:
    """The simulated network; one process serves, and the scene is played in another one."""

    def __init__(self, loop: SimulationLoop, seed: str) -> None:
        self.notes: Notes = defaultdict(list)
        self._network = Network(loop, seed, Weather(jitter_s=0.01))
        self._server = SimulatedProcess("server", loop)
        self._client = SimulatedProcess("client", loop)
        self._loop = loop

    async def play(self, scene: Scene) -> Notes:
        """Play a scene in the client's process."""
        return await self._client.start(_play(scene, self))

    async def serve(self, handlers: Handlers, interceptors: Interceptors = ()) -> Server:
        """See `Stage`."""
        server = SimulatedServer(self._server, "server:1", interceptors)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, dict(handlers))])
        self._network.listen(server)
        return server

    def channel(self, *, keeps_alive: bool = False) -> Any:
        """See `Stage`."""
        return SimulatedChannel(self._network, "server:1", KEEPALIVE_S if keeps_alive else None)

    def reset(self) -> None:
        """See `Stage`."""
        self._network.reset("client", "server")

    def silence(self) -> None:
        """See `Stage`."""
        self._network.cut("client", "server")

    async def stand_still(self, duration_s: float) -> None:
        """See `Stage`."""
        self._loop.call_at(self._loop.time() + duration_s, self._client.resume, context=self._server.context())
        self._client.stall()
        await asyncio.sleep(0.0)

    async def close(self) -> None:
        """See `Stage`."""


def play_really(scene: Scene) -> Notes:
    """Play a scene on grpc.aio; return what was noted."""

    async def play() -> Notes:
        stage = RealStage()
        await stage.open()
        return await _play(scene, stage)

    with _quiet():
        return asyncio.run(play())


def play_simulated(scene: Scene, seed: str) -> Notes:
    """Play a scene on the simulated network; return what was noted."""
    loop = SimulationLoop(seed)  # type: ignore[abstract]
    try:
        return loop.run_until_complete(SimulatedStage(loop, seed).play(scene))
    finally:
        loop.close()


async def _play(scene: Scene, stage: "RealStage | SimulatedStage") -> Notes:
    try:
        async with asyncio.timeout(LONGEST_SCENE_S):
            await scene(stage)
        return {name: list(notes) for name, notes in stage.notes.items()}
    finally:
        await stage.close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what grpc.aio logs of handlers that fail to itself."""
    logger = logging.getLogger("grpc")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


# What scenes are made of ---------------------------------------------------------------------------


def method(channel: Any, name: str, kind: str = "unary_unary") -> Any:
    """Return what makes calls of a method; messages are bytes."""
    return getattr(channel, kind)(f"/{SERVICE}/{name}", bytes, bytes)


async def end_of(awaitable: Awaitable[Any]) -> str:
    """Return how something ends, in words that are the same wherever it is played."""
    try:
        return f"{await awaitable!r}".replace("<grpc.aio.EOF>", "EOF")
    except grpc.aio.AioRpcError as error:
        trailers = dict(error.trailing_metadata() or ())
        return " ".join(filter(None, (_plain(failure_text(error)), f"{trailers}" if trailers else "")))
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return "CancelledError"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def connected(stage: Stage) -> Any:
    """Return a channel that is connected, so that a call's deadline is not spent on that."""
    channel = stage.channel()
    await end_of(method(channel, "None")(b""))
    return channel


def _plain(text: str) -> str:
    """Leave out what gRPC's threads decide: whether a reason is wrapped, and who first met a broken connection."""
    text = re.sub(r"Stream removed \((.*?)(?: \(\d+\))?\)", r"\1", text)
    return re.sub(r"recvmsg:.*|sendmsg:.*|Socket closed", "the connection broke", text)
