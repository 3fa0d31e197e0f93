"""A front of `doomed_scheduler.py`: the production front, which waits as long for a core as the environment says."""

import os
import sys

from scheduler_svc.link import absence
from scheduler_svc.processes.front_process import main
from tests.chaos.doomed_scheduler import ABSENCE_LIMIT_S

if __name__ == "__main__":
    absence.LIMIT_S = float(os.environ.get(ABSENCE_LIMIT_S, absence.LIMIT_S))
    sys.exit(main())
