"""Tells a step that hangs from one that is only slow, by the processor time of the threads that run steps there.

A step that takes too long hangs if those threads stand still, the one that runs it and those that it waits for (masks
of grammars): they wait for something that never comes, or their process is stopped or gone. One that uses its processor
is slow, as on a machine that is busy with other things, and is waited for; but not for ever, since it may be caught in
a loop. An executor that does not tell gets no such grace.

Pure. Used by `driver.py`.
"""

from collections.abc import Iterable

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.slotted_things import GrammarSlots

# Of processor time between two looks, in microseconds: with less the threads stand still, though they may wake up.
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
            cpu_time_us: What its threads have used since the process started; None: the executor does not say.
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


def largest_grammar(running: Iterable[SequenceGroup], slots: GrammarSlots) -> dict[str, str | int | None]:
    """Return, for the log, who follows the largest grammar of those that run, and how many follow one; empty: nobody.

    It is the likeliest one to keep a step waiting; only the executor knows which one does (`event=slow_grammar`).
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
