"""The core of `doomed_scheduler.py`: the production core, which kills itself at a fault point."""

import os
import signal
import sys
from pathlib import Path

from scheduler_svc.executors.driver_interface import FaultPoint, no_fault
from scheduler_svc.processes.engine_process import main
from tests.chaos.doomed_scheduler import PLAN


class Doom:
    """Kills this process at the point and the step that a file names; the file is removed before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_left = 0
        self._point: FaultPoint | None = None

    def __call__(self, point: FaultPoint, _address: str) -> None:
        """A step is at a fault point."""
        if self._point is None and self._path.exists():
            name, number = self._path.read_text(encoding="ascii").split()
            self._point, self._num_left = FaultPoint[name], int(number)
        if point is not self._point:
            return
        self._num_left -= 1
        if not self._num_left:
            self._path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Doom(Path(os.environ[PLAN])) if PLAN in os.environ else no_fault))
