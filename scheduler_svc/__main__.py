"""The scheduler process: `python -m scheduler_svc`."""

import os
import sys

from octavo_shared.process.config import load_config_or_exit
from octavo_shared.process.stop_request import StopRequest
from scheduler_svc.config.front_count import choose_fronts
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.processes.process import run_to_end


def main() -> int:
    """Serve until SIGTERM; return the exit code."""
    config = load_config_or_exit(SchedulerConfig, sys.argv[1:], os.environ)
    return run_to_end(config, serve(config))


async def serve(config: SchedulerConfig) -> int:
    """Run the scheduler until somebody wants it to stop; return the exit code.

    Raises: OctavoServiceError: it cannot start.
    """
    stop = StopRequest(exit_on_stdin_close=config.exit_on_stdin_close)
    config = choose_fronts(config)
    if config.num_fronts:
        from scheduler_svc.processes.supervisor import Supervisor

        return await Supervisor(config).run(stop.wait())
    from scheduler_svc.processes import engine_process  # takes longest to import, and a supervisor does without

    return await engine_process.serve(config, stop)


if __name__ == "__main__":
    sys.exit(main())
