"""The scheduler service put together from its configuration: gRPC server, servicers, engine, tokenizer."""

import asyncio
import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.admin.v1 import admin_pb2, admin_service_pb2, admin_service_pb2_grpc
from octavo_shared.grpc.announce import Announcements, Announcer
from octavo_shared.grpc.exposure import warn_if_exposed
from octavo_shared.grpc.grpc_metrics import CallMetrics, service_families
from octavo_shared.grpc.grpc_server import GrpcServer, Health, Port, Ports, leave, probe_server, shut_down
from octavo_shared.grpc.membership import Membership
from octavo_shared.grpc.tls import server_tls
from octavo_shared.grpc.watched_files import WatchedFiles
from octavo_shared.process.metric import Family, LabelValues
from octavo_shared.process.metrics_server import MetricsServer
from scheduler_svc.admin.servicer import AdminServicer
from scheduler_svc.config.dial_tls import EXECUTOR_FLAGS, executor_tls, read_credentials
from scheduler_svc.config.prefix_key import key_fingerprint, prefix_key
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.config.tenants_file import default_quota, read_tenants
from scheduler_svc.core.limits import PreemptionMode, PrefillMode
from scheduler_svc.core.waiting.policy import FcfsPolicy, PriorityPolicy
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.settings import EngineSettings
from scheduler_svc.engine.surroundings import Surroundings
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.executors.client import ExecutorClient
from scheduler_svc.executors.driver_interface import AtFaultPoint, DriverSettings, no_fault
from scheduler_svc.executors.serving_limits import PlannerSettings
from scheduler_svc.executors.session import SessionTimings
from scheduler_svc.front.access.access_control import AccessInterceptor, access_control
from scheduler_svc.http.http_tls import http_tls
from scheduler_svc.link.engine_port import engine_port
from scheduler_svc.link.engine_servicer import EngineServicer, TokenizerFiles
from scheduler_svc.processes.incarnation import Incarnation
from scheduler_svc.processes.process import GENERATION_SERVICE, LoopLag
from scheduler_svc.request.admin_calls import admin_of
from scheduler_svc.step_log.writer import StepLogSettings, StepLogWriter
from scheduler_svc.telemetry.metrics import FRONTS, LOOP_LAG, STEP_LOG, scheduler_families

if TYPE_CHECKING:  # an engine with fronts does not need them
    from scheduler_svc.front.front import Front
    from scheduler_svc.front.text.text_model import ModelTokenizer

log = logging.getLogger(__name__)

ADMIN_SERVICE = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

HEARTBEATS_PER_LEASE = 5

# How often the service checks whether any front takes calls, in seconds.
FRONTS_INTERVAL_S = 0.2

# How often the service checks whether the tenants file has changed, in seconds.
TENANTS_INTERVAL_S = 1.0

# How long our own fronts may take to learn that requests have ended, in seconds.
LAST_WORDS_S = 1.0

# Share of the grace period in which live requests may end by themselves; the rest is for ending the remaining ones.
DRAIN_SHARE = 0.9


