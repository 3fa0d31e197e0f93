"""An executor with steps that sleep, and a record of when each began and ended.

    python -m benchmarks.costs.sleeping_executor --record FILE [flags of executor_svc.fake]

The fake executor's tokens depend on their histories; for 1,024 sequences they take 10 ms of Python. Here every token is
the same. The times are of the executor's own clock, around the call that runs a step.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from executor_svc.fake import __main__ as fake
from octavo_shared.step_wire.step import Step, StepResult

# A row for each step; all zeros: it has not been run.
STEP_TIMES = np.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("num_active", "<i8")])
MAX_STEPS = 100_000
TOKEN_ID = 65


def open_record(path: Path, *, is_new: bool) -> npt.NDArray[np.void]:
    """Return the record in a file, which another process may be writing, [MAX_STEPS] of `STEP_TIMES`."""
    return np.memmap(path, STEP_TIMES, "w+" if is_new else "r", shape=(MAX_STEPS,))


class SleepingWorker(fake.FakeWorker):
    """A worker with steps that keep the batch table and sleep; `record` is as `open_record` returns it."""

    def __init__(self, record: npt.NDArray[np.void], **settings: Any) -> None:
        super().__init__(**settings)
        self._record = record
        self._num_steps = 0
        self._last: tuple[int, int, int] | None = None

    def execute(self, step: Step) -> StepResult:
        """Run the step; record the one before, so that this does not lengthen a gap."""
        begin_ns = time.perf_counter_ns()
        if self._last is not None:
            self._record[self._num_steps] = self._last
            self._num_steps += 1
        num_active = int(np.count_nonzero(self.table.active))
        layout = self.table.apply(step.delta)
        token_ids = np.full(len(layout.sample_slots), TOKEN_ID, np.int32)
        self.table.resolve(layout, token_ids)
        time.sleep(max(0.0, self._step_ms / 1e3 - (time.perf_counter_ns() - begin_ns) / 1e9))
        end_ns = time.perf_counter_ns()
        self._last = (begin_ns, end_ns, num_active)
        logprobs = np.full(len(token_ids), -1.0, np.float32)
        return StepResult(step.epoch, step.step_id, token_ids, logprobs, (end_ns - begin_ns) // 1000)


def main() -> int:
    """Run the executor; return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--record", type=Path, required=True)
    arguments, sys.argv[1:] = parser.parse_known_args()
    with patch.object(fake, "FakeWorker", partial(SleepingWorker, open_record(arguments.record, is_new=True))):
        return fake.main()


if __name__ == "__main__":
    sys.exit(main())
