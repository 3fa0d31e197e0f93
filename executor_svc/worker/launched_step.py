"""A step of the torch worker between its launch and its answer."""

from collections.abc import Callable

import numpy as np
import torch

from executor_svc.device.probe import DeviceProbe, step_error
from executor_svc.worker.step_timer import HostTimer
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import Int32Array, RowFlag, StepResult


class LaunchedStep:
    """See `executor_svc.worker.interface.RunningStep`. Made when all its work has been launched.

    Args:
        answer: All but the sampled tokens and the duration, and but for the row flags where the host took no part.
        layout: Of the step.
        sampled: On the device, [2, num_samples] int64: the sampled tokens, and 1 for each row that is not finite.
        timer: Started before the step's work.
        record: Writes the tokens of this step, and of all before it, into the table; called with this step.
        probe: Of the device.
    """

    def __init__(
        self,
        answer: StepResult,
        layout: StepLayout,
        sampled: torch.Tensor,
        timer: HostTimer,
        record: Callable[["LaunchedStep"], None],
        probe: DeviceProbe,
    ) -> None:
        self.layout = layout
        self.is_recorded = False
        self._answer = answer
        self._sampled = sampled.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self._timer = timer
        self._record = record
        self._probe = probe
        timer.stop()

    def is_done(self) -> bool:
        """Return whether the device is done with the step."""
        return self._timer.is_over()

    def wait(self) -> None:
        """Return when the device is done with the step."""
        self._timer.wait()

    def finish(self) -> StepResult:
        """Wait, record the sampled tokens, return the answer; see `RunningStep.finish`."""
        try:
            self._record(self)
            self._answer.sampled_token_ids = self.token_ids_on_host()
            is_not_finite = self._sampled[1].numpy()
            if self._answer.row_flags is None and is_not_finite.any():
                self._answer.row_flags = (is_not_finite * RowFlag.NOT_FINITE).astype(np.uint8)
            self._answer.execute_duration_us = self._timer.duration_us()
        except RuntimeError as error:  # a kernel's error shows when it is waited for
            raise step_error(self._answer.step_id, error, self._probe) from error
        return self._answer

    def token_ids_on_host(self) -> Int32Array:
        """Wait, then return the sampled tokens, [num_samples]."""
        self._timer.wait()
        return self._sampled[0].numpy().astype(np.int32)
