"""The scheduler service put together from its configuration: gRPC server, servicers, engine, tokenizer."""

import asyncio
import functools
import socket
from pathlib import Path

from octavo.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from octavo.generation.v1 import generation_service_pb2, generation_service_pb2_grpc
from scheduler_svc.admin_servicer import AdminServicer
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.limits import PreemptionMode, PrefillMode
from scheduler_svc.core.policy import FcfsPolicy, PriorityPolicy
from scheduler_svc.engine import Engine
from scheduler_svc.engine_settings import EngineSettings
from scheduler_svc.executor_client import ExecutorClient, ExecutorSession, SessionTimings
from scheduler_svc.executor_driver import DriverSettings
from scheduler_svc.generation_servicer import GenerationServicer
from scheduler_svc.membership import Membership
from scheduler_svc.served_model import CoreSettings
from scheduler_svc.tokenizer import Tokenizer
from shared.grpc_server import GrpcServer, shut_down

HEARTBEATS_PER_LEASE = 5

# Share of the grace period in which live requests may end by themselves; the rest is for telling
# the others that they ended.
DRAIN_SHARE = 0.9


class SchedulerService:
    """One scheduler. It is ready while any executor is attached and it does not drain.

    Raises: OctavoServiceError: --tokenizer names a broken directory.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        services = [
            generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
            admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
        ]
        self._grace_s = config.shutdown_grace_s
        self._server = GrpcServer(
            listen=config.listen, max_message_bytes=config.max_message_bytes, service_names=services
        )
        self.engine = Engine(
            Membership(config.executor, config.resolve_interval_s),
            functools.partial(executor_client, config),
            engine_settings(config),
            TokenizerLoader(config.tokenizer),
            self._server.set_ready,
        )
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self.engine), self._server.server
        )
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.engine), self._server.server)

    async def start(self) -> str:
        """Serve and look for the executors; return the bound address.

        Raises: UnavailableError: the address cannot be bound.
        """
        address = await self._server.start()
        self._running = asyncio.create_task(self.engine.drivers.run(), name="drivers")
        return address

    async def wait_for_failure(self) -> None:
        """Return never; raise what ended the drivers, should a bug end them."""
        await asyncio.shield(self._running)

    async def stop(self, reason: str) -> None:
        """End in order: not ready, no new requests, live ones within the grace period, then the rest."""
        drain_s = self._grace_s * DRAIN_SHARE
        await shut_down(self._server, reason, drain=lambda: self.engine.drain(drain_s), grace_s=self._grace_s)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


def executor_client(config: SchedulerConfig, address: str) -> ExecutorClient:
    """Return the client of one executor."""
    timings = SessionTimings(
        lease_s=config.lease_s,
        heartbeat_interval_s=config.lease_s / HEARTBEATS_PER_LEASE,
        step_timeout_s=config.step_timeout_s,
    )
    scheduler_id = config.scheduler_id or f"{socket.gethostname()}/{config.listen}"
    return ExecutorClient(address, scheduler_id, timings, config.max_message_bytes)


def engine_settings(config: SchedulerConfig) -> EngineSettings:
    """Return the engine's part of the configuration."""
    core = CoreSettings(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        watermark=config.watermark,
        preemption_mode=None if config.preemption_mode == "auto" else PreemptionMode(config.preemption_mode),
        prefill_mode=PrefillMode(config.prefill_mode),
        long_prefill_threshold=config.long_prefill_threshold,
        max_long_prefills=config.max_long_prefills,
        prefix_caching=config.prefix_caching,
        max_message_bytes=config.max_message_bytes,
    )
    return EngineSettings(
        core=core,
        driver=DriverSettings(steps_in_flight=config.steps_in_flight, checks_batch_table=config.check_batch_table),
        policy=PriorityPolicy() if config.policy == "priority" else FcfsPolicy(),
        has_priorities=config.policy == "priority",
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_requests_per_tenant=config.max_waiting_requests_per_tenant or config.max_waiting_requests,
        max_beam_width=config.max_beam_width,
        tenant_weights=config.weights_of_tenants,
    )


class TokenizerLoader:
    """Makes the tokenizer from the operator's directory if there is one, else from the executor's files.

    Raises: OctavoServiceError: the directory is broken (at construction, so that the process ends).
    """

    def __init__(self, directory: Path | None) -> None:
        self._own = Tokenizer.from_directory(directory) if directory else None

    async def __call__(self, session: ExecutorSession) -> Tokenizer:
        """Return the tokenizer for the model of `session`."""
        if self._own is not None:
            return self._own
        files = await session.get_tokenizer()
        return await asyncio.to_thread(Tokenizer, files)
