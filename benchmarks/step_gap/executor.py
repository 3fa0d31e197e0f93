"""The benchmark's executor: the real service and the fake worker, and a record of when each step began and ended.

    python -m benchmarks.step_gap.executor --record FILE [flags of executor_svc.fake]

The times are of the executor's own clock, around the call that runs a step.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from executor_svc.config import FakeConfig
from executor_svc.fake.__main__ import make_worker
from executor_svc.service.process import run_executor
from executor_svc.worker.interface import RunningStep, Worker
from shared.batch_table import BatchTable
from shared.config import load_config_or_exit
from shared.executor_info import ExecutorInfo, TokenizerFile
from shared.step import Step

# A row for each step; all zeros: it has not been run.
STEP_TIMES = np.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("num_active", "<i8")])
MAX_STEPS = 100_000


def open_record(path: Path, *, is_new: bool) -> npt.NDArray[np.void]:
    """Return the record in a file, which another process may be writing, [MAX_STEPS] of `STEP_TIMES`."""
    return np.memmap(path, STEP_TIMES, "w+" if is_new else "r", shape=(MAX_STEPS,))


class TimedWorker:
    """A worker that records its steps."""

    def __init__(self, worker: Worker, record: npt.NDArray[np.void]) -> None:
        self._worker = worker
        self._record = record
        self._num_steps = 0
        self._last: tuple[int, int, int] | None = None

    @property
    def info(self) -> ExecutorInfo:
        """See `Worker`."""
        return self._worker.info

    @property
    def table(self) -> BatchTable:
        """See `Worker`."""
        return self._worker.table

    def reset(self) -> None:
        """See `Worker`."""
        self._worker.reset()

    def launch(self, step: Step) -> RunningStep:
        """Run the step; record the one before, so that this does not lengthen a gap.

        Those beyond the end of the record are lost.
        """
        begin_ns = time.perf_counter_ns()
        if self._last is not None and self._num_steps < len(self._record):
            self._record[self._num_steps] = self._last
            self._num_steps += 1
        num_active = int(np.count_nonzero(self.table.active))
        running = self._worker.launch(step)
        self._last = (begin_ns, time.perf_counter_ns(), num_active)
        return running

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """See `Worker`."""
        return self._worker.tokenizer_files()


def main() -> int:
    """Run the executor; return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--record", type=Path, required=True)
    arguments, flags = parser.parse_known_args()
    config = load_config_or_exit(FakeConfig, flags, os.environ)
    record = open_record(arguments.record, is_new=True)
    return run_executor(config, lambda: TimedWorker(make_worker(config), record))


if __name__ == "__main__":
    sys.exit(main())
