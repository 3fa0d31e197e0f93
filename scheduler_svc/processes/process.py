"""What the processes of a scheduler have in common: how they begin, serve and end."""

import asyncio
import logging
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.grpc_server import announce_listening, announce_serving
from octavo_shared.process.events import SLOW_STEP, Event, configure_logging
from octavo_shared.process.garbage_collection import IdleCollection, settle
from octavo_shared.process.stop_request import StopRequest
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.processes.file_limit import raise_file_limit

if TYPE_CHECKING:  # a supervisor does without
    from scheduler_svc.processes.service import SchedulerService

log = logging.getLogger(__name__)

# Time after which a start is worth a word, in seconds: the first attempts to attach have had their answers.
SILENCE_S = 2.0

# What a scheduler prints for whoever started it: `octavo up` passes it on.
NOTICE = "octavo scheduler notice: "

# What a core prints once no request is live any more and it is about to end: its fronts may go.
DRAINED_LINE = "octavo scheduler drained"


class NoticeHandler(logging.Handler):
    """Says on stdout what people want to know at once: that steps take long because the processor has other work."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the notice of a slow step; nothing of others."""
        event = record.msg
        if isinstance(event, Event) and event.name == SLOW_STEP:
            where, cause = event.fields["executor"], event.fields["cause"]
            print(f"{NOTICE}the executor at {where} is slow: other work keeps its processor busy; {cause}", flush=True)


def run_to_end(config: SchedulerConfig, serving: Coroutine[None, None, int]) -> int:
    """Run a process of the scheduler and return its exit code."""
    configure_logging(config.log_level, config.log_format)
    logging.getLogger().addHandler(NoticeHandler())
    raise_file_limit()
    try:
        return asyncio.run(serving)
    except OctavoServiceError as error:
        print(f"octavo scheduler: {error}", file=sys.stderr)
        return 1


async def run_service(service: "SchedulerService", config: SchedulerConfig, stop: StopRequest) -> None:
    """Run the service until somebody wants it to stop.

    Raises: OctavoServiceError: it cannot start.
    """
    stopping, starting = asyncio.create_task(stop.wait()), asyncio.create_task(service.start())
    await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
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
    collection = IdleCollection(lambda: not service.engine.requests, lambda: service.engine.meter.num_executor_losses)
    collecting = asyncio.create_task(collection.run())
    failing = asyncio.create_task(service.wait_for_failure())
    await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():  # a process that cannot work any more must not look as if it could
        failing.result()
    failing.cancel()
    announcing.cancel()
    collecting.cancel()
    await service.stop(stopping.result())


async def _announce_when_ready(service: "SchedulerService", address: str) -> None:
    """Say on stdout that the service serves, once it does; if that takes long, what keeps it."""
    try:
        async with asyncio.timeout(SILENCE_S):
            await service.wait_until_ready()
    except TimeoutError:
        print(f"octavo scheduler not serving yet: {service.report_not_ready()}", flush=True)
        await service.wait_until_ready()
    announce_serving("scheduler", address)
