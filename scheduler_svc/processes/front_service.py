"""A front in a process of its own, put together: ports, texts, and the core behind the link."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import grpc.aio

from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.grpc.grpc_metrics import CallMetrics, service_families
from octavo_shared.grpc.grpc_server import Port, Ports, shut_down
from octavo_shared.grpc.grpc_status import failure_text
from octavo_shared.grpc.health import Health
from octavo_shared.process.garbage_collection import IdleCollection
from octavo_shared.process.metric import Family
from scheduler_svc.config.client_side_config import ClientSideConfig
from scheduler_svc.front.front import Front
from scheduler_svc.front.text.text_model import ModelTokenizer
from scheduler_svc.link.remote_core import RemoteCore
from scheduler_svc.processes.client_services import GENERATION_SERVICE
from scheduler_svc.processes.loop_lag import LoopLag

# Makes a port beside those of clients, from the health of the process and what returns its metrics.
MakePort = Callable[[Health, Callable[[], list[Family]]], Port]

# Share of the grace period that traces have in any case, also where the last calls took all of it.
FLUSH_SHARE = 0.1


class FrontService:
    """One front.

    Args:
        config: What clients meet.
        name: By which the core knows it.
        open_channel: Opens a channel to the core.
        explain: Says why a call to the core failed.
        is_shared: Whether other fronts serve at the same addresses.
        other_ports: What makes the ports beside those of clients, by name.

    Attributes:
        core: The core, as the link has it.
        front: What clients meet.
        ports: Those of clients, and the others.
        is_ready: Set while new requests find an executor.

    Raises: OctavoServiceError: see `Front`.
    """

    def __init__(
        self,
        config: ClientSideConfig,
        name: str,
        open_channel: Callable[[], grpc.aio.Channel],
        explain: Callable[[grpc.aio.AioRpcError], str] = failure_text,
        *,
        is_shared: bool = False,
        other_ports: Mapping[str, MakePort] = MappingProxyType({}),
    ) -> None:
        self._grace_s = config.shutdown_grace_s
        self._calls = CallMetrics()
        self._loop_lag = LoopLag()
        self._health = Health([GENERATION_SERVICE])
        self.is_ready = asyncio.Event()
        tokenizer = ModelTokenizer(config.tokenizer, escapes_special_tokens=config.escape_special_tokens)
        self.core = RemoteCore(
            open_channel,
            name,
            tokenizer.load,
            self._set_ready,
            self._collect,
            lambda: self._loop_lag.longest_s,
            self._take_rules,
            explain,
        )
        self.front = Front(
            config,
            self.core,
            tokenizer,
            self._health,
            self._collect,
            call_metrics=self._calls,
            is_shared=is_shared,
        )
        others = {} if self.front.openai is None else {"openai": self.front.openai}
        made = {name: make(self._health, self._collect) for name, make in other_ports.items()}
        self.ports = Ports(self.front.main, {**others, **made})

    async def run(self, open_ports: Callable[[], Awaitable[None]], stopping: asyncio.Future[str]) -> None:
        """Serve until somebody wants it to stop, then end in order.

        Args:
            open_ports: Opens `ports`, and returns when calls may come.
            stopping: Has the reason, once there is one.

        Raises: OctavoServiceError: it cannot start.
        """

        async def take_calls() -> None:
            await open_ports()
            await self.core.take_calls()

        opening = asyncio.create_task(take_calls(), name="ports")
        tasks = [
            opening,
            asyncio.create_task(self.core.run(), name="link"),
            asyncio.create_task(self.front.pace.watch(), name="pace"),
            asyncio.create_task(self._loop_lag.watch(), name="loop-lag"),
            asyncio.create_task(IdleCollection(lambda: self.core.num_requests == 0).run(), name="collector"),
        ]
        deadline_s = None
        try:
            reason = await _why_to_stop(stopping, tasks)
            deadline_s = time.monotonic() + self._grace_s
            if opening.done():
                await shut_down(self.ports, reason, drain=self._drain, grace_s=self._grace_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not opening.cancelled():
                await self.ports.stop(0)
            left_s = 0.0 if deadline_s is None else deadline_s - time.monotonic()
            await self.front.close(max(left_s, FLUSH_SHARE * self._grace_s))

    async def _drain(self) -> None:
        await self.core.leave()
        self.front.generation.shut_down()

    async def _set_ready(self, is_ready: bool) -> None:
        await self._health.set_ready(is_ready)
        if is_ready:
            self.is_ready.set()
        else:
            self.is_ready.clear()

    def _take_rules(self, welcome: pb.CoreWelcome) -> None:
        """What a front refuses for the core's sake, the core says: its settings are not ours."""
        generation = self.front.generation
        generation.settings = replace(
            generation.settings, tenants=frozenset(welcome.tenants) or None, has_priorities=welcome.has_priorities
        )

    def _collect(self) -> list[Family]:
        return [*service_families(self._calls, self.front.tls), *self.front.families()]


async def _why_to_stop(stopping: asyncio.Future[str], tasks: Iterable[asyncio.Task[None]]) -> str:
    """Return the reason once somebody wants us to stop. Raises: what ended a task before; we are started again then."""
    pending: set[asyncio.Future[Any]] = {stopping, *tasks}
    while not stopping.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
    return stopping.result()


def link_options(max_message_bytes: int) -> list[tuple[str, int | str]]:
    """Return the options of a channel to the core."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
