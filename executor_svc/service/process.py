"""The life of an executor process, with a model or without: serve, load, run, drain, end.

The server is up before the model is: while it loads, liveness is SERVING, readiness NOT_SERVING and
every call UNAVAILABLE.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from executor_svc.config import ExecutorConfig, FakeConfig
from executor_svc.service.servicer import SERVICE_NAME, ExecutionServicer
from executor_svc.transfers.dial import Dialler, reachable_address
from executor_svc.transfers.servicer import SERVICE_NAME as BLOCK_TRANSFER
from executor_svc.worker.interface import Worker
from octavo.execution.v1.block_transfer_service_pb2_grpc import add_BlockTransferServiceServicer_to_server
from octavo.execution.v1.execution_service_pb2_grpc import add_ExecutionServiceServicer_to_server
from octavo_shared.errors import DeviceLostError, ModelLoadError, OctavoServiceError
from octavo_shared.grpc.announce import Announcer
from octavo_shared.grpc.exposure import warn_if_exposed
from octavo_shared.grpc.grpc_metrics import CallMetrics, service_families
from octavo_shared.grpc.grpc_server import (
    GrpcServer,
    Port,
    Ports,
    announce_listening,
    announce_serving,
    leave,
    probe_server,
    shut_down,
)
from octavo_shared.grpc.tls import server_tls
from octavo_shared.process.events import Event, configure_logging
from octavo_shared.process.metrics_server import MetricsServer
from octavo_shared.process.stop_request import StopRequest
from octavo_shared.process.tracing import start_tracing

# The step thread shares the interpreter with the step stream. A thread that wants the interpreter waits up to this long
# for a thread that computes in Python. The default of 5 ms turned a round trip of 0.3 ms into 10 ms beside a busy
# Python thread; 0.5 ms makes it 1.7 ms, and costs a thread of small torch operations, which release the interpreter
# anyway, nothing (2 vCPU EPYC, Python 3.11, gRPC aio stream). Shorter intervals made the round trip beside such
# operations longer again.
SWITCH_INTERVAL_S = 0.0005
# For the stream to tell the scheduler why it ends, before the process does.
LAST_WORDS_S = 1.0

_logger = logging.getLogger(__name__)


def run_executor(config: ExecutorConfig | FakeConfig, load_worker: Callable[[], Worker]) -> int:
    """Run the process until it is told to stop; return its exit code.

    `load_worker` runs on the step thread. Whatever makes it impossible to serve (ModelLoadError, a
    taken address, a missing package) is one sentence on stderr and exit code 1; so is a lost device, for which
    Kubernetes starts the container anew.
    """
    configure_logging(config.log_level, config.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with _traced(config, load_worker) as load_traced_worker:
            is_idle = asyncio.run(_serve(config, load_traced_worker))
    except DeviceLostError as error:
        print(f"octavo {config.service}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # what libraries do at the end of a process may wait for the device
    except (ModelLoadError, OctavoServiceError) as error:
        print(f"octavo {config.service}: {error}", file=sys.stderr)
        return 1
    if not is_idle:
        # Python would wait for the step thread, which is loading a model or stuck in a step.
        sys.stderr.flush()
        os._exit(0)
    return 0


async def _serve(config: ExecutorConfig | FakeConfig, load_worker: Callable[[], Worker]) -> bool:
    """Serve until told to stop; return whether the step thread is idle at the end.

    Raises: what loading raises; DeviceLostError: the device was lost.
    """
    stop = StopRequest(exit_on_stdin_close=config.exit_on_stdin_close)
    servicer = ExecutionServicer(dial=Dialler(config), weights_dirs=[Path(folder) for folder in config.weights_dir])
    calls = CallMetrics()
    tls = server_tls(config)
    warn_if_exposed(
        "executor",
        {"--listen": config.listen},
        is_encrypted=tls is not None,
        knows_clients=config.tls_client_ca is not None,
        how_to_know_clients="set --tls-client-ca to require client certificates",
    )
    server = GrpcServer(
        listen=config.listen,
        max_message_bytes=config.max_message_bytes,
        service_names=[SERVICE_NAME, BLOCK_TRANSFER],
        credentials=None if tls is None else tls.credentials(),
        call_metrics=calls,
    )
    add_ExecutionServiceServicer_to_server(servicer, server.server)
    add_BlockTransferServiceServicer_to_server(servicer.block_transfers, server.server)
    others: dict[str, Port] = {}
    if config.health_listen is not None:
        others["health"] = probe_server(config.health_listen, server.health)
    if config.metrics_listen is not None:
        others["metrics"] = MetricsServer(
            config.metrics_listen, lambda: [*servicer.metrics(), *service_families(calls, tls)]
        )
    ports = Ports(server, others)
    try:
        address = await ports.start()
        servicer.transfer_address = reachable_address(config.transfer_address, address)
        servicer.role = config.role
        announce_listening("executor", address, ports.other_addresses, awaits="its model")
        if not await _load(servicer, load_worker, stop):
            _logger.info(Event("stopped_while_loading", reason=await stop.wait()))
            return False
        await ports.set_ready(True)
        _logger.info(Event("ready"))
        announce_serving("executor", address)
        announcer = Announcer(config.announce_to, lambda: servicer.is_attached)
        announcing = asyncio.create_task(announcer.run(), name="announcements")
        reason = await _end_of_service(servicer, stop.wait())
        announcing.cancel()
        if isinstance(reason, str) and config.shutdown_delay_s:
            reason = await _end_of_service(servicer, _leave(ports, servicer, reason, config.shutdown_delay_s))
        if isinstance(reason, DeviceLostError):
            _logger.error(Event("device_lost", reason=str(reason)))
            await ports.set_ready(False)
            await ports.stop(LAST_WORDS_S)
            raise reason
        return await shut_down(ports, reason, drain=servicer.drain, grace_s=config.shutdown_grace_s)
    finally:
        await ports.stop(0)
        servicer.close()


async def _leave(ports: Ports, servicer: ExecutionServicer, reason: str, delay_s: float) -> str:
    """Work on for a scheduler that knows that this process ends, until it has detached; at most so long."""
    servicer.leave()
    await leave(ports, reason, delay_s, servicer.wait_until_unused())
    return reason


async def _end_of_service(servicer: ExecutionServicer, ending: Coroutine[Any, Any, str]) -> str | DeviceLostError:
    """Return why the process has to end: `ending` says so, or its device is lost."""
    stopping = asyncio.create_task(ending)
    losing = asyncio.create_task(servicer.device_lost())
    await asyncio.wait({stopping, losing}, return_when=asyncio.FIRST_COMPLETED)
    if losing.done():
        stopping.cancel()
        return losing.result()
    losing.cancel()
    return stopping.result()


async def _load(servicer: ExecutionServicer, load_worker: Callable[[], Worker], stop: StopRequest) -> bool:
    """Load the worker; return False if the process was told to stop before. Raises what loading raises."""
    _logger.info(Event("loading"))
    loading = asyncio.create_task(servicer.load(load_worker))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        return False
    loading.result()
    _logger.info(Event("loaded"))
    return True


@contextmanager
def _traced(config: ExecutorConfig | FakeConfig, load_worker: Callable[[], Worker]) -> Iterator[Callable[[], Worker]]:
    """Return a loader of a worker that makes spans of requests; without --tracing, `load_worker` itself.

    At the end all spans are sent; requests that are still in the batch table end with an error.

    Raises: OctavoServiceError: spans cannot be sent.
    """
    tracing = start_tracing(config.tracing, "octavo-executor")
    if tracing is None:
        yield load_worker
        return
    from executor_svc.service.traced_worker import TracedWorker

    loaded: list[TracedWorker] = []

    def load() -> Worker:
        worker = TracedWorker(load_worker(), tracing.tracer)
        loaded.append(worker)
        return worker

    try:
        yield load
    finally:
        for worker in loaded:
            worker.end_all("the executor shut down")
        tracing.close(config.shutdown_grace_s)
