"""The core in a process of its own: `python -m scheduler_svc.processes.core_process LINK`, started by `supervisor.py`.

It reads the scheduler's settings as one line of JSON from stdin, and ends when stdin does: its supervisor is gone then.
"""

import contextlib
import sys

from octavo_shared.process.stop_request import StopRequest
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.executors.driver_interface import AtFaultPoint, no_fault
from scheduler_svc.processes.process import DRAINED_LINE, run_service, run_to_end
from scheduler_svc.processes.service import SchedulerService


async def tell_drained() -> None:
    """Let the supervisor end the fronts."""
    with contextlib.suppress(BrokenPipeError):  # it is gone
        print(DRAINED_LINE, flush=True)


async def serve(config: SchedulerConfig, link: str, at_fault_point: AtFaultPoint) -> int:
    """Run the core until somebody wants it to stop; return the exit code.

    Raises: OctavoServiceError: it cannot start.
    """
    stop = StopRequest(exit_on_stdin_close=True)
    service = SchedulerService(config, link, on_drained=tell_drained, at_fault_point=at_fault_point)
    await run_service(service, config, stop)
    return 0


def main(at_fault_point: AtFaultPoint = no_fault) -> int:
    """Serve until SIGTERM, or until the supervisor ends; return the exit code.

    Args:
        at_fault_point: See `SchedulerService`.
    """
    [link] = sys.argv[1:]
    config = SchedulerConfig.model_validate_json(sys.stdin.readline())
    return run_to_end(config, serve(config, link, at_fault_point))


if __name__ == "__main__":
    sys.exit(main())
