"""What the fake executor checks of a model with a state: which tokens the state of each slot has taken.

A real state is a sum over all tokens so far, and says nothing of where it is. Here it is their number and the hash of
their history (`cache.py`), so that a step is refused that would go on from a state of other tokens.
"""

from collections.abc import Iterable

import numpy as np

from executor_svc.fake.cache import Histories
from octavo_shared.errors import StepFailedError
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import Fork


class SlotStates:
    """The state at each slot of the batch. Not emptied by an attach, nor when a slot is released, like a real one."""

    def __init__(self, max_num_seqs: int) -> None:
        self._num_tokens = np.zeros(max_num_seqs, np.int32)
        self._hashes = np.zeros(max_num_seqs, np.uint64)

    def fork(self, forks: Iterable[Fork]) -> None:
        """Copy the states of parents."""
        for fork in forks:
            self._num_tokens[fork.slot] = self._num_tokens[fork.parent_slot]
            self._hashes[fork.slot] = self._hashes[fork.parent_slot]

    def take(self, layout: StepLayout, histories: Histories) -> None:
        """Let states take the tokens of the whole batch; a row that begins at 0 begins with an empty state.

        Raises: StepFailedError: a state has taken other tokens than those before its row.
        """
        slots, starts = layout.slots.astype(np.intp), layout.starts
        begins = slots[starts == 0]
        self._num_tokens[begins], self._hashes[begins] = 0, 0
        before = np.where(starts > 0, histories.by_position[slots, starts - 1], 0)
        wrong = (self._num_tokens[slots] != starts) | (self._hashes[slots] != before)
        if np.count_nonzero(wrong):
            row = int(wrong.argmax())
            has_taken = int(self._num_tokens[slots[row]])
            what = "as many, but others" if has_taken == starts[row] else str(has_taken)
            raise StepFailedError(
                f"slot {slots[row]} goes on behind {starts[row]} tokens, and its state has taken {what}"
            )
        ends = starts + layout.lengths
        self._num_tokens[slots], self._hashes[slots] = ends, histories.by_position[slots, ends - 1]
