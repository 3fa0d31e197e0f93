"""What the fake executor checks: which history every slot of the KV cache was written with.

A real cache holds keys and values that depend on the whole history of a sequence. Here each slot
holds a 64-bit hash of that history, cache salt and content of the adapter included; 0 is unwritten. `Histories`
knows the hash that each position of each live sequence ought to have, `HistoryCache` what the blocks really hold.
Equal histories cannot be told apart: a block that two sequences with the same tokens and salt were
given by mistake goes unnoticed, so tests give concurrent requests different prompts.
All work is in arrays: no Python loop over tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo_shared.errors import StepFailedError
from octavo_shared.step_wire.batch_table import BatchTable, IndexArray, StepLayout
from octavo_shared.step_wire.cache_group import CacheGroup
from octavo_shared.step_wire.step import Fork, Int32Array, Step, TableDelta, TokenCounts
from octavo_shared.step_wire.table_columns import BlockTables

UInt64Array = npt.NDArray[np.uint64]

# Any odd number has an inverse modulo 2^64; this one has well-spread bits.
BASE = 0xD1342543DE82EF95
SALT_BASE = 0x9E3779B97F4A7C15
# What the history of a draft that was wrong differs by.
_OF_DRAFTS = np.uint64(0xA5A5A5A5A5A5A5A5)


class Histories:
    """The history hash at each position of each live sequence.

    The hash at position p is h(p) = h(p - 1) * BASE + token(p) + w modulo 2^64, where w is `weights`, and h(-1) comes
    from the salt. In closed form, BASE^p * (h(-1) * BASE + sum of (token(i) + w) * BASE^-i), which is one
    cumulative sum.

    Attributes:
        weights: Stands for the weights that compute the next tokens; 1: those that there were at the start.
    """

    def __init__(self, table: BatchTable, weights: np.uint64) -> None:
        self.weights = weights
        largest = max(group.block_size for group in table.groups)  # the others divide it
        num_positions = -(-table.max_model_len // largest) * largest
        # np.zeros maps memory lazily: a row costs memory only up to its longest sequence.
        self.by_position = np.zeros((table.max_num_seqs, num_positions), np.uint64)
        self._num_hashed = np.zeros(table.max_num_seqs, np.int32)
        self._powers = _powers(BASE, table.max_model_len)
        self._inverse_powers = _powers(pow(BASE, -1, 2**64), table.max_model_len)

    def follow(
        self,
        table: BatchTable,
        delta: TableDelta,
        layout: StepLayout,
        adapters: Mapping[int, bytes] | None = None,
        inputs: UInt64Array | None = None,
    ) -> None:
        """Bring the hashes up to date with a delta that was just applied to `table`.

        Args:
            table: As above.
            delta: Of the step.
            layout: The same.
            adapters: The digests of what is in the adapter slots.
            inputs: What stands for what each slot attends to besides, [max_num_seqs]; None: nothing.
        """
        for admission in delta.admissions:
            start = _wrap(SALT_BASE * (2 * admission.cache_salt + 1))
            if adapters and admission.resources.adapter_slot is not None:
                start ^= np.uint64(int.from_bytes(adapters[admission.resources.adapter_slot][:8], "little"))
            if inputs is not None:
                start ^= inputs[admission.slot]
            self._hash(admission.slot, 0, admission.token_ids, start)
        for fork in delta.beam_forks:
            self._copy(fork)
        # Beyond these, only beams' tokens, which the scheduler chooses, did not come from `append`.
        ends = layout.starts + layout.lengths
        behind = self._num_hashed[layout.slots.astype(np.intp)] < ends
        if np.count_nonzero(behind):
            for slot, end in zip(layout.slots[behind].tolist(), ends[behind].tolist(), strict=True):
                begin = self._num_hashed[slot]
                self._hash(slot, begin, table.token_ids[slot, begin:end], self.by_position[slot, begin - 1])
        for fork in delta.forks:
            self._copy(fork)

    def append(self, layout: StepLayout, token_ids: Int32Array) -> None:
        """Add the sampled tokens, [num_samples], to their sequences; beam rows have none."""
        slots, positions = layout.sample_slots.astype(np.intp), layout.sample_positions.astype(np.intp)
        if layout.num_candidates is not None:
            is_sampled = layout.num_candidates == 0
            slots, positions, token_ids = slots[is_sampled], positions[is_sampled], token_ids[is_sampled]
        before = self.by_position[slots, positions - 1]
        self.by_position[slots, positions] = before * np.uint64(BASE) + token_ids.astype(np.uint64) + self.weights
        self._num_hashed[slots] = positions + 1

    @contextmanager
    def wrong_drafts(self, layout: StepLayout, counts: TokenCounts) -> Iterator[None]:
        """Let rows of active slots have another history behind the tokens that they fed and got.

        Args:
            layout: The step.
            counts: Tokens that its sample rows got, [num_samples].
        """
        num_decodes = layout.num_decodes
        num_right = np.maximum(counts[:num_decodes].astype(np.int32), 1)
        num_wrong = layout.lengths[:num_decodes] - num_right
        slots = layout.slots[:num_decodes].repeat(num_wrong)
        positions = (layout.starts[:num_decodes] + num_right).repeat(num_wrong) + _counting_up(num_wrong)
        self.by_position[slots, positions] ^= _OF_DRAFTS
        yield
        self.by_position[slots, positions] ^= _OF_DRAFTS

    def _copy(self, fork: Fork) -> None:
        num_tokens = self._num_hashed[fork.parent_slot]
        self.by_position[fork.slot, :num_tokens] = self.by_position[fork.parent_slot, :num_tokens]
        self._num_hashed[fork.slot] = num_tokens

    def _hash(self, slot: int, begin: int, token_ids: Int32Array, before: np.uint64) -> None:
        num_tokens = len(token_ids)
        terms = (token_ids.astype(np.uint64) + self.weights) * self._inverse_powers[:num_tokens]
        terms[:1] += _wrap(int(before) * BASE)  # a slice: one number alone would warn when it wraps
        sums = terms.cumsum(dtype=np.uint64)
        self.by_position[slot, begin : begin + num_tokens] = sums * self._powers[:num_tokens]
        self._num_hashed[slot] = begin + num_tokens


class HashPools:
    """The device and host block pools of a cache group, with a hash for each token.

    They are not emptied by an attach, like a real cache.
    """

    def __init__(self, group: CacheGroup) -> None:
        self._block_size = group.block_size_tokens
        self._device: UInt64Array = np.zeros((group.num_device_blocks, self._block_size), np.uint64)
        self._host: UInt64Array = np.zeros((group.num_host_blocks, self._block_size), np.uint64)

    @property
    def device(self) -> UInt64Array:
        """The device pool, [num_device_blocks, block_size]."""
        return self._device

    @property
    def block_bytes(self) -> int:
        """The bytes of a block."""
        return self._block_size * self._device.itemsize

    def move(self, step: Step) -> None:
        """Swap out, swap in, copy; blocks are numbered as in their pools."""
        move_blocks(step, self._device, self._host)


class HistoryCache(HashPools):
    """The pools of a cache group that keeps tokens of sequences."""

    def __init__(self, group: CacheGroup) -> None:
        super().__init__(group)
        self._offsets = np.arange(self._block_size)
        self._window_tokens = group.window_tokens

    def write(self, tables: BlockTables, layout: StepLayout, histories: Histories) -> None:
        """Write the tokens of the whole batch.

        Raises: StepFailedError: two rows write different histories into one place.
        """
        slots, positions = layout.slots.astype(np.intp), layout.starts.astype(np.intp)
        if layout.num_tokens > len(slots):  # else every row has one token
            slots, positions = slots.repeat(layout.lengths), positions.repeat(layout.lengths)
            positions += _counting_up(layout.lengths)
        indices, offsets = np.divmod(positions, self._block_size)
        block_ids = tables.block_ids[slots, indices].astype(np.intp)
        hashes = histories.by_position[slots, positions]
        self._device[block_ids, offsets] = hashes
        lost = self._device[block_ids, offsets] != hashes
        if np.count_nonzero(lost):
            first = int(lost.argmax())
            raise StepFailedError(
                f"slot {slots[first]} writes position {positions[first]} into block {block_ids[first]}, "
                "where another sequence writes a different history in the same step"
            )

    def check_reads(self, tables: BlockTables, layout: StepLayout, histories: Histories) -> None:
        """Check every position that attention reads: from the first one that a row's first token sees to its last.

        Raises: StepFailedError: a place is unwritten or holds another history.
        """
        begins = self.first_read(layout.starts) if self._window_tokens else None
        ends = (layout.starts + layout.lengths).astype(np.intp)
        num_blocks = (ends + (self._block_size - 1)) // self._block_size
        last_blocks = num_blocks - 1
        if begins is not None:
            first_blocks = begins // self._block_size
            num_blocks -= first_blocks
        slots, indices = layout.slots.astype(np.intp).repeat(num_blocks), _counting_up(num_blocks)
        if begins is not None:
            indices += first_blocks.repeat(num_blocks)
        block_ids = tables.block_ids[slots, indices].astype(np.intp)
        found = self._device[block_ids]  # [total blocks, block_size]
        by_block = histories.by_position.reshape(len(histories.by_position), -1, self._block_size)  # a view
        wrong = found != by_block[slots, indices]
        # The first block of a row is read from where the window begins, the last one to where the row ends.
        last = num_blocks.cumsum() - 1
        wrong[last] &= self._offsets < (ends - last_blocks * self._block_size)[:, None]
        if begins is not None:
            wrong[last - num_blocks + 1] &= self._offsets >= (begins - first_blocks * self._block_size)[:, None]
        if np.count_nonzero(wrong):
            block, offset = np.unravel_index(int(wrong.argmax()), wrong.shape)
            what = "is unwritten" if found[block, offset] == 0 else "was written with a different history"
            raise StepFailedError(
                f"slot {slots[block]} reads position {indices[block] * self._block_size + offset} "
                f"from block {block_ids[block]}, which {what} there"
            )

    def first_read(self, starts: Int32Array | IndexArray) -> IndexArray:
        """Return the first position that the token at each of `starts` sees."""
        if not self._window_tokens:
            return np.zeros(len(starts), np.intp)
        return np.maximum(starts - (self._window_tokens - 1), 0).astype(np.intp)

    def content_of(self, block_id: int) -> bytes:
        """Return the histories that a device block holds, as bytes."""
        content: bytes = self._device[block_id].tobytes()
        return content


def move_blocks(step: Step, device: npt.NDArray[Any], host: npt.NDArray[Any]) -> None:
    """Swap out, swap in, copy the blocks of two pools, [num_blocks, ...] each: in this order."""
    for target, source, moves in (
        (host, device, step.blocks_to_swap_out),
        (device, host, step.blocks_to_swap_in),
        (device, device, step.blocks_to_copy),
    ):
        if len(moves):
            sources, targets = moves.T
            target[targets] = source[sources]


def _counting_up(lengths: Int32Array | IndexArray) -> IndexArray:
    """Return 0 to length less 1 for each length, joined, [sum of lengths]."""
    ends = lengths.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    counts: IndexArray = np.arange(total) - (ends - lengths).repeat(lengths)
    return counts


def _powers(base: int, count: int) -> UInt64Array:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _wrap(value: int) -> np.uint64:
    return np.uint64(value % 2**64)
