"""Which sequence gets which blocks: admission, growth by one token, copy-on-write, release.

A block table covers the tokens whose keys and values have been or are being computed. The token
that was just sampled gets its place in the step that feeds it, so a sequence of n tokens in which
all but the last are computed needs a new block exactly when n - 1 is a multiple of the block size.

The watermark keeps a share of the pool back from admissions and swap-ins, so that a group that has
just entered is not preempted by the next growth. Running sequences may use all of it.

A sequence has a block table in each cache group (`group_blocks.py`), and begins behind the longest prefix that is found
(`prefixes.py`).

Sharing. Full blocks are shared through the prefix cache and inside a group; they are never written
again. Forks also share the last, partial block: the first sequence that writes into it gets a copy, and the
last sequence that holds it writes in place (copy-on-write; Kwon et al. 2023, section 4.4).
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import EncoderInput, Int32Array, no_slots
from scheduler_svc.core.blocks.admission_plan import AdmissionPlan, Allocated, GroupPart, Scarcest, SequenceBlocks
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.block_holders import BlockHolders
from scheduler_svc.core.blocks.encoder_blocks import EncoderBlocks, EncoderPlan, Encoding, names_of_input
from scheduler_svc.core.blocks.group_blocks import NOTHING_FOUND, Found, GroupBlocks
from scheduler_svc.core.blocks.host_blocks import Copy
from scheduler_svc.core.blocks.prefix_cache import HASH_BYTES, BlockHasher
from scheduler_svc.core.blocks.prefixes import Prefix, Prefixes
from scheduler_svc.core.blocks.saved_states import SavedStates
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.step_cost import StepCost
from scheduler_svc.core.step.step_size import admission_bytes, encoder_input_bytes, rules_bytes

# Most blocks that a step copies to the host, and as long as it is not known what they cost.
MAX_COPIED_BLOCKS, FIRST_COPIED_BLOCKS = 64, 8


class BlockManager:
    """Owns the device pools; the block tables themselves are columns of the batch table.

    Args:
        limits: Sizes of pools and blocks, watermark, windows.
        prefix_key: Secret of the hashes; see `prefix_cache.py`.
        holders: The fleet's index of registered blocks of the first cache group; None: there is no fleet.

    Attributes:
        groups: The cache groups with block tables that grow.
        encoder: The output of the encoder; None: the model has none.
        wanted: The pools that admissions take blocks of: those of `groups` and of the encoder.
        prefixes: Finds prefixes.
        pools: Those of the cache groups, of the encoder and of saved states, as their blocks are numbered.
        allocator, prefix_cache: Of the first cache group.
        states: The saved states of a model with states; None: none is saved.
        first_state: The id of the first one on the wire.
        nothing: No block of any cache group.
        step_cost: What steps of the executor take.
        num_copied_blocks: That were copied to the host.
        hasher: Names blocks; the fleet replaces it.
        era: Of the hasher: a later one names the same blocks otherwise.
    """

    def __init__(self, limits: CoreLimits, prefix_key: bytes = b"", holders: BlockHolders | None = None) -> None:
        self.block_size, self._has_states = limits.block_size, limits.has_states
        self.groups: list[GroupBlocks] = []
        first_host_id = 0
        for pool in limits.groups:
            first_id = sum(group.allocator.num_blocks for group in self.groups)
            self.groups.append(GroupBlocks(limits, pool, first_id, first_host_id, None if self.groups else holders))
            first_host_id += pool.num_host_blocks
        self.states: SavedStates | None = None
        self.encoder: EncoderBlocks | None = None
        self.first_state = sum(group.allocator.num_blocks for group in self.groups)
        if limits.max_encoder_tokens:
            self.encoder = EncoderBlocks(limits, self.first_state, first_host_id)
            self.first_state += limits.num_encoder_blocks
            first_host_id += limits.num_encoder_host_blocks
        self.wanted: Seq[GroupBlocks | EncoderBlocks] = (
            self.groups if self.encoder is None else [*self.groups, self.encoder]
        )
        if limits.num_state_blocks:
            self.states = SavedStates(limits, self.first_state, first_host_id)
            self.groups[0].allocator.dependents = self.groups[0].host.allocator.dependents = self.states
        # As their blocks are numbered.
        self.pools: list[GroupBlocks | EncoderBlocks | SavedStates] = [*self.wanted]
        self.pools += [] if self.states is None else [self.states]
        for index, group in enumerate(self.groups) if limits.more_groups else ():
            group.words = f" of cache group {index} ({f'window of {group.window}' if group.window else 'all'} tokens)"
        self.prefixes = Prefixes(self.groups, self.states, len(self.wanted))
        self.allocator, self.prefix_cache = self.groups[0].allocator, self.groups[0].prefix_cache
        self.num_watermark_blocks = self.groups[0].num_watermark_blocks
        self.hasher, self.era = BlockHasher(prefix_key, limits.block_size), 0
        self.nothing = (0,) * len(self.wanted)
        self._nothing_found: Seq[Found] = (NOTHING_FOUND,) * len(self.groups)
        self.step_cost = StepCost()
        self.num_copied_blocks = 0
        self._max_resident_tokens = min(group.max_resident_tokens for group in self.groups)

    @property
    def fullest(self) -> BlockAllocator:
        """The pool with the largest share in use: it will be the first to lack a block."""
        pools = [group.allocator for group in self.wanted]
        return max(pools, key=lambda pool: pool.num_used_blocks / max(1, pool.num_blocks))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold `num_tokens` computed tokens."""
        return -(-num_tokens // self.block_size)

    # Admission -----------------------------------------------------------------------------------

    def can_ever_allocate(self, group: SequenceGroup) -> bool:
        """Return whether the empty pools hold the group as it is now, and its first fork."""
        num_needed = self.num_blocks_ever_needed(group)
        return all(num <= of.allocator.num_blocks for num, of in zip(num_needed, self.wanted, strict=True))

    def num_blocks_ever_needed(self, group: SequenceGroup) -> tuple[int, ...]:
        """Return the blocks of the group as it is now, and of its first fork, in the empty pool of each cache group."""
        sequences = group.sequences_to_compute
        num_not_needed = self._num_shared_blocks(sequences) * (len(sequences) - 1) - self._num_fork_blocks(group)
        lengths = [len(sequence.token_ids) for sequence in sequences]
        num_needed = [sum(of.num_new(length, 0) for length in lengths) - num_not_needed for of in self.groups]
        if self.encoder is not None:
            num_needed.append(self.encoder.num_blocks_of(group))
        return tuple(num_needed)

    def scarcest_ever(self, group: SequenceGroup) -> Scarcest:
        """Return what the group takes of the empty pools, and how large they are."""
        return self.scarcest(self.num_blocks_ever_needed(group), [of.allocator.num_blocks for of in self.wanted])

    def scarcest(self, num_needed: Seq[int], num_free: Seq[int]) -> Scarcest:
        """Return the cache group that lacks most blocks; both arguments are of each of the pools that are `wanted`."""
        if len(num_needed) == 1:
            return Scarcest(num_needed[0], num_free[0])
        needs = zip(num_needed, num_free, (of.words for of in self.wanted), strict=True)
        return Scarcest(*max(needs, key=lambda need: need[0] - need[1]))

    def admission_bytes(self, sequence: Sequence) -> int:
        """Return an upper bound of the bytes in a step's message that admit a sequence."""
        num_tokens, rules = len(sequence.token_ids), sequence.group.token_rules
        num_blocks = self.num_blocks_for(num_tokens + 1) * len(self.groups)
        num_bytes = 0 if rules is None else rules_bytes(rules)
        if (encoder_token_ids := sequence.group.encoder_token_ids) is not None:
            num_bytes += encoder_input_bytes(len(encoder_token_ids), self.num_blocks_for(len(encoder_token_ids)))
        return admission_bytes(num_tokens, num_blocks, num_bytes)

    def plan_admission(self, group: SequenceGroup) -> AdmissionPlan:
        """Return which blocks the group would get now, and how many are free."""
        plan = self._plan(group, with_host=self.has_host_prefixes)
        return plan if self._has_room_for_states(plan) else self._plan(group, with_host=False)

    def _plan(self, group: SequenceGroup, *, with_host: bool) -> AdmissionPlan:
        lead, *others = group.sequences_to_compute
        planned = [self._plan_sequence(lead, 0, with_host=with_host)]
        # A lead that begins behind a window has no first blocks to share.
        is_whole = not any(part.num_skipped for part in planned[0].parts)
        num_shared = self._num_shared_blocks([lead, *others]) if is_whole else 0
        planned += [self._plan_sequence(sequence, num_shared) for sequence in others]
        num_fork_blocks, num_needed = self._num_fork_blocks(group), []
        for index, of in enumerate(self.groups):
            parts = [blocks.parts[index] for blocks in planned]
            num_new = sum(part.num_taken for part in parts) + num_fork_blocks
            num_needed.append(_num_unused(of, [part.found.on_device for part in parts]) + num_new)
        encoder = None if self.encoder is None else self.plan_encoder(group)
        if encoder is not None:
            num_needed.append(encoder.num_needed)
        scarcest = self.scarcest(num_needed, [of.num_free for of in self.wanted])
        return AdmissionPlan(tuple(planned), tuple(num_needed), scarcest, encoder)

    def plan_encoder(self, group: SequenceGroup) -> EncoderPlan | None:
        """Return how a group would get the blocks of its encoder's input now; None: the model has no encoder."""
        return None if self.encoder is None else self.encoder.plan(group, self.hasher, self.era)

    def allocate_encoder(
        self, plan: EncoderPlan | None, num_sequences: int
    ) -> tuple[list[EncoderInput | None], Encoding | None]:
        """Take the blocks of a plan; return what each sequence is admitted with, and what the step encodes."""
        if self.encoder is None or plan is None:
            return [None] * num_sequences, None
        given, encoding = self.encoder.allocate(plan, num_sequences)
        others = EncoderInput(given.num_tokens, given.block_ids)
        return [given, *[others] * (num_sequences - 1)], encoding

    def _has_room_for_states(self, plan: AdmissionPlan) -> bool:
        """Return whether the state on the host that a plan begins with has room beside those on the device."""
        if self.states is None or self.states.is_on_device(plan.sequences[0].state):
            return True
        on_device = {self.states.block_of(planned.state) for planned in plan.sequences[1:] if planned.state}
        num_unused = sum(not self.states.allocator.ref_counts[block] for block in on_device)
        return num_unused < self.states.num_free

    def allocate(self, plan: AdmissionPlan) -> Allocated:
        """Take the blocks of a plan, which must be free."""
        state_blocks, swap_ins = self._take_states(plan)
        tables: list[list[Int32Array]] = [[] for _ in plan.sequences]
        for index, of in enumerate(self.groups):
            for blocks in plan.sequences:  # first of all: no new block may evict a block that was found
                of.acquire(blocks.parts[index].found)
            for blocks, of_sequence in zip(plan.sequences, tables, strict=True):
                part = blocks.parts[index]
                present: Int32Array | IndexArray
                present, pairs = of.bring(part.found)
                swap_ins += pairs
                if blocks.num_shared:
                    present = tables[0][index][: blocks.num_shared]
                    of.allocator.acquire(present)
                new = of.allocator.allocate(part.num_new)
                skipped = np.zeros(part.num_skipped, np.int32)
                before = [some for some in (skipped, present) if len(some)]
                of_sequence.append(np.concatenate((*before, new), dtype=np.int32) if before else new)
        held = tuple([block for block in state_blocks if block is not None])
        if plan.encoder is None:
            return Allocated(tables, state_blocks, swap_ins, held, [None] * len(tables), None)
        encoded = self.allocate_encoder(plan.encoder, len(plan.sequences))
        return Allocated(tables, state_blocks, swap_ins, held, *encoded)

    def _take_states(self, plan: AdmissionPlan) -> tuple[list[int | None], list[tuple[int, int]]]:
        """Keep the states that a plan begins with until the step that loads them is made; bring those on the host."""
        names, swap_ins = [planned.state for planned in plan.sequences], list[tuple[int, int]]()
        state_blocks: list[int | None] = [None] * len(names)
        if (states := self.states) is None:
            return state_blocks, swap_ins
        # Those on the device first: what comes from the host may evict none of them.
        for place in sorted(range(len(state_blocks)), key=lambda place: not states.is_on_device(names[place])):
            if names[place]:
                state_blocks[place], pairs = states.hold_named(names[place])
                swap_ins += pairs
        return state_blocks, swap_ins

    def wire_ids(self, tables: Seq[Int32Array]) -> Int32Array:
        """Return the block tables of a sequence, one a cache group, as on the wire."""
        if len(tables) == 1:
            return tables[0]
        ids = [table + np.int32(group.first_id) for group, table in zip(self.groups, tables, strict=True)]
        return np.concatenate(ids)

    def waits_for_prefix(self, plan: AdmissionPlan) -> bool:
        """Return whether the next block of the group's prefix, or a state behind it, is being computed."""
        lead = plan.sequences[0]
        if lead.sequence.group.lacks_prompt_logprobs:
            return False
        names = lead.sequence.block_hashes[: self._max_hit(lead.sequence)]
        if self.states is not None and self.states.is_expected(names[lead.num_cached : lead.num_in_chain]):
            return True
        return self.is_being_computed(names, lead.num_in_chain)

    def is_being_computed(self, names: list[bytes], num_found: int) -> bool:
        """Return whether a step in flight computes the block of a prefix that follows the `num_found` first ones."""
        if self.prefix_cache is None or num_found >= len(names):
            return False
        return self.prefix_cache.is_being_written(names[num_found])

    def hash_blocks(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of all full blocks of a sequence that has no slot; none without a prefix cache."""
        if self.prefix_cache is None:
            return []
        if sequence.hashed_by != (self.block_size, self.era):  # at another executor, which has other blocks, or before
            sequence.block_hashes, sequence.hashed_by = [], (self.block_size, self.era)
        if self.encoder is None:  # spares a call
            self.hasher.extend(sequence.block_hashes, sequence.token_ids, sequence.group.block_salt)
        else:
            self.extend_names(sequence.block_hashes, sequence.token_ids, sequence.group)
        return sequence.block_hashes

    def extend_names(self, hashes: list[bytes], token_ids: Int32Array, group: SequenceGroup) -> None:
        """Append the hashes of the full blocks of a sequence of a group; behind the input of the encoder, if any."""
        before = None
        if group.encoder_token_ids is not None and not hashes:
            before = names_of_input(group, self.hasher, self.era, group.block_salt)[-1]
        self.hasher.extend(hashes, token_ids, group.block_salt, before)

    def name_by(self, hasher: BlockHasher, era: int) -> None:
        """Name blocks by another hasher from now on; names that the executor has not been told it never is."""
        self.hasher, self.era = hasher, era
        for group in self.pools:
            if group.prefix_cache is not None:
                group.prefix_cache.drop_unsent_names()
        if self.encoder is not None:
            self.encoder.name_anew()

    def forget_names(self) -> None:
        """Let no block of the device or of the host be found that has a name now, by whatever key."""
        for pool in self.pools:
            pool.allocator.forget_names()
            pool.host.allocator.forget_names()

    def name_anew(self, sequence: Sequence, token_ids: Int32Array, tables: Seq[Int32Array]) -> None:
        """Take the names of a running sequence's blocks away, and name its tokens by the present hasher and salt.

        Args:
            sequence: The sequence.
            token_ids: Its tokens that are known.
            tables: The blocks that it holds, one array a cache group.
        """
        if self.prefix_cache is None:
            return
        for group, block_ids in zip(self.groups, tables, strict=True):
            assert group.prefix_cache is not None
            held = block_ids.astype(np.intp)
            group.prefix_cache.forget(held[group.prefix_cache.is_registered[held]])
        sequence.block_hashes, sequence.hashed_by = [], (self.block_size, self.era)
        self.extend_names(sequence.block_hashes, token_ids, sequence.group)

    def _plan_sequence(self, sequence: Sequence, num_shared: int, *, with_host: bool = False) -> SequenceBlocks:
        prefix = self._find_prefix(sequence, with_host=with_host)
        num_cached, found_in = prefix.num_cached, prefix.found
        if num_cached >= num_shared:
            num_shared = 0
        else:
            num_cached, found_in = 0, self._nothing_found
        parts = []
        for group, found in zip(self.groups, found_in, strict=True):
            num_skipped = group.first_seen(num_cached)
            num_new = group.num_new(len(sequence.token_ids), num_cached) - num_shared
            parts.append(GroupPart(num_skipped, found, max(0, num_new)))
        state = sequence.block_hashes[num_cached - 1] if self.states is not None and num_cached else b""
        return SequenceBlocks(
            sequence, num_cached, num_shared, parts, prefix.num_in_chain, state, prefix.num_brought if num_cached else 0
        )

    def _find_prefix(self, sequence: Sequence, *, with_host: bool) -> Prefix:
        """Return the longest prefix that a sequence may begin behind."""
        if self.prefix_cache is None:
            return Prefix(0, 0, self._nothing_found)
        hashes = self.hash_blocks(sequence)
        if sequence.group.lacks_prompt_logprobs:
            return Prefix(0, 0, self._nothing_found)
        hashes = hashes[: self._max_hit(sequence)]
        return self.prefixes.find(hashes, self.step_cost) if with_host else self.prefixes.longest(hashes)

    def _max_hit(self, sequence: Sequence) -> int:
        """Return the most blocks that may be found: at least one token is computed, for its logits."""
        return (len(sequence.token_ids) - 1) // self.block_size

    def _num_shared_blocks(self, sequences: Seq[Sequence]) -> int:
        """Return how many first full blocks all sequences have in common.

        0 if a window may drop some, and with states: the sequence that computes a block gets the state behind it.
        """
        if self._has_states or len(sequences) == 1 or len(sequences[0].token_ids) > self._max_resident_tokens:
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

    # Copies on the host --------------------------------------------------------------------------

    @property
    def has_host_prefixes(self) -> bool:
        """Whether prefixes are copied to the host."""
        return self.groups[0].host.names is not None

    def copy_to_host(self, num_tokens: int) -> tuple[list[Copy], list[tuple[int, int]]]:
        """Begin to copy named blocks that nobody uses to the host, as many as a step of `num_tokens` has time for.

        Returns the copies, and the pairs of blocks of a swap-out as on the wire.
        """
        copies, swap_outs = list[Copy](), list[tuple[int, int]]()
        num_bytes = self.step_cost.copied_bytes(num_tokens)
        for pool in self.pools:
            most = MAX_COPIED_BLOCKS if num_bytes is not None else FIRST_COPIED_BLOCKS
            most -= len(copies)
            if num_bytes is not None:  # one at least, or a large one would never be copied
                most = min(most, max(not copies, num_bytes // pool.host.block_bytes))
            more, pairs = pool.host.copy(most)
            copies, swap_outs = copies + more, swap_outs + pairs
            if num_bytes is not None:
                num_bytes = max(0, num_bytes - len(more) * pool.host.block_bytes)
        self.num_copied_blocks += len(copies)
        return copies, swap_outs

    def num_moved_bytes(self, swap_outs: Seq[tuple[int, int]], swap_ins: Seq[tuple[int, int]]) -> int:
        """Return the bytes of some pairs of blocks, as on the wire, that move between device and host."""
        if not (swap_outs or swap_ins):
            return 0
        blocks = [block for block, _ in swap_outs] + [block for _, block in swap_ins]
        if len(self.pools) == 1:
            return len(blocks) * self.pools[0].host.block_bytes
        ends = np.cumsum([pool.allocator.num_blocks for pool in self.pools])
        sizes = np.array([pool.host.block_bytes for pool in self.pools])
        return int(sizes[np.searchsorted(ends, blocks, side="right")].sum())

    # Registration --------------------------------------------------------------------------------

    def adopt(self, block_ids: Int32Array, names: bytes) -> None:
        """Take over cached blocks that the executor has kept: their ids as on the wire, and their names joined.

        No block may have been allocated.
        """
        for group in self.pools:
            own = (block_ids >= group.first_id) & (block_ids < group.first_id + group.allocator.num_blocks)
            if group.prefix_cache is not None and np.count_nonzero(own):
                kept = [names[HASH_BYTES * place : HASH_BYTES * (place + 1)] for place in own.nonzero()[0].tolist()]
                ids = block_ids[own] - np.int32(group.first_id)
                group.allocator.adopt(group.prefix_cache.adopt(ids, b"".join(kept)))

    def take_unsent_names(self, max_names: int, written: Collection[int]) -> tuple[Int32Array, bytes]:
        """Return blocks whose names the executor has not been told, and the names; see `PrefixCache`.

        All block ids are those on the wire.
        """
        if self.prefix_cache is None:
            return no_slots(), b""
        if len(self.pools) == 1:
            return self.prefix_cache.take_unsent_names(max_names, written)
        block_ids, names = no_slots(), b""
        for group in self.pools:
            assert group.prefix_cache is not None
            own = {block_id - group.first_id for block_id in written}
            more_ids, more_names = group.prefix_cache.take_unsent_names(max_names - len(block_ids), own)
            block_ids, names = np.concatenate((block_ids, more_ids + np.int32(group.first_id))), names + more_names
        return block_ids, names

    def register(self, sequence: Sequence, token_ids: Int32Array, tables: Seq[Int32Array], first: int) -> int:
        """Name the computed blocks of a running sequence; return how many are registered.

        Args:
            sequence: The sequence.
            token_ids: Its tokens that are known, and computed by acknowledged steps.
            tables: Its block tables, one a cache group.
            first: How many of its blocks were registered before.
        """
        num_full_blocks = len(token_ids) // self.block_size
        if self.prefix_cache is None or num_full_blocks <= first:
            return first
        self.extend_names(sequence.block_hashes, token_ids, sequence.group)
        names = sequence.block_hashes[first:num_full_blocks]
        for group, block_ids in zip(self.groups, tables, strict=True):
            group.allocator.register(names, block_ids[first:num_full_blocks].tolist())
        return num_full_blocks


def _num_unused(group: GroupBlocks, found: list[IndexArray]) -> int:
    distinct = np.unique(np.concatenate(found)) if len(found) > 1 else found[0]
    return len(distinct) - int(np.count_nonzero(group.allocator.ref_counts[distinct])) if len(distinct) else 0
