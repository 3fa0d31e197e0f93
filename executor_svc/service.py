"""The life of an executor process, with a model or without: serve, load, run, drain, end.

The server is up before the model is: while it loads, liveness is SERVING, readiness NOT_SERVING and
every call UNAVAILABLE.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable

from executor_svc.errors import ModelLoadError
from executor_svc.execution_servicer import SERVICE_NAME, ExecutionServicer
from executor_svc.worker import Worker
from octavo.execution.v1.execution_service_pb2_grpc import add_ExecutionServiceServicer_to_server
from shared.config import ServiceConfig
from shared.errors import UnavailableError
from shared.grpc_server import GrpcServer, StopRequest, announce, configure_logging, shut_down

# The step thread shares the interpreter with the step stream. A thread that wants the interpreter
# waits up to this long for one that computes in Python. The default of 5 ms turned a round trip of
# 0.3 ms into 10 ms beside a busy Python thread; 0.5 ms makes it 1.7 ms, and costs a thread of small
# torch operations, which release the interpreter anyway, nothing (2 vCPU EPYC, Python 3.11, gRPC aio
# stream). Shorter intervals made the round trip beside such operations longer again.
SWITCH_INTERVAL_S = 0.0005

_logger = logging.getLogger(__name__)


def run_executor(config: ServiceConfig, load_worker: Callable[[], Worker]) -> int:
    """Run the process until it is told to stop; return its exit code.

    `load_worker` runs on the step thread. Whatever makes it impossible to serve (ModelLoadError, a
    taken address) is one sentence on stderr and exit code 1.
    """
    configure_logging(config.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        is_idle = asyncio.run(_serve(config, load_worker))
    except (ModelLoadError, UnavailableError) as error:
        print(f"octavo {config.service}: {error}", file=sys.stderr)
        return 1
    if not is_idle:
        # Python would wait for the step thread, which is loading a model or stuck in a step.
        sys.stderr.flush()
        os._exit(0)
    return 0


async def _serve(config: ServiceConfig, load_worker: Callable[[], Worker]) -> bool:
    """Serve until told to stop; return whether the step thread is idle at the end."""
    stop = StopRequest(exit_on_stdin_close=config.exit_on_stdin_close)
    servicer = ExecutionServicer()
    server = GrpcServer(listen=config.listen, max_message_bytes=config.max_message_bytes, service_names=[SERVICE_NAME])
    add_ExecutionServiceServicer_to_server(servicer, server.server)
    try:
        announce("executor", await server.start())
        if not await _load(servicer, load_worker, stop):
            _logger.info("event=stopped_while_loading reason=%r", await stop.wait())
            return False
        await server.set_ready(True)
        _logger.info("event=ready")
        return await shut_down(server, await stop.wait(), drain=servicer.drain, grace_s=config.shutdown_grace_s)
    finally:
        await server.stop(0)
        servicer.close()


async def _load(servicer: ExecutionServicer, load_worker: Callable[[], Worker], stop: StopRequest) -> bool:
    """Load the worker; return False if the process was told to stop before. Raises what loading raises."""
    _logger.info("event=loading")
    loading = asyncio.create_task(servicer.load(load_worker))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        return False
    loading.result()
    _logger.info("event=loaded")
    return True
