"""A front in a process of its own, joined to an engine: `octavo-front --engine HOST:PORT`, or one of `supervisor.py`.

A standalone front opens its ports at once: probes and clients hear that it finds no engine. A front that a supervisor
started shares its ports with other fronts, and opens them once it has joined the engine: until then the others serve.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio

from octavo.calls.tls import TlsOptions, handshake_trouble
from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.grpc.announce import Announcements
from octavo_shared.grpc.exposure import warn_if_exposed
from octavo_shared.grpc.grpc_metrics import CallMetrics, service_families
from octavo_shared.grpc.grpc_server import (
    Health,
    Port,
    Ports,
    announce_listening,
    announce_when_ready,
    leave,
    probe_server,
    shut_down,
)
from octavo_shared.grpc.grpc_status import failure_text
from octavo_shared.grpc.membership import Membership
from octavo_shared.process.config import load_config_or_exit
from octavo_shared.process.garbage_collection import IdleCollection, settle
from octavo_shared.process.metric import Family
from octavo_shared.process.metrics_server import MetricsServer
from octavo_shared.process.stop_request import StopRequest
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.config.dial_tls import ENGINE_FLAGS, engine_tls, read_credentials
from scheduler_svc.front.front import Front
from scheduler_svc.front.text.text_model import ModelTokenizer
from scheduler_svc.link.cell import Cell, cell_families
from scheduler_svc.link.engine_stream import Incarnations
from scheduler_svc.link.remote_engine import ReadTokenizer, RemoteEngine
from scheduler_svc.processes.process import GENERATION_SERVICE, SETTINGS_FROM_STDIN, LoopLag, run_to_end
from scheduler_svc.telemetry.vllm_metrics import vllm_families

# An engine behind a broken network is noticed after both of these, in milliseconds; while we send, after the second.
KEEPALIVE_TIME_MS = 6_000
KEEPALIVE_TIMEOUT_MS = 2_500

# Share of the grace period that is kept for sending traces, even if the last calls took all of it.
FLUSH_SHARE = 0.1


def main() -> int:
    """Serve until SIGTERM, or until the parent ends; return the exit code."""
    if sys.argv[1:] == [SETTINGS_FROM_STDIN]:
        config = FrontConfig.model_validate_json(sys.stdin.readline())
        return run_to_end(config, serve(config), f"scheduler: front {config.front_id}")
    config = load_config_or_exit(FrontConfig, sys.argv[1:], os.environ)
    return run_to_end(config, serve(config), "front")


async def serve(config: FrontConfig) -> int:
    """Run the front until told to stop; return the exit code. Raises OctavoServiceError: the front cannot start."""
    settle()
    stopping = asyncio.ensure_future(StopRequest(exit_on_stdin_close=config.exit_on_stdin_close).wait())
    service = FrontService(config)
    announcing = asyncio.create_task(announce(service, f"the scheduler at {', '.join(config.engine)}"))
    try:
        await service.run(stopping)
    finally:
        announcing.cancel()
    return 0


async def announce(service: "FrontService", engine: str) -> None:
    """Print on stdout that the ports are open, and once calls find an executor; it need not be read."""
    await service.is_listening.wait()
    announce_listening("front", service.address, service.ports.other_addresses, awaits=engine)
    await announce_when_ready(
        "front", service.address, service.is_ready.wait, lambda: f"{engine}: {service.last_trouble}"
    )


class FrontService:
    """One front: ports, texts, and the engines that it has joined.

    Attributes:
        cells: The joined engines, by the name of the model that they serve.
        ports: The ports of clients, and the others.
        is_listening: Set once the ports are open.
        address: The address of clients, once the ports are open.
        is_ready: Set while new requests for any model find an executor.

    Raises: OctavoServiceError: see `Front`; or a file of TLS to the engine cannot be used.
    """

    def __init__(self, config: FrontConfig) -> None:
        self._config = config
        if (tls := engine_tls(config, config.engine)) is not None:
            read_credentials(tls, ENGINE_FLAGS)  # unusable files prevent the start, and not only every connection
        self._calls = CallMetrics()
        self._loop_lag = LoopLag()
        self._health = Health([GENERATION_SERVICE])
        self.is_listening, self.is_ready = asyncio.Event(), asyncio.Event()
        self.address = ""
        self._name = config.front_id or config.own_name
        self._incarnations = Incarnations()
        self._ready_models: set[str] = set()
        tokenizers = {
            name: ModelTokenizer(config.tokenizer, escapes_special_tokens=config.escape_special_tokens)
            for name in config.engines_by_model
        }
        self.cells = {name: self._cell(name, tokenizer) for name, tokenizer in tokenizers.items()}
        self.front = Front(
            config,
            {name: (cell, tokenizers[name]) for name, cell in self.cells.items()},
            self._health,
            self._collect,
            call_metrics=self._calls,
            is_shared=config.is_started_by_scheduler,
        )
        self.ports = Ports(self.front.main, self._other_ports())

    def _cell(self, name: str, tokenizer: ModelTokenizer) -> Cell:
        """Return the engines of a model."""
        config, targets = self._config, self._config.engines_by_model[name]
        return Cell(
            Membership(targets, config.resolve_interval_s),
            partial(self._open_engine, name, engine_tls(config, targets)),
            tokenizer.load,
            partial(self._set_ready, name),
            has_own_tokenizer=config.tokenizer is not None,
            name=name,
            awaits_others=not config.is_started_by_scheduler,
        )

    @property
    def last_trouble(self) -> str:
        """Why no executor takes requests; for models with names, by name."""
        said = [f"{name}: {cell.last_trouble}" if name else cell.last_trouble for name, cell in self.cells.items()]
        return "; ".join(said)

    async def run(self, stopping: asyncio.Future[str]) -> None:
        """Serve until told to stop, then end in order. Raises OctavoServiceError: the front cannot start."""
        self._warn_if_exposed()
        tasks = [
            asyncio.create_task(self._take_calls(), name="ports"),
            *(asyncio.create_task(cell.run(), name="links") for cell in self.cells.values()),
            asyncio.create_task(self.front.pace.watch(), name="pace"),
            asyncio.create_task(self._loop_lag.watch(), name="loop-lag"),
            asyncio.create_task(IdleCollection(self._is_idle).run(), name="collector"),
        ]
        grace_s = self._config.shutdown_grace_s
        deadline_s = None
        try:
            reason = await _why_to_stop(stopping, tasks)
            if self.is_listening.is_set():
                await leave(self.ports, reason, self._config.shutdown_delay_s)
            deadline_s = time.monotonic() + grace_s
            if self.is_listening.is_set():
                await shut_down(self.ports, reason, drain=self._drain, grace_s=grace_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.is_listening.is_set():
                await self.ports.stop(0)
            left_s = 0.0 if deadline_s is None else deadline_s - time.monotonic()
            await self.front.close(max(left_s, FLUSH_SHARE * grace_s))

    async def _take_calls(self) -> None:
        """Open the ports."""
        if self._config.is_started_by_scheduler:
            await asyncio.gather(*(cell.wait_until_told() for cell in self.cells.values()))
        self.address = await self.ports.start()
        self.is_listening.set()
        for cell in self.cells.values():
            cell.take_calls()

    def _is_idle(self) -> bool:
        return not any(cell.num_requests for cell in self.cells.values())

    async def _drain(self) -> None:
        await asyncio.gather(*(cell.leave() for cell in self.cells.values()))
        self.front.generation.shut_down()

    async def _set_ready(self, name: str, is_ready: bool) -> None:
        """Note whether requests for a model find an executor."""
        if is_ready:
            self._ready_models.add(name)
        else:
            self._ready_models.discard(name)
        await self._health.set_ready(bool(self._ready_models))
        if self._ready_models:
            self.is_ready.set()
        else:
            self.is_ready.clear()

    def _take_rules(self, name: str, welcome: pb.CoreWelcome) -> None:
        """Take the engine's settings, by which this front refuses requests: they are not in its own."""
        generation = self.front.generations[name]
        generation.settings = replace(
            generation.settings, tenants=frozenset(welcome.tenants) or None, has_priorities=welcome.has_priorities
        )

    def _collect(self) -> list[Family]:
        return [*self._counted(), *vllm_families(*self.cells.values())]

    def _counted(self) -> list[Family]:
        return [
            *service_families(self._calls, self.front.tls),
            *self.front.families(),
            *cell_families(self.cells.values()),
        ]

    def _other_ports(self) -> dict[str, Port]:
        ports: dict[str, Port] = {}
        if self.front.openai is not None:
            ports["openai"] = self.front.openai
        if self._config.health_listen is not None:
            ports["health"] = probe_server(
                self._config.health_listen,
                self._health,
                Announcements(lambda: [cell.membership for cell in self.cells.values()]),
            )
        if self._config.metrics_listen is not None:
            ports["metrics"] = MetricsServer(self._config.metrics_listen, self._collect)
        return ports

    def _warn_if_exposed(self) -> None:
        config = self._config
        if config.is_started_by_scheduler:  # the engine has warned for all fronts
            return
        warn_if_exposed(
            "front",
            {"--listen": config.listen, "--openai-listen": config.openai_listen},
            is_encrypted=self.front.tls is not None,
            knows_clients=bool(config.tokens_file or config.tls_client_ca),
        )

    def _open_engine(
        self,
        name: str,
        tls: TlsOptions | None,
        address: str,
        read_tokenizer: ReadTokenizer,
        on_change: Callable[[], None],
    ) -> RemoteEngine:
        return RemoteEngine(
            lambda: self._open_channel(address, tls),
            f"{self._name}/{name}" if name else self._name,  # an engine may serve under two names
            read_tokenizer,
            on_change,
            self._counted if self._config.is_started_by_scheduler else tuple,  # else our own port serves them
            lambda: self._loop_lag.longest_s,
            partial(self._take_rules, name),
            partial(_explain, tls),
            incarnations=self._incarnations,
        )

    def _open_channel(self, address: str, tls: TlsOptions | None) -> grpc.aio.Channel:
        """Open a channel to an engine; files of TLS are read as they are now. Raises TlsFileError: one is unusable."""
        config = self._config
        options: list[tuple[str, int | str]] = [
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", config.max_message_bytes),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if not config.is_started_by_scheduler:  # no network cuts off an engine on this machine, which may stall
            options += [
                ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
                ("grpc.http2.max_pings_without_data", 0),
            ]
        if tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = read_credentials(tls, ENGINE_FLAGS)
        return grpc.aio.secure_channel(address, credentials, options=[*options, *tls.channel_options])


async def _why_to_stop(stopping: asyncio.Future[str], tasks: Iterable[asyncio.Task[None]]) -> str:
    """Return the reason to stop, once there is one. Raises: what ended a task first; then this process is restarted."""
    pending: set[asyncio.Future[Any]] = {stopping, *tasks}
    while not stopping.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
    return stopping.result()


def _explain(tls: TlsOptions | None, error: grpc.aio.AioRpcError) -> str:
    """Say why an engine could not be joined, or was cut off."""
    return handshake_trouble(error.details() or "", tls, ENGINE_FLAGS, "--front-tls-ca") or failure_text(error)


if __name__ == "__main__":
    sys.exit(main())
