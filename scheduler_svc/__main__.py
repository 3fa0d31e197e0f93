"""The scheduler process: `python -m scheduler_svc`."""

import asyncio
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
    """Run the scheduler until told to stop; return the exit code.

    Raises: OctavoServiceError: the scheduler cannot start.
    """
    stop = StopRequest(exit_on_stdin_close=config.exit_on_stdin_close)
    config = choose_fronts(config)
    if config.num_fronts:
        from scheduler_svc.processes.supervisor import Supervisor, wait_for_orphans

        waiting, stopping = asyncio.ensure_future(wait_for_orphans(config)), asyncio.ensure_future(stop.wait())
        await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not waiting.done():
            return 0
        return await Supervisor(config).run(stopping)
    from scheduler_svc.processes import engine_process  # slowest to import, and a supervisor does not need it

    return await engine_process.serve(config, stop)


if __name__ == "__main__":
    sys.exit(main())