class SchedulerService:
    """One scheduler, or its engine. It is ready while any executor is attached and it does not drain.

    Args:
        front_link: Where fronts join that have all clients' calls; None: this process takes the calls.
        at_fault_point: Called at each fault point of each step (`FaultPoint`); tests kill processes there.

    Raises: OctavoServiceError: --tokenizer names a broken directory, or --tracing lacks what it needs,
        or a file of TLS or of tokens, or the folder of --step-log, cannot be used.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        front_link: str | None = None,
        *,
        at_fault_point: AtFaultPoint = no_fault,
    ) -> None:
        self._config = config
        self._num_fronts = 0 if front_link is None else config.num_fronts
        self._grace_s = config.shutdown_grace_s
        self.tls = server_tls(config)
        self._access = access_control(config)
        self._interceptors = [] if self._access is None else [AccessInterceptor(self._access, (ADMIN_SERVICE,))]
        if tls := executor_tls(config):
            read_credentials(tls, EXECUTOR_FLAGS)  # unusable files prevent the start, and not only every connection
        key = prefix_key(config)
        path = config.tenants_file
        self._tenants_file = (
            None if path is None else WatchedFiles("tenants", [path], lambda: read_tenants(path, config))
        )
        tenants = Tenants(others=default_quota(config)) if self._tenants_file is None else self._tenants_file.current()
        self._step_log = step_log_writer(config, tenants)
        self._calls = CallMetrics()
        self._loop_lag = LoopLag()
        health = self._health = Health([GENERATION_SERVICE, ADMIN_SERVICE])
        tokenizer = model_tokenizer(config) if front_link is None else None
        files = TokenizerFiles(None if tokenizer is None else tokenizer.load)
        is_joined = front_link is not None or config.engine_listen is not None
        self._incarnation = Incarnation(config.scheduler_id or config.own_name)
        self.engine = Engine(
            Membership(config.executor, config.resolve_interval_s),
            functools.partial(executor_client, config, self._incarnation, key_fingerprint(key)),
            engine_settings(config, tenants, at_fault_point),
            files.load if is_joined or tokenizer is None else tokenizer.load,
            self._set_ready,
            self._step_log,
            Surroundings(prefix_key=key),
        )
        self._admin = AdminServicer(self.engine, self._front_states, self._page_port)
        self.engine.admin = admin_of(self._admin)
        self.link: EngineServicer | None = None
        if is_joined:
            fingerprint = key_fingerprint(key)
            self.link = EngineServicer(self.engine, files, self._incarnation, prefix_key_fingerprint=fingerprint)
        self.front: Front | None = None
        self._has_executor = False
        self._is_ready: bool | None = None  # as health has it
        if tokenizer is not None:
            self.front = self._own_front(tokenizer, health)
            main = self.front.main
        else:
            assert front_link is not None
            assert self.link is not None
            main = engine_port(config, front_link, self.link, self._admin, health)
        self._ports = Ports(main, self._other_ports(config, health))
        self._tell_tenants()

    def _own_front(self, tokenizer: "ModelTokenizer", health: Health) -> "Front":
        from scheduler_svc.front.api.models import UNNAMED
        from scheduler_svc.front.front import Front

        model = {UNNAMED: (self.engine, tokenizer)}
        return Front(self._config, model, health, self._metrics, call_metrics=self._calls)

    async def start(self) -> str:
        """Serve and look for the executors; return the address that clients use.

        Raises: UnavailableError: an address cannot be bound.
        """
        config = self._config
        warn_if_exposed(
            "scheduler",
            {
                "--listen": config.listen,
                "--admin-listen": config.admin_listen,
                "--page-listen": config.page_listen,
                "--openai-listen": config.openai_listen,
            },
            is_encrypted=self.tls is not None,
            knows_clients=bool(self._interceptors) or config.tls_client_ca is not None,
        )
        if config.engine_listen is not None:
            warn_if_exposed(
                "scheduler",
                {"--engine-listen": config.engine_listen},
                is_encrypted=self.tls is not None,
                knows_clients=config.front_tls_ca is not None,
                how_to_know_clients="set --front-tls-ca and --trusted-fronts to let only known fronts join",
            )
        address = await self._ports.start()
        self._running = asyncio.create_task(self.engine.run(), name="engine")
        self._watching = [asyncio.create_task(self._loop_lag.watch(), name="loop-lag")]
        if self.front is not None:
            self._watching.append(asyncio.create_task(self.front.pace.watch(), name="pace"))
        else:
            self._watching.append(asyncio.create_task(self._watch_fronts(), name="fronts"))
        if config.announce_to and config.engine_listen is not None:
            announcer = Announcer(config.announce_to, self._has_standalone_fronts)
            self._watching.append(asyncio.create_task(announcer.run(), name="announcements"))
        if self._tenants_file is not None:
            self._watching.append(asyncio.create_task(self._watch_tenants(self._tenants_file), name="tenants"))
        return address if self.front is not None else config.listen

    async def _set_ready(self, is_ready: bool) -> None:
        """Tell joined fronts and health whether new requests find an executor."""
        self._has_executor = is_ready
        if self.link is not None:
            for session in self.link.sessions:
                session.tell_state()
        await self._tell_health()

    async def _tell_health(self) -> None:
        """Update health if it has changed whether clients reach a front, and their requests an executor."""
        takes_calls = self.link is None or self.front is not None or any(one.is_ready for one in self.link.sessions)
        is_ready = self._has_executor and takes_calls
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            await self._health.set_ready(is_ready)

    async def _watch_tenants(self, file: WatchedFiles[Tenants]) -> None:
        while True:
            await asyncio.sleep(TENANTS_INTERVAL_S)
            tenants = file.current()
            if tenants != self.engine.tenants:
                self.engine.set_tenants(tenants)
                self._tell_tenants()

    def _tell_tenants(self) -> None:
        """Tell our front, and all joined fronts, which tenants they serve."""
        if self.front is not None:
            for generation in self.front.generations.values():
                generation.settings = replace(generation.settings, tenants=self.engine.tenants.served)
        if self.link is not None:
            self.link.tell_welcome()

    async def _watch_fronts(self) -> None:
        while True:
            await self._tell_health()
            await asyncio.sleep(FRONTS_INTERVAL_S)

    async def wait_until_ready(self) -> None:
        """Return once new requests have found an executor, and all fronts take calls."""
        await self.engine.readiness.wait()
        if self._num_fronts and self.link is not None:
            await self.link.wait_until_ready(self._num_fronts)

    def report_not_ready(self) -> str:
        """Log what keeps new requests from finding an executor, and return it."""
        if self._num_fronts and not self.engine.readiness.why_not:
            return "not all fronts take calls yet"
        return self.engine.readiness.report()

    async def wait_for_failure(self) -> None:
        """Never return; raise what ended the drivers, if a bug ends them.

        Raises: SupersededError: another scheduler has taken our place.
        """
        superseded = asyncio.create_task(self._incarnation.wait_until_superseded())
        try:
            await asyncio.wait({self._running, superseded}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            superseded.cancel()
        self._incarnation.require_current()
        await asyncio.shield(self._running)

    async def stop(self, reason: str) -> None:
        """Stop in order: not ready, no new requests, live requests within the grace period, then the rest."""
        await leave(self._ports, reason, self._config.shutdown_delay_s)
        deadline_s = time.monotonic() + self._grace_s
        drain_s = self._grace_s * DRAIN_SHARE

        async def drain() -> None:
            link = self.link
            await self.engine.drain(drain_s, None if link is None else functools.partial(link.let_go, LAST_WORDS_S))
            if self.link is not None:
                await self.link.close(LAST_WORDS_S)
            if self.front is not None:
                self.front.generation.shut_down()

        await shut_down(self._ports, reason, drain=drain, grace_s=self._grace_s)
        await self._end_tasks()
        if self._step_log is not None:
            await asyncio.to_thread(self._step_log.close)
        if self.front is not None:
            await self.front.close(deadline_s - time.monotonic())

    async def _end_tasks(self) -> None:
        tasks = [self._running, *self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def other_addresses(self) -> dict[str, str]:
        """The addresses for operators ("admin", "page"), OpenAI's clients, probes and metrics; after `start`."""
        openai = self._config.openai_listen
        is_at_fronts = self.front is None and openai is not None
        return self._ports.other_addresses | ({"openai": str(openai)} if is_at_fronts else {})

    def _page_port(self) -> int:
        return int(self._ports.other_addresses.get("page", ":0").rpartition(":")[2])

    def _front_states(self) -> Sequence[admin_pb2.FrontState]:
        return [] if self.link is None else self.link.states(self._num_fronts)

    def _has_standalone_fronts(self) -> bool:
        return self.link is not None and len(self.link.sessions) > len(self.link.own_sessions)

    def _num_fronts_joined(self) -> dict[LabelValues, float]:
        if self.link is None:
            return {}
        own = len(self.link.own_sessions)
        num_joined: dict[LabelValues, float] = {("own",): own}
        if self._config.engine_listen is not None:
            num_joined["standalone",] = len(self.link.sessions) - own
        return num_joined

    def _metrics(self) -> list[Family]:
        families = [
            *scheduler_families(self.engine),
            LOOP_LAG.single(self._loop_lag.longest_s),
            STEP_LOG.single(self._step_log is not None and self._step_log.is_recording),
            FRONTS.family(self._num_fronts_joined()),
            *service_families(self._calls, self.tls),
            *(() if self.front is None else self.front.families()),
        ]
        return families if self.link is None else list(self.link.metrics.merged(families))

    def _other_ports(self, config: SchedulerConfig, health: Health) -> dict[str, Port]:
        """Return the ports of operators, of probes and of metrics, by name."""
        admin = GrpcServer(
            listen=config.admin_listen,
            max_message_bytes=config.max_message_bytes,
            service_names=[ADMIN_SERVICE],
            health=health,
            credentials=None if self.tls is None else self.tls.credentials(),
            interceptors=self._interceptors,
            call_metrics=self._calls,
            flag="--admin-listen",
        )
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, admin.server)
        others: dict[str, Port] = {"admin": admin}
        if config.page_listen is not None:
            from scheduler_svc.admin.http.page_server import PageServer

            service = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
            others["page"] = PageServer(config.page_listen, service, self._admin, self._access, http_tls(config))
        if self.front is not None and self.front.openai is not None:
            others["openai"] = self.front.openai
        if self.link is not None and config.engine_listen is not None:
            others["fronts"] = engine_port(config, config.engine_listen, self.link, self._admin, health)
        if config.health_listen is not None:
            others["health"] = probe_server(
                config.health_listen, health, Announcements(lambda: [self.engine.drivers.membership])
            )
        if config.metrics_listen is not None:
            others["metrics"] = MetricsServer(config.metrics_listen, self._metrics)
        return others


