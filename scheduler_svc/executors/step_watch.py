"""Tells a step that hangs from one that is only slow, by the processor time of the thread that runs steps there.

A step that takes too long hangs if that thread stands still: it waits for something that never comes, or its process is
stopped or gone. One that uses its processor is slow, as on a machine that is busy with other things, and is waited
for; but not for ever, since it may be caught in a loop. An executor that does not tell gets no such grace.

Pure. Used by `driver.py`.
"""

# Of processor time between two looks, in microseconds: with less the thread stands still, though it may wake up.
LEAST_CPU_US = 2_000
# A step that used so many times the processor time which steps like it take, beyond what it should, is in a loop.
MOST_TIMES = 10.0


class StepWatch:
    """What is known of the one step that takes too long.

    Attributes:
        slow_step_id: The step that was found to be slow; 0: none was.
    """

    def __init__(self) -> None:
        self.slow_step_id = 0
        self._step_id = 0
        self._first_us: int | None = None
        self._last_us: int | None = None

    def look(self, step_id: int, cpu_time_us: int | None, allowed_s: float) -> bool:
        """Return whether a step hangs that takes too long; the first look at one of whom something is known says no.

        Args:
            step_id: Of the step.
            cpu_time_us: What its thread has used since the process started; None: the executor does not say.
            allowed_s: What the step may take.
        """
        first_us, last_us, is_new = self._first_us, self._last_us, step_id != self._step_id
        self._step_id, self._last_us = step_id, cpu_time_us
        if is_new:
            self._first_us = cpu_time_us
            return cpu_time_us is None
        if cpu_time_us is None or first_us is None or last_us is None or cpu_time_us - last_us < LEAST_CPU_US:
            return True
        self.slow_step_id = step_id
        return cpu_time_us - first_us > MOST_TIMES * allowed_s * 1e6
