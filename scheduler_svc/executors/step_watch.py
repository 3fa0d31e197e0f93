"""Tells a step that hangs from a slow one, by the processor time of the executor's threads that run steps.

A step that takes too long hangs if its threads stand still, the thread that runs it and threads that it waits for
(masks of grammars): they wait for an event that never comes, or their process is stopped or gone. A step that uses
processor time is slow, as on a busy machine, and is waited for; but not for ever, because it may be in an endless loop.
If an executor does not tell its processor time, every step that takes too long hangs.

Pure. Used by `driver.py`.
"""

from collections.abc import Iterable

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.slotted_things import GrammarSlots

# With less processor time between two looks, the threads count as standing still, though they may wake up at times.
LEAST_CPU_US = 2_000
# A step that used so many times the processor time that it may take is in an endless loop.
MOST_TIMES = 10.0


class StepWatch:
    """Watches the step that takes too long.

    Attributes:
        slow_step_id: The step that was found to be slow; 0: none.
    """

    def __init__(self) -> None:
        self.slow_step_id = 0
        self._step_id = 0
        self._first_us: int | None = None
        self._last_us: int | None = None

    def look(self, step_id: int, cpu_time_us: int | None, allowed_s: float) -> bool:
        """Return whether a step that takes too long hangs. At the first look it does only if `cpu_time_us` is None.

        Args:
            step_id: The step.
            cpu_time_us: Processor time of its threads since the process started; None: the executor does not say.
            allowed_s: The time that the step may take.
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


def largest_grammar(running: Iterable[SequenceGroup], slots: GrammarSlots) -> dict[str, str | int | None]:
    """Return, for the log, the request with the largest grammar, and how many have one; empty: no request has.

    Its grammar is the likeliest to keep a step waiting; only the executor knows which one does (`event=slow_grammar`).
    """
    guided = [(group, group.grammar) for group in running if group.grammar is not None]
    if not guided:
        return {}
    group, grammar = max(guided, key=lambda one: len(one[1].body))
    return {
        "num_guided": len(guided),
        "largest_grammar_bytes": len(grammar.body),
        "sha256": grammar.digest.hex()[:16],
        "grammar_slot": slots.slot_of(grammar),
        "request_id": group.request_id,
        "tenant": group.tenant,
    }
