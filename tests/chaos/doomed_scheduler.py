"""A scheduler with fronts whose core kills itself at a fault point: `python -m tests.chaos.doomed_scheduler FLAGS`.

The file that PLAN names has the point and the number of the step, from 1, counted from when the core sees the file.
"""

import os
import sys

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.front_count import choose_fronts
from scheduler_svc.process import run_to_end
from scheduler_svc.supervisor import Supervisor
from shared.config import load_config_or_exit
from shared.stop_request import StopRequest

# The variable that names the file.
PLAN = "OCTAVO_CHAOS_PLAN"


async def serve(config: SchedulerConfig) -> int:
    """Run it until somebody wants it to stop."""
    stop = StopRequest(exit_on_stdin_close=config.exit_on_stdin_close)
    return await Supervisor(choose_fronts(config), core_module="tests.chaos.doomed_core").run(stop.wait())


if __name__ == "__main__":
    config = load_config_or_exit(SchedulerConfig, sys.argv[1:], os.environ)
    sys.exit(run_to_end(config, serve(config)))
