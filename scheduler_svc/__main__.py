"""The scheduler process: `python -m scheduler_svc`."""

import asyncio
import os
import sys

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.service import SchedulerService
from shared.config import load_config_or_exit
from shared.errors import OctavoServiceError
from shared.events import configure_logging
from shared.garbage_collection import IdleCollection, settle
from shared.grpc_server import announce
from shared.stop_request import StopRequest


def main() -> int:
    """Serve until SIGTERM; return the exit code."""
    config = load_config_or_exit(SchedulerConfig, sys.argv[1:], os.environ)
    configure_logging(config.log_level, config.log_format)
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
    service = SchedulerService(config)
    announce("scheduler", await service.start(), service.other_addresses)
    settle()
    collecting = asyncio.create_task(IdleCollection(lambda: not service.engine.requests).run())
    stopping, failing = asyncio.create_task(stop.wait()), asyncio.create_task(service.wait_for_failure())
    await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():  # a process that cannot work any more must not look as if it could
        failing.result()
    failing.cancel()
    collecting.cancel()
    await service.stop(stopping.result())


if __name__ == "__main__":
    sys.exit(main())
