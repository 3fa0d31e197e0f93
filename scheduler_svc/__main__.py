"""The scheduler process: `python -m scheduler_svc`."""

import asyncio
import logging
import os
import sys

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.service import SchedulerService
from shared.config import load_config_or_exit
from shared.errors import OctavoServiceError
from shared.events import Event, configure_logging
from shared.file_limit import raise_file_limit
from shared.garbage_collection import IdleCollection, settle
from shared.grpc_server import announce_listening, announce_serving
from shared.stop_request import StopRequest

log = logging.getLogger(__name__)

# Time after which a start is worth a word, in seconds: the first attempts to attach have had their answers.
SILENCE_S = 2.0


def main() -> int:
    """Serve until SIGTERM; return the exit code."""
    config = load_config_or_exit(SchedulerConfig, sys.argv[1:], os.environ)
    configure_logging(config.log_level, config.log_format)
    raise_file_limit()
    try:
        asyncio.run(serve(config))
    except OctavoServiceError as error:
        print(f"octavo scheduler: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(config: SchedulerConfig) -> None:
    """Run the service until somebody wants it to stop.

    Raises: OctavoServiceError: it cannot start.
    """
    stop = StopRequest(exit_on_stdin_close=config.exit_on_stdin_close)
    stopping = asyncio.create_task(stop.wait())
    service = SchedulerService(config)
    starting = asyncio.create_task(service.start())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        log.info(Event("stopped_while_starting", reason=stopping.result()))
        return
    address = starting.result()
    awaits = f"an executor at {', '.join(config.executor)}"
    announce_listening("scheduler", address, service.other_addresses, awaits=awaits)
    announcing = asyncio.create_task(_announce_when_ready(service, address))
    settle()
    collecting = asyncio.create_task(IdleCollection(lambda: not service.engine.requests).run())
    failing = asyncio.create_task(service.wait_for_failure())
    await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():  # a process that cannot work any more must not look as if it could
        failing.result()
    failing.cancel()
    announcing.cancel()
    collecting.cancel()
    await service.stop(stopping.result())


async def _announce_when_ready(service: SchedulerService, address: str) -> None:
    """Say on stdout that the service serves, once it does; if that takes long, what keeps it."""
    try:
        async with asyncio.timeout(SILENCE_S):
            await service.wait_until_ready()
    except TimeoutError:
        print(f"octavo scheduler not serving yet: {service.report_not_ready()}", flush=True)
        await service.wait_until_ready()
    announce_serving("scheduler", address)


if __name__ == "__main__":
    sys.exit(main())