def model_tokenizer(config: SchedulerConfig) -> "ModelTokenizer":
    """Return the tokenizer of the served model, for a scheduler without separate fronts."""
    from scheduler_svc.front.text.text_model import ModelTokenizer

    return ModelTokenizer(config.tokenizer, escapes_special_tokens=config.escape_special_tokens)


def step_log_writer(config: SchedulerConfig, tenants: Tenants) -> StepLogWriter | None:
    """Return the writer of the step log; None: there is none. Raises StepLogError: its folder cannot be used."""
    if config.step_log is None:
        return None
    return StepLogWriter(
        StepLogSettings(
            directory=config.step_log,
            max_bytes=config.step_log_max_mb * 2**20,
            masks_tokens=config.step_log_tokens == "masked",
            policy=config.policy,
            tenants=tenants.shares,
        )
    )


def executor_client(
    config: SchedulerConfig, incarnation: Incarnation, key_fingerprint: bytes, address: str
) -> ExecutorClient:
    """Return the client of one executor; `incarnation` is the scheduler's, the fingerprint that of its prefix key."""
    timings = SessionTimings(
        lease_s=config.lease_s,
        heartbeat_interval_s=config.lease_s / HEARTBEATS_PER_LEASE,
        step_timeout_s=config.step_timeout_s,
    )
    return ExecutorClient(
        address,
        incarnation.scheduler_id,
        timings,
        config.max_message_bytes,
        executor_tls(config),
        key_fingerprint=key_fingerprint,
        incarnation=incarnation,
        speculate=config.speculate,
    )


