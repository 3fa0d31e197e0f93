"""The process that decides steps: a whole scheduler, or the engine of fronts.

`supervisor.py` starts the latter: `python -m scheduler_svc.processes.engine_process`. It reads the scheduler's settings
as one line of JSON from stdin, and ends when stdin closes: its supervisor is gone then.
"""

import asyncio
import sys

from octavo_shared.grpc.grpc_server import announce_listening, announce_when_ready
from octavo_shared.process.garbage_collection import IdleCollection, settle
from octavo_shared.process.stop_request import StopRequest
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.executors.driver_interface import AtFaultPoint, no_fault
from scheduler_svc.processes.process import run_to_end
from scheduler_svc.processes.service import SchedulerService


async def serve(
    config: SchedulerConfig,
    stop: StopRequest | None = None,
    link: str | None = None,
    at_fault_point: AtFaultPoint = no_fault,
) -> int:
    """Serve until told to stop; return the exit code.

    Args:
        config: The scheduler's.
        stop: The request to stop; None: one is made here.
        link: See `SchedulerService`.
        at_fault_point: See `SchedulerService`.

    Raises: OctavoServiceError: the service cannot start.
    """
    stop = stop or StopRequest(exit_on_stdin_close=config.exit_on_stdin_close)
    service = SchedulerService(config, link, at_fault_point=at_fault_point)
    address = await service.start()
    awaits = f"an executor at {', '.join(config.executor)}"
    announce_listening("scheduler", address, service.other_addresses, awaits=awaits)
    announcing = asyncio.create_task(
        announce_when_ready("scheduler", address, service.wait_until_ready, service.report_not_ready)
    )
    settle()
    collection = IdleCollection(lambda: not service.engine.requests, lambda: service.engine.meter.num_executor_losses)
    collecting = asyncio.create_task(collection.run())
    stopping, failing = asyncio.create_task(stop.wait()), asyncio.create_task(service.wait_for_failure())
    await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():  # a process that can no longer work must not look ready
        failing.result()
    failing.cancel()
    announcing.cancel()
    collecting.cancel()
    await service.stop(stopping.result())
    return 0


def main(at_fault_point: AtFaultPoint = no_fault) -> int:
    """Run the engine of fronts until SIGTERM, or until the supervisor ends; return the exit code."""
    [link] = sys.argv[1:]
    config = SchedulerConfig.model_validate_json(sys.stdin.readline())
    return run_to_end(config, serve(config, link=link, at_fault_point=at_fault_point))


if __name__ == "__main__":
    sys.exit(main())
