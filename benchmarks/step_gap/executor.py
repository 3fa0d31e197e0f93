"""The benchmark's executor: the real service, a worker that sleeps, and a record of when each step began and ended.

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
from executor_svc.fake.worker import FakeWorker
from executor_svc.service.process import run_executor
from executor_svc.worker.interface import DoneStep, RunningStep
from shared.batch_table import BatchTable
from shared.config import load_config_or_exit
from shared.executor_info import ExecutorInfo, TokenizerFile
from shared.step import Step, StepResult

# A row for each step; all zeros: it has not been run.
STEP_TIMES = np.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("num_active", "<i8")])
MAX_STEPS = 100_000

TOKEN_ID = 65


def open_record(path: Path, *, is_new: bool) -> npt.NDArray[np.void]:
    """Return the record in a file, which another process may be writing, [MAX_STEPS] of `STEP_TIMES`."""
    return np.memmap(path, STEP_TIMES, "w+" if is_new else "r", shape=(MAX_STEPS,))


class SleepingWorker:
    """A worker whose steps keep the batch table and sleep, and that records when they began and ended.

    The fake executor's tokens depend on their histories; to make those of 1,024 sequences takes 10 ms of Python. Here
    every token is the same.

    Args:
        fake: Says what the executor is.
        step_ms: Time of a step.
        record: As `open_record` returns it.
    """

    def __init__(self, fake: FakeWorker, step_ms: float, record: npt.NDArray[np.void]) -> None:
        self._fake = fake
        self._step_s = step_ms / 1000
        self._record = record
        self._num_steps = 0
        self._last: tuple[int, int, int] | None = None

    @property
    def info(self) -> ExecutorInfo:
        """See `Worker`."""
        return self._fake.info

    @property
    def table(self) -> BatchTable:
        """See `Worker`."""
        return self._fake.table

    def reset(self) -> None:
        """See `Worker`."""
        self._fake.reset()

    def launch(self, step: Step) -> RunningStep:
        """Run the step; record the one before, so that this does not lengthen a gap.

        Those beyond the end of the record are lost.
        """
        begin_ns = time.perf_counter_ns()
        if self._last is not None and self._num_steps < len(self._record):
            self._record[self._num_steps] = self._last
            self._num_steps += 1
        num_active = int(np.count_nonzero(self.table.active))
        running = DoneStep(self._run(step, begin_ns))
        self._last = (begin_ns, time.perf_counter_ns(), num_active)
        return running

    def _run(self, step: Step, begin_ns: int) -> StepResult:
        layout = self.table.apply(step.delta)
        num_samples = len(layout.sample_slots)
        token_ids = np.full(num_samples, TOKEN_ID, np.int32)
        self.table.record(layout, token_ids)
        time.sleep(max(0.0, self._step_s - (time.perf_counter_ns() - begin_ns) / 1e9))
        duration_us = (time.perf_counter_ns() - begin_ns) // 1000
        logprobs = np.full(num_samples, -1.0, np.float32)
        return StepResult(step.epoch, step.step_id, token_ids, logprobs, duration_us)

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """See `Worker`."""
        return self._fake.tokenizer_files()


def main() -> int:
    """Run the executor; return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--record", type=Path, required=True)
    arguments, flags = parser.parse_known_args()
    config = load_config_or_exit(FakeConfig, flags, os.environ)
    record = open_record(arguments.record, is_new=True)
    return run_executor(config, lambda: SleepingWorker(make_worker(config), config.step_ms, record))


if __name__ == "__main__":
    sys.exit(main())
