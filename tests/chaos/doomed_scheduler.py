"""A scheduler with fronts, of which a test changes something: `python -m tests.chaos.doomed_scheduler FLAGS`.

The core kills itself at a fault point, if the environment names PLAN: a file, which has the point and the number of
the step, from 1, counted from when the core sees the file. With ABSENCE_LIMIT_S fronts wait that long for a core.
"""

import os
import sys

from octavo_shared.process.config import load_config_or_exit
from octavo_shared.process.stop_request import StopRequest
from scheduler_svc.config.front_count import choose_fronts
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.processes.process import run_to_end
from scheduler_svc.processes.supervisor import Supervisor

# What its processes run; without the variables they are as in production.
ENGINE = "tests.chaos.doomed_core"
FRONT = "tests.chaos.impatient_front"

# The variables.
PLAN = "OCTAVO_CHAOS_PLAN"
ABSENCE_LIMIT_S = "OCTAVO_CHAOS_ABSENCE_LIMIT_S"


async def serve(config: SchedulerConfig) -> int:
    """Run it until somebody wants it to stop."""
    stop = StopRequest(exit_on_stdin_close=config.exit_on_stdin_close)
    return await Supervisor(choose_fronts(config), engine_module=ENGINE, front_module=FRONT).run(stop.wait())


if __name__ == "__main__":
    config = load_config_or_exit(SchedulerConfig, sys.argv[1:], os.environ)
    sys.exit(run_to_end(config, serve(config)))
