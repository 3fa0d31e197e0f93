"""A step of the torch worker between its launch and its answer."""

from collections.abc import Callable

import numpy as np
import torch

from executor_svc.device.probe import DeviceProbe, step_error
from executor_svc.sampler.device_sampler import Arrivals
from executor_svc.worker.step_timer import HostTimer
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import Int32Array, StepResult


class LaunchedStep:
    """See `executor_svc.worker.interface.RunningStep`. Made when all its work has been launched.

    Args:
        answer: All but the sampled tokens, the row flags and the duration, and but for what arrives.
        layout: Of the step.
        sampled: On the device, [2, num_samples] int64: the sampled tokens, and the flags of the rows.
        arrivals: What else is on its way, and goes behind tokens and flags.
        timer: Started before the step's work.
        record: Waits, then writes the tokens of this step, and of all before it, into the table; called with this step.
        probe: Of the device.
    """

    def __init__(
        self,
        answer: StepResult,
        layout: StepLayout,
        sampled: torch.Tensor,
        arrivals: Arrivals,
        timer: HostTimer,
        record: Callable[["LaunchedStep"], None],
        probe: DeviceProbe,
    ) -> None:
        self.layout = layout
        self.is_recorded = False
        self._answer = answer
        self._sampled = sampled.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self._arrivals = arrivals
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
            answer = self._answer
            answer.sampled_token_ids = self.token_ids
            answer.row_flags = self._sampled[1].numpy().astype(np.uint8)
            self._arrivals.take()
            if not answer.row_flags.any():
                answer.row_flags = None
            answer.execute_duration_us = self._timer.duration_us()
        except RuntimeError as error:  # a kernel's error shows when it is waited for
            raise step_error(self._answer.step_id, error, self._probe) from error
        return self._answer

    @property
    def token_ids(self) -> Int32Array:
        """The sampled tokens, [num_samples]; the device is done with the step."""
        return self._sampled[0].numpy().astype(np.int32)
