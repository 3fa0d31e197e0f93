"""Which sequence gets which blocks: admission, growth by one token, copy-on-write, release.

A block table covers the tokens whose keys and values have been or are being computed. The token
that was just sampled gets its place in the step that feeds it, so a sequence of n tokens in which
all but the last are computed needs a new block exactly when n - 1 is a multiple of the block size.

The watermark keeps a share of the pool back from admissions and swap-ins, so that a group that has
just entered is not preempted by the next growth. Running sequences may use all of it.

Under a sliding window a sequence needs blocks for the window and one step's chunk only: those that
fell out of the window are freed while it goes on, and their entries in the block table are stale.

Sharing. Full blocks are shared through the prefix cache and inside a group; they are never written
again. Forks also share the last, partial block: whoever writes into it first gets a copy, and the
last one that is left writes in place (copy-on-write; Kwon et al. 2023, section 4.4).
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.block_holders import BlockHolders
from scheduler_svc.core.blocks.prefix_cache import NO_BLOCKS, BlockHasher, PrefixCache
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.step_size import admission_bytes, rules_bytes


@dataclass(slots=True)
class SequenceBlocks:
    """What `sequence` gets in an admission: blocks that are there already, then new ones.

    `found` holds its registered prefix. `num_shared` counts the blocks that it shares with the lead,
    which computes them in this admission; one of the two is empty.
    """

    sequence: Sequence
    found: IndexArray
    num_shared: int
    num_new: int


@dataclass(slots=True)
class AdmissionPlan:
    """How a group that fits the empty pool would get its blocks; nothing is taken yet.

    `sequences` has an entry for each of `SequenceGroup.sequences_to_compute`. `num_needed` counts
    the free blocks it takes, `num_free` those there are, less the watermark.
    """

    sequences: tuple[SequenceBlocks, ...]
    num_needed: int
    num_free: int


class BlockManager:
    """Owns the device pool; the block tables themselves are columns of the batch table.

    Args:
        limits: Sizes of pool and blocks, watermark, window.
        prefix_key: Secret of the hashes; see `prefix_cache.py`.
        holders: The fleet's index of registered blocks; None: there is no fleet.

    Attributes:
        hasher: Names blocks. The step log gives a planner another one before its first name.
    """

    def __init__(self, limits: CoreLimits, prefix_key: bytes = b"", holders: BlockHolders | None = None) -> None:
        self.block_size = limits.block_size
        self.prefix_cache: PrefixCache | None = None
        if limits.caches_prefixes:
            self.prefix_cache = PrefixCache(limits.num_blocks, holders, sends_names=limits.names_blocks)
        self.allocator = BlockAllocator(limits.num_blocks, self.prefix_cache)
        self.num_watermark_blocks = math.ceil(limits.num_blocks * limits.watermark)
        self.hasher = BlockHasher(prefix_key, limits.block_size)
        # Tokens of a sequence that have blocks at once; more only without a window.
        window = limits.sliding_window
        self._max_resident_tokens = window + limits.max_num_batched_tokens if window else limits.max_model_len

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold `num_tokens` computed tokens."""
        return -(-num_tokens // self.block_size)

    # Admission -----------------------------------------------------------------------------------

    def can_ever_allocate(self, group: SequenceGroup) -> bool:
        """Return whether the empty pool holds the group as it is now, and its first fork."""
        return self.num_blocks_ever_needed(group) <= self.allocator.num_blocks

    def num_blocks_ever_needed(self, group: SequenceGroup) -> int:
        """Return the blocks of the group as it is now, and of its first fork, in an empty pool."""
        sequences = group.sequences_to_compute
        num_shared = self._num_shared_blocks(sequences)
        num_blocks = sum(self.num_blocks_of(sequence) for sequence in sequences) - num_shared * (len(sequences) - 1)
        return num_blocks + self._num_fork_blocks(group)

    def admission_bytes(self, sequence: Sequence) -> int:
        """Return a bound of what a step's message takes to admit a sequence that does not run."""
        num_tokens, rules = len(sequence.token_ids), sequence.group.token_rules
        num_blocks = self.num_blocks_for(num_tokens + 1)
        return admission_bytes(num_tokens, num_blocks, 0 if rules is None else rules_bytes(rules))

    def plan_admission(self, group: SequenceGroup) -> AdmissionPlan:
        """Say which blocks the group would get now, and how many there are.

        The watermark does not hold back a group that would have the pool for itself.
        """
        sequences = group.sequences_to_compute
        num_shared = self._num_shared_blocks(sequences)
        planned = [self._plan_sequence(sequence, num_shared if rank else 0) for rank, sequence in enumerate(sequences)]
        num_revived = self._num_unused([blocks.found for blocks in planned])
        num_needed = num_revived + sum(blocks.num_new for blocks in planned) + self._num_fork_blocks(group)
        num_free = self.allocator.num_free_blocks
        if num_free < self.allocator.num_blocks:  # somebody uses some
            num_free -= self.num_watermark_blocks
        return AdmissionPlan(tuple(planned), num_needed, max(0, num_free))

    def allocate(self, plan: AdmissionPlan) -> list[Int32Array]:
        """Take the blocks of a plan, which are there; return the block table of each sequence."""
        for blocks in plan.sequences:  # first of all: what was found must not be evicted for what is new
            if len(blocks.found):
                self.allocator.acquire(blocks.found)
        tables: list[Int32Array] = []
        for blocks in plan.sequences:
            present: Int32Array | IndexArray = blocks.found
            if blocks.num_shared:
                present = tables[0][: blocks.num_shared]
                self.allocator.acquire(present)
            new = self.allocator.allocate(blocks.num_new)
            tables.append(np.concatenate((present, new), dtype=np.int32) if len(present) else new)
        return tables

    def waits_for_prefix(self, plan: AdmissionPlan) -> bool:
        """Return whether a step in flight computes the next block of the group's prefix."""
        lead, num_found = plan.sequences[0].sequence, len(plan.sequences[0].found)
        if lead.group.lacks_prompt_logprobs:
            return False
        return self.is_being_computed(lead.block_hashes[: self._max_hit(lead)], num_found)

    def is_being_computed(self, names: list[bytes], num_found: int) -> bool:
        """Return whether a step in flight computes the block of a prefix that comes after those that were found."""
        if self.prefix_cache is None or num_found >= len(names):
            return False
        return self.prefix_cache.is_being_written(names[num_found])

    def hash_blocks(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of all full blocks of a sequence that has no slot; none without a prefix cache."""
        if self.prefix_cache is None:
            return []
        if sequence.hashed_block_size != self.block_size:  # another executor of the fleet has other blocks
            sequence.block_hashes, sequence.hashed_block_size = [], self.block_size
        self.hasher.extend(sequence.block_hashes, sequence.token_ids, sequence.group.cache_salt)
        return sequence.block_hashes

    def hash_tokens(self, token_ids: Int32Array, cache_salt: int) -> list[bytes]:
        """Return the hashes of the full blocks of `token_ids`."""
        hashes: list[bytes] = []
        self.hasher.extend(hashes, token_ids, cache_salt)
        return hashes

    def _plan_sequence(self, sequence: Sequence, num_shared: int) -> SequenceBlocks:
        found = NO_BLOCKS
        if self.prefix_cache is not None:
            hashes = self.hash_blocks(sequence)
            if not sequence.group.lacks_prompt_logprobs:
                found = self.prefix_cache.match(hashes, self._max_hit(sequence))
        if len(found) >= num_shared:
            num_shared = 0
        else:
            found = NO_BLOCKS
        return SequenceBlocks(sequence, found, num_shared, self.num_blocks_of(sequence) - len(found) - num_shared)

    def _num_unused(self, found: list[IndexArray]) -> int:
        """Return how many of the blocks that sequences of a group found are cached and not used."""
        distinct = np.unique(np.concatenate(found)) if len(found) > 1 else found[0]
        return len(distinct) - int(np.count_nonzero(self.allocator.ref_counts[distinct])) if len(distinct) else 0

    def _max_hit(self, sequence: Sequence) -> int:
        """Return the most blocks that may be found: one token at least is computed, for its logits."""
        return (len(sequence.token_ids) - 1) // self.block_size

    def num_blocks_of(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence needs as it is now, with nothing of it shared."""
        return self.num_blocks_for(min(len(sequence.token_ids), self._max_resident_tokens))

    def _num_shared_blocks(self, sequences: Seq[Sequence]) -> int:
        """Return the full blocks that all of several sequences have in common, as long as one needs them."""
        if len(sequences) == 1 or len(sequences[0].token_ids) > self._max_resident_tokens:
            return 0
        shortest = min(len(sequence.token_ids) for sequence in sequences)
        tokens = np.stack([sequence.token_ids[:shortest] for sequence in sequences])
        differs = tokens != tokens[0]
        num_common = int(differs.any(axis=0).argmax()) if np.count_nonzero(differs) else shortest
        return min(num_common, shortest - 1) // self.block_size

    def _num_fork_blocks(self, group: SequenceGroup) -> int:
        """Return the blocks that the first fork of an unforked group will take."""
        if group.is_lone or group.is_forked or group.num_slots == 1:
            return 0
        is_aligned = group.num_prompt_tokens % self.block_size == 0
        return group.num_slots - (0 if is_aligned else 1)

    # Registration --------------------------------------------------------------------------------

    def adopt(self, block_ids: Int32Array, names: bytes) -> None:
        """Find again what the executor has kept from before: blocks, and their names one after the other.

        Nothing may have been allocated.
        """
        if self.prefix_cache is not None:
            self.allocator.adopt(self.prefix_cache.adopt(block_ids, names))

    def register(self, sequence: Sequence, token_ids: Int32Array, block_ids: Int32Array, first: int) -> int:
        """Name the computed blocks of a running sequence; return how many are registered.

        Args:
            sequence: Whose they are.
            token_ids: Its tokens that are known and computed, as acknowledged.
            block_ids: Its block table.
            first: How many of its blocks were registered before.
        """
        num_full_blocks = len(token_ids) // self.block_size
        if self.prefix_cache is None or num_full_blocks <= first:
            return first
        self.hasher.extend(sequence.block_hashes, token_ids, sequence.group.cache_salt)
        self.prefix_cache.register(
            sequence.block_hashes[first:num_full_blocks], block_ids[first:num_full_blocks].tolist()
        )
        return num_full_blocks
