"""A step while it is being decided: lists that grow, turned into a `Step` at the end."""

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.sequence import Sequence
from shared.step import Admission, Int32Array, Step, TableDelta, no_pairs, no_slots, pairs


@dataclass(slots=True)
class StepPlan:
    """What `Scheduler.schedule` has decided so far. `token_budget` is what is left of it."""

    token_budget: int
    released_slots: list[int] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    prefill_chunks: list[tuple[int, int]] = field(default_factory=list)
    appended_blocks: Int32Array = field(default_factory=no_pairs)
    deactivated_slots: Int32Array = field(default_factory=no_slots)
    num_decodes: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the step would neither compute nor release anything."""
        return not (self.num_decodes or self.prefill_chunks or self.released_slots)

    def take_chunk(self, slot: int, num_remaining_tokens: int) -> int:
        """Give `slot` a prefill chunk out of the budget; return its length, maybe 0."""
        num_tokens = min(num_remaining_tokens, self.token_budget)
        if num_tokens:
            self.prefill_chunks.append((slot, num_tokens))
            self.token_budget -= num_tokens
        return num_tokens

    def to_step(self, epoch: int, step_id: int) -> Step:
        """Return the decided step."""
        delta = TableDelta(
            released_slots=np.array(self.released_slots, np.int32),
            admissions=tuple(self.admissions),
            appended_blocks=self.appended_blocks,
            deactivated_slots=self.deactivated_slots,
            prefill_chunks=pairs(*self.prefill_chunks),
        )
        return Step(epoch=epoch, step_id=step_id, delta=delta)
