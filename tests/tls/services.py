"""Both services in this process, with TLS as a test wants it, over real gRPC."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.servicer import SERVICE_NAME, ExecutionServicer
from octavo.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from octavo.execution.v1.execution_service_pb2_grpc import add_ExecutionServiceServicer_to_server
from octavo_shared.grpc.certificates import PemFile
from octavo_shared.grpc.grpc_server import GrpcServer
from octavo_shared.grpc.tls import ServerTls
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.processes.service import SchedulerService
from tests.support.certificates import PairFiles
from tests.support.stack import until

MAX_MESSAGE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A scheduler that serves."""

    service: SchedulerService
    address: str

    @property
    def admin_address(self) -> str:
        return self.service.other_addresses["admin"]

    @property
    def page_address(self) -> str:
        return self.service.other_addresses["page"]

    async def attached(self) -> None:
        """Return once an executor is attached."""
        await until(lambda: self.service.engine.fleet.planners)

    async def trouble(self) -> None:
        """Return once it is known why an executor cannot be attached."""
        await until(lambda: self.service.engine.last_trouble)

    async def last_error(self) -> str:
        """Return what GetSchedulerState says of an executor that cannot be attached; the scheduler speaks plaintext."""
        await self.trouble()
        async with grpc.aio.insecure_channel(self.admin_address) as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            state = await stub.GetSchedulerState(admin_service_pb2.GetSchedulerStateRequest())
        return state.executors[0].last_error


def server_tls(pair: PairFiles, client_ca: Path | None = None) -> ServerTls:
    """Return the TLS of a service with these files."""
    ca = None if client_ca is None else PemFile("--tls-client-ca", client_ca)
    return ServerTls(PemFile("--tls-cert", pair.cert), PemFile("--tls-key", pair.key), ca)


def tls_settings(pair: PairFiles, client_ca: Path | None = None) -> dict[str, object]:
    """Return the settings of a service with these files."""
    return {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": client_ca}


@asynccontextmanager
async def running_executor(tls: ServerTls | None = None) -> AsyncIterator[str]:
    """Run a fake executor; yield its address."""
    servicer = ExecutionServicer()
    await servicer.load(FakeWorker)
    server = GrpcServer(
        listen="127.0.0.1:0",
        max_message_bytes=MAX_MESSAGE_BYTES,
        service_names=[SERVICE_NAME],
        credentials=None if tls is None else tls.credentials(),
    )
    add_ExecutionServiceServicer_to_server(servicer, server.server)
    yield await server.start()
    await server.stop(0)
    servicer.close()


@asynccontextmanager
async def running_scheduler(**settings: object) -> AsyncIterator[Scheduler]:
    """Run a scheduler; without `executor` it finds none."""
    config = SchedulerConfig.model_validate(
        {
            "listen": "127.0.0.1:0",
            "admin_listen": "127.0.0.1:0",
            "page_listen": "127.0.0.1:0",
            "executor": ("127.0.0.1:1",),
            "shutdown_grace_s": 1.0,
            **settings,
        }
    )
    service = SchedulerService(config)
    address = await service.start()
    try:
        yield Scheduler(service, address)
    finally:
        await service.stop("the test ends")


@asynccontextmanager
async def running_pair(**settings: object) -> AsyncIterator[Scheduler]:
    """Run a scheduler and its executor, attached and in plaintext between them."""
    async with running_executor() as executor, running_scheduler(executor=(executor,), **settings) as scheduler:
        await scheduler.attached()
        yield scheduler
