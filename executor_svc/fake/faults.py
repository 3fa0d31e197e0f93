"""Faults of the fake executor: steps that fail, hang or are slow, and a process that ends, at steps that flags name.

Steps are counted from the start of the process, over all attachments, failed steps too.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo_shared.errors import StepFailedError

EXIT_CODE = 1


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong, and when; 0: never.

    Attributes:
        fail_step_every: Every so many steps one fails.
        hang_step_every: Every so many steps one never ends.
        exit_after_steps: The process ends when the step after so many comes.
        slow_step_every: Every so many steps one takes `slow_step_ms` milliseconds more.
    """

    fail_step_every: int = 0
    hang_step_every: int = 0
    exit_after_steps: int = 0
    slow_step_every: int = 0
    slow_step_ms: float = 0.0


def parse_slow_step_every(text: str) -> tuple[int, float]:
    """Return N and MS of `N:MS`, which the configuration has checked; of an empty text zeros."""
    number, _, milliseconds = text.partition(":")
    return int(number or 0), float(milliseconds or 0)


def hang_for_ever() -> None:
    """Never return, and need no processor meanwhile."""
    threading.Event().wait()


class FakeFaults:
    """Counts the steps, and does what is planned for them.

    Args:
        plan: What goes wrong.
        sleep: Waits so many seconds.
        hang: Never returns.
        end_process: Ends the process with an exit code, without a word.
    """

    def __init__(
        self,
        plan: FaultPlan,
        sleep: Callable[[float], None] = time.sleep,
        hang: Callable[[], object] = hang_for_ever,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._plan = plan
        self._sleep = sleep
        self._hang = hang
        self._end_process = end_process
        self._num_steps = 0

    def begin_step(self) -> None:
        """Do what is planned for the next step, on the thread that runs it. Raises StepFailedError: it is to fail."""
        self._num_steps += 1
        plan, number = self._plan, self._num_steps
        if plan.exit_after_steps and number > plan.exit_after_steps:
            self._end_process(EXIT_CODE)
        if _is_due(plan.slow_step_every, number):
            self._sleep(plan.slow_step_ms * 1e-3)
        if _is_due(plan.hang_step_every, number):
            self._hang()
        if _is_due(plan.fail_step_every, number):
            raise StepFailedError(f"step {number} fails because of --fail-step-every")


def _is_due(every: int, number: int) -> bool:
    return every > 0 and number % every == 0
