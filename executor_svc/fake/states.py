"""What the fake executor checks of a model with a state: which tokens the state of each slot has taken.

A real state is a sum over all tokens so far, and says nothing of where it is. Here it is their number and the hash of
their history, cache salt included (`cache.py`). So a step is refused that would go on from a state of other tokens.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from executor_svc.fake.cache import Histories, move_blocks
from octavo_shared.errors import StepFailedError
from octavo_shared.step_wire.batch_table import IndexArray, StepLayout
from octavo_shared.step_wire.cache_group import CacheGroup
from octavo_shared.step_wire.step import Admission, Fork, Int32Array, Step, TokenCounts

# The number of tokens that a state has taken, and the hash at the last of them; an empty state has zeros.
STATE = np.dtype([("num_tokens", np.int32), ("history", np.uint64)])


class SlotStates:
    """The state at each slot of the batch, and saved states. Not emptied by an attach, nor when a slot is released.

    Args:
        max_num_seqs: Slots of the batch.
        group: Has the pools of saved states.
        first_id: Id of its first device block.

    Attributes:
        first_id: As it was given.
    """

    def __init__(self, max_num_seqs: int, group: CacheGroup, first_id: int) -> None:
        self._at_slots: npt.NDArray[np.void] = np.zeros(max_num_seqs, STATE)
        self._device: npt.NDArray[np.void] = np.zeros(group.num_device_blocks, STATE)
        self._host: npt.NDArray[np.void] = np.zeros(group.num_host_blocks, STATE)
        self.first_id = first_id

    @property
    def device(self) -> npt.NDArray[np.void]:
        """The saved states on the device, [num_device_blocks]."""
        return self._device

    def save(self, states_to_save: Int32Array) -> None:
        """Save the states of slots, [n, 3]: slot, tokens that it has taken, block.

        Raises: StepFailedError: a state has taken another number of tokens.
        """
        slots, counts, blocks = states_to_save.T
        if len(wrong := (self._at_slots["num_tokens"][slots] != counts).nonzero()[0]):
            slot, count = slots[wrong[0]], counts[wrong[0]]
            has_taken = self._at_slots["num_tokens"][slot]
            raise StepFailedError(f"the state of slot {slot} is saved behind {count} tokens, and has taken {has_taken}")
        self._device[blocks - self.first_id] = self._at_slots[slots]

    def move(self, step: Step) -> None:
        """Swap out, swap in, copy saved states; blocks are numbered as in their pools."""
        move_blocks(step, self._device, self._host)

    def load(self, admissions: Iterable[Admission], histories: Histories) -> None:
        """Let the slots of admissions begin with saved states.

        Raises: StepFailedError: a state has taken other tokens than those that its admission has computed.
        """
        for admission in admissions:
            if admission.state_block is None:
                continue
            slot, num_tokens = admission.slot, admission.num_computed_tokens
            self._at_slots[slot] = self._device[admission.state_block - self.first_id]
            begins = np.array([slot]), np.array([num_tokens])
            if len(self._with_others(*begins, histories)):
                raise StepFailedError(
                    f"slot {slot} begins behind {num_tokens} tokens, and the state in block {admission.state_block} "
                    f"has taken {self._taken(slot, num_tokens)}"
                )

    def fork(self, forks: Iterable[Fork]) -> None:
        """Copy the states of parents."""
        for fork in forks:
            self._at_slots[fork.slot] = self._at_slots[fork.parent_slot]

    def take(self, layout: StepLayout, histories: Histories, token_counts: TokenCounts | None = None) -> None:
        """Let states take the tokens of the whole batch; a row that begins at 0 begins with an empty state.

        Of a row with drafts it takes those that are right: as many tokens as the row got, `token_counts`.

        Raises: StepFailedError: a state has taken other tokens than those before its row.
        """
        slots, starts = layout.slots.astype(np.intp), layout.starts
        self._at_slots[slots[starts == 0]] = 0, 0
        if len(wrong := self._with_others(slots, starts, histories)):
            slot, start = int(slots[wrong[0]]), int(starts[wrong[0]])
            raise StepFailedError(
                f"slot {slot} goes on behind {start} tokens, and its state has taken {self._taken(slot, start)}"
            )
        ends = starts + (layout.lengths if token_counts is None else _right_lengths(layout, token_counts))
        self._at_slots["num_tokens"][slots] = ends
        self._at_slots["history"][slots] = histories.by_position[slots, ends - 1]

    def content_of(self, block_id: int) -> bytes:
        """Return the history that the state in a device block has taken, as bytes."""
        content: bytes = self._device["history"][block_id - self.first_id].tobytes()
        return content

    def _with_others(self, slots: IndexArray, starts: Int32Array | IndexArray, histories: Histories) -> IndexArray:
        """Return the indices of slots whose state has taken other tokens than all before `starts`."""
        states = self._at_slots[slots]
        before = np.where(starts > 0, histories.by_position[slots, starts - 1], 0)
        others: IndexArray = ((states["num_tokens"] != starts) | (states["history"] != before)).nonzero()[0]
        return others

    def _taken(self, slot: int, num_tokens: int) -> str:
        has_taken = int(self._at_slots["num_tokens"][slot])
        return "as many, but others" if has_taken == num_tokens else str(has_taken)


def _right_lengths(layout: StepLayout, token_counts: TokenCounts) -> Int32Array:
    """Return how many tokens of each row are right, [num_rows]: a row gets a token behind each of them."""
    lengths = layout.lengths.copy()
    decodes = (layout.sample_rows < layout.num_decodes) & (layout.most_tokens > 0)
    lengths[layout.sample_rows[decodes]] = np.maximum(token_counts[decodes], 1)
    return lengths