def engine_settings(
    config: SchedulerConfig, tenants: Tenants, at_fault_point: AtFaultPoint = no_fault
) -> EngineSettings:
    """Return the engine's part of the configuration; `at_fault_point` is called at the fault points of a step."""
    planner = PlannerSettings(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        watermark=config.watermark,
        preemption_mode=None if config.preemption_mode == "auto" else PreemptionMode(config.preemption_mode),
        prefill_mode=PrefillMode(config.prefill_mode),
        long_prefill_threshold=config.long_prefill_threshold,
        max_long_prefills=config.max_long_prefills,
        prefix_caching=config.prefix_caching,
        host_prefixes=config.host_prefixes,
        block_transfers=config.block_transfers,
        prefill_role_tokens=config.prefill_role_tokens,
        max_message_bytes=config.max_message_bytes,
    )
    return EngineSettings(
        planner=planner,
        driver=DriverSettings(
            steps_in_flight=None if config.steps_in_flight == "auto" else int(config.steps_in_flight),
            checks_batch_table=config.check_batch_table,
            max_executors=config.max_executors,
            at_fault_point=at_fault_point,
        ),
        policy=PriorityPolicy() if config.policy == "priority" else FcfsPolicy(),
        has_priorities=config.policy == "priority",
        max_waiting_requests=config.max_waiting_requests,
        tenants=tenants,
        max_waiting_tokens=config.max_waiting_tokens,
        orphan_timeout_s=config.orphan_timeout_s,
        served_model_name=config.served_model_name,
    )
