"""A front of `--fronts`: `python -m scheduler_svc.processes.front_process LINK NUMBER`, started by `fronts.py`.

It reads the scheduler's settings as one line of JSON from stdin, and ends when stdin does: its core is gone then.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import grpc.aio

from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import configure_logging
from octavo_shared.process.garbage_collection import settle
from octavo_shared.process.stop_request import StopRequest
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.processes.file_limit import raise_file_limit
from scheduler_svc.processes.front_service import FrontService, link_options


def main() -> int:
    """Serve until SIGTERM, or until the core's process ends; return the exit code."""
    link, name = sys.argv[1:]
    config = SchedulerConfig.model_validate_json(sys.stdin.readline())
    configure_logging(config.log_level, config.log_format)
    raise_file_limit()
    settle()
    try:
        asyncio.run(serve(config, link, name, lambda: StopRequest(exit_on_stdin_close=True).wait()))
    except OctavoServiceError as error:
        print(f"octavo scheduler: front {name}: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(config: SchedulerConfig, link: str, name: str, wait_for_stop: Callable[[], Awaitable[str]]) -> None:
    """Run the front until somebody wants it to stop.

    Raises: OctavoServiceError: it cannot start.
    """
    stopping = asyncio.ensure_future(wait_for_stop())
    options = link_options(config.max_message_bytes)
    service = FrontService(config, name, lambda: grpc.aio.insecure_channel(link, options=options), is_shared=True)

    async def open_ports() -> None:
        await service.core.wait_until_told()  # who connects to one that was started again finds what the others have
        await service.ports.start()

    await service.run(open_ports, stopping)


if __name__ == "__main__":
    sys.exit(main())
