"""What the fake executor checks of a model with an encoder: which input the blocks of every slot hold the output of.

Each output of a real encoder depends on the whole input. Here each place of a block holds a hash of the whole input,
cache salt included, and the number of the place. What a sequence attends to is a part of its history, so a wrong block
fails the step, and answers follow from both.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from executor_svc.fake.cache import BASE, SALT_BASE, HashPools, UInt64Array
from octavo_shared.errors import StepFailedError
from octavo_shared.step_wire.cache_group import CacheGroup
from octavo_shared.step_wire.step import Admission, Fork, Int32Array
from octavo_shared.step_wire.table_columns import BlockTables

# Of neighbouring places.
_DISTANCE = np.uint64(SALT_BASE)


class EncoderCache(HashPools):
    """The pools of the encoder's output. Not emptied by an attach, like a real cache.

    Args:
        max_num_seqs: Slots of the batch.
        group: Has the pools.
        first_id: Id of its first device block.

    Attributes:
        inputs: Stands for what each slot attends to, [max_num_seqs]; 0: nothing.
    """

    def __init__(self, max_num_seqs: int, group: CacheGroup, first_id: int) -> None:
        super().__init__(group)
        self.inputs: UInt64Array = np.zeros(max_num_seqs, np.uint64)
        self._first_id = first_id

    def encode(self, admissions: Iterable[Admission], weights: np.uint64) -> None:
        """Run the encoder of the admissions that have an input, then let all begin with what their blocks hold.

        Raises: StepFailedError: a block is unwritten, or two blocks hold the outputs of different inputs.
        """
        given = [(one.slot, one.cache_salt, one.encoder_input) for one in admissions if one.encoder_input is not None]
        for _, cache_salt, encoder_input in given:
            if (token_ids := encoder_input.token_ids) is not None:
                own = encoder_input.block_ids - np.int32(self._first_id)
                self._device[own] = 0  # the end of the last one is unwritten
                places = self._places(own, encoder_input.num_tokens)
                root = _hash_of(token_ids, cache_salt, weights)
                self._flat[places] = root + np.arange(len(places)).astype(np.uint64) * _DISTANCE
        for slot, _, encoder_input in given:
            block_ids = encoder_input.block_ids - np.int32(self._first_id)
            self.inputs[slot] = self._device[block_ids[0], 0]
            self._check(slot, block_ids, encoder_input.num_tokens)

    def fork(self, forks: Iterable[Fork]) -> None:
        """Let children attend to what their parents attend to."""
        for fork in forks:
            self.inputs[fork.slot] = self.inputs[fork.parent_slot]

    def check_reads(self, tables: BlockTables, num_tokens: Int32Array, slots: Int32Array) -> None:
        """Check all that the rows of a step attend to. Raises: StepFailedError: as `encode`."""
        for slot in np.unique(slots).tolist():
            self._check(slot, tables.of_slot(slot), int(num_tokens[slot]))

    @property
    def _flat(self) -> UInt64Array:
        return self._device.reshape(-1)  # a view

    def _places(self, block_ids: Int32Array, num_tokens: int) -> npt.NDArray[np.intp]:
        places = block_ids.astype(np.intp)[:, None] * self._block_size + np.arange(self._block_size)
        return places.reshape(-1)[:num_tokens]

    def _check(self, slot: int, block_ids: Int32Array, num_tokens: int) -> None:
        found = self._flat[self._places(block_ids, num_tokens)]
        wrong = found != self.inputs[slot] + np.arange(num_tokens).astype(np.uint64) * _DISTANCE
        wrong[0] |= self.inputs[slot] == 0
        if np.count_nonzero(wrong):
            place = int(wrong.argmax())
            what = "is unwritten" if found[place] == 0 else "has the output of another input"
            block_id = int(block_ids[place // self._block_size])
            raise StepFailedError(
                f"slot {slot} attends to encoder token {place} in block {block_id}, which {what} there"
            )


def without_weights(inputs: UInt64Array, weights: np.uint64) -> UInt64Array:
    """Return what would stand for inputs that were encoded with some weights, had it been with those of the start."""
    return inputs - _of_weights(weights)


def _of_weights(weights: np.uint64) -> np.uint64:
    """Return what an output differs by from that of the weights of the start; it is even."""
    return np.uint64((int(weights) - 1) * 2 * BASE % 2**64)


def _hash_of(token_ids: Int32Array, cache_salt: int, weights: np.uint64) -> np.uint64:
    """Return what stands for an input: of all its tokens, in their order, and odd."""
    powers = np.cumprod(np.full(len(token_ids), BASE, np.uint64), dtype=np.uint64)
    total = ((token_ids.astype(np.uint64) + np.uint64(2)) * powers).sum(dtype=np.uint64)
    whole = (int(total) * BASE + SALT_BASE * (2 * cache_salt + 1)) | 1
    return np.uint64((whole + int(_of_weights(weights))) % 2**64)
