"""The worker of a model that generates nothing: no cache, no sampler, a batch table that stays empty."""

import numpy as np
import torch

from executor_svc.device.probe import DeviceProbe, step_error
from executor_svc.models.pooling import Pooler
from executor_svc.worker.interface import (
    DoneStep,
    RunningStep,
    WithFixedWeights,
    WithoutTransfers,
    check_layout,
    check_step,
    table_of,
)
from executor_svc.worker.step_timer import start_timer
from octavo_shared.errors import InvalidStepError, StepFailedError
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from octavo_shared.step_wire.step import Step, StepResult


class EncoderWorker(WithFixedWeights, WithoutTransfers):
    """Runs steps of texts; see `executor_svc.worker.interface.Worker`.

    Args:
        info: What it is.
        pooler: Answers the texts.
        tokenizer_files: Of the model.
        device: Where the model runs.
        probe: Whether the device still computes.
    """

    helper_cpu_time_us = 0

    def __init__(
        self,
        info: ExecutorInfo,
        pooler: Pooler,
        tokenizer_files: tuple[TokenizerFile, ...],
        device: torch.device,
        probe: DeviceProbe,
    ) -> None:
        self.info = info
        self._pooler = pooler
        self._tokenizer_files = tokenizer_files
        self._device = device
        self._probe = probe
        self.reset()

    def reset(self, *, uses_groups: bool = False) -> None:
        """Empty the batch table: a scheduler has attached."""
        self.table = table_of(self.info)

    def launch(self, step: Step) -> RunningStep:
        """Compute the step; see `Worker.launch`."""
        check_step(step, self.info)
        try:
            return DoneStep(self._run(step))
        except (InvalidStepError, StepFailedError):
            raise
        except Exception as error:  # torch fails with many types; all mean the same here
            raise step_error(step.step_id, error, self._probe) from error

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return tokenizer.json and its companions; empty if the model has no tokenizer.json."""
        return self._tokenizer_files

    def _run(self, step: Step) -> StepResult:
        timer = start_timer(self._device)
        layout = self.table.apply(step.delta)
        digest = check_layout(step, layout, self.table, self.info)
        result = StepResult(step.epoch, step.step_id, np.empty(0, np.int32), table_digest=digest)
        if step.pooling_inputs:
            result.pooling_outputs = self._pooler.pool(step.pooling_inputs)
        timer.stop()
        result.execute_duration_us = timer.duration_us()
        return result
