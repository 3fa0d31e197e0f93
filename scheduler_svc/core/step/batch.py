"""The batch: which groups run, and which slot of the batch table each of their sequences has.

The executor has a copy of the batch table; the other columns here are the planner's own.

Words, here and in the modules around:
    vacated       a slot whose sequence ended, was preempted or was a beam that died; the next step releases it
    in flight     a step that was sent and has no result yet; a token that it will deliver
    pending fork  a sequence that has no slot yet: it forks off the lead of its group at the end of the prompt
    skipped       a block that fell out of the sliding window: freed, its entry in the block table is garbage
    held back     a running sequence that gets no token in a step, because it lacks a block that is sure to come

Counters of the tokens of a slot:
    table.num_tokens            all, with those that sent steps may sample
    table.num_known_tokens      tokens with known values; the others are still to come
    table.num_scheduled_tokens  tokens whose keys and values the cache holds once the sent steps have run
    table.num_open_tokens       tokens in num_tokens and num_scheduled_tokens that may not come: these two are upper
                                lengths, and without open tokens lower lengths; 0 while every allowance is 1
    num_computed_tokens         scheduled tokens that a result acknowledged, or that the prefix cache had

Blocks, limits and the budget go by upper lengths, because every token may come. Windows, names, swaps and ends go by
lower lengths.

`sequence.token_ids` has one owner at a time: the waiting or swapped sequence itself, or, while it runs,
its slot of the table; `Prefills.start` hands the tokens to the slot, `RunningGroups.remove` takes them back.
"""

import bisect
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from copy import copy
from operator import attrgetter

import numpy as np

from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import NO_LOGPROBS, BoolArray, Int32Array, next_generation, no_slots
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.blocks.group_blocks import GroupBlocks
from scheduler_svc.core.blocks.prefix_cache import BlockHasher
from scheduler_svc.core.blocks.saved_states import Save
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.slotted_things import SlottedThings
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.core.stopping import StopChecker
from scheduler_svc.core.waiting.policy import Policy

BY_ORDER = attrgetter("order")


class Batch:
    """The running groups, in order, with their slots and blocks. All columns are [max_num_seqs].

    Attributes:
        running: The groups, in order. Texts to be pooled are among them, without slots and blocks.
        num_computed_tokens: Tokens whose keys and values are computed, as acknowledged.
        num_registered_blocks: Blocks that are in the prefix cache.
        is_decoding: Slots that want a token in every step, until they reach their length limit.
        sequence_in_slot: The sequence that has the slot, or had it last.
        vacated_slots, is_vacated: Slots without a sequence that the next step releases, as a list and as a column.
        shares_last_block: Slots whose last, partial block may be shared, since they were forked.
        wants_logprobs: Slots whose tokens must come with their log-probability.
        speculates: Slots that may get several tokens a step.
        things: The slotted things of the executor.
        in_flight: The steps that were sent and have no result yet.
        num_claimed_slots: Free slots that running groups claim: their sequences will fork into them.
        solo: The running group that joined last among groups that run alone; None: none does.
    """

    def __init__(self, limits: CoreLimits, blocks: BlockManager, policy: Policy) -> None:
        num_slots = limits.max_num_seqs
        more_pools = [(limits.block_size, pool.num_blocks) for pool in limits.more_groups]
        sizes = limits.block_size, limits.num_blocks, limits.num_grammar_slots
        sizes_of_encoder = limits.block_size, limits.num_encoder_blocks, limits.max_encoder_tokens
        encoder_pool = None if blocks.encoder is None else sizes_of_encoder
        self.table = BatchTable(
            num_slots, limits.max_model_len, *sizes, more_pools, limits.num_adapter_slots, encoder_pool
        )
        if blocks.encoder is not None and self.table.encoder is not None:
            blocks.encoder.tables = self.table.encoder
        for group, tables in zip(blocks.groups, self.table.groups, strict=True):
            group.tables = tables
        self.things = SlottedThings(limits)
        self.blocks = blocks
        self.stop_checker = StopChecker(num_slots, limits.max_model_len, limits.eos_token_ids)
        self.in_flight: deque[StepInFlight] = deque()
        self.running: list[SequenceGroup] = []
        self.num_computed_tokens: Int32Array = np.zeros(num_slots, np.int32)
        self.num_registered_blocks = [0] * num_slots
        self.is_decoding: BoolArray = np.zeros(num_slots, np.bool_)
        self.sequence_in_slot = np.full(num_slots, None, np.object_)
        self.shares_last_block: set[int] = set()
        self.wants_logprobs: BoolArray = np.zeros(num_slots, np.bool_)
        self.speculates: BoolArray = np.zeros(num_slots, np.bool_)
        self.free_slots: list[int] = list(range(num_slots - 1, -1, -1))
        self.vacated_slots: list[int] = []
        self.is_vacated: BoolArray = np.zeros(num_slots, np.bool_)
        self.num_vacated = 0
        self._policy = policy
        self._windows = [group for group in blocks.groups if group.window]
        self.num_claimed_slots = 0
        self.solo: SequenceGroup | None = None
        self._num_claimed_by: dict[SequenceGroup, int] = {}  # groups of several sequences only
        self._num_groups_of_tenant: Counter[str] = Counter()
        self._tenant_numbers: dict[str, int] = {}
        self._free_tenant_numbers: list[int] = []
        self._tenant_of_slot: Int32Array = np.zeros(num_slots, np.int32)

    # Groups --------------------------------------------------------------------------------------

    def order_of(self, group: SequenceGroup) -> tuple[int, int]:
        """Return the `SequenceGroup.order` of a group, even if it has not joined yet; the smaller one goes first."""
        return self._policy.level(group), group.arrival

    def add(self, group: SequenceGroup) -> None:
        """Let a group run; its sequences enter slots later."""
        group.order = self.order_of(group)
        bisect.insort(self.running, group, key=BY_ORDER)
        if group.runs_alone:
            self.solo = group
        if not group.is_lone:
            self._num_claimed_by[group] = 0
            self._claim(group, group.num_slots)
        self._num_groups_of_tenant[group.tenant] += 1
        if group.tenant not in self._tenant_numbers:
            free = self._free_tenant_numbers
            self._tenant_numbers[group.tenant] = free.pop() if free else len(self._tenant_numbers)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group whose sequences have vacated their slots."""
        del self.running[self._position(group)]
        if group is self.solo:
            self.solo = None
        self.num_claimed_slots -= self._num_claimed_by.pop(group, 0)
        self._num_groups_of_tenant[group.tenant] -= 1
        if not self._num_groups_of_tenant[group.tenant]:
            del self._num_groups_of_tenant[group.tenant]
            self._free_tenant_numbers.append(self._tenant_numbers.pop(group.tenant))

    def __contains__(self, group: object) -> bool:
        """Return whether a group runs."""
        if not isinstance(group, SequenceGroup):
            return False
        position = self._position(group)
        return position < len(self.running) and self.running[position] is group

    def _position(self, group: SequenceGroup) -> int:
        return bisect.bisect_left(self.running, group.order, key=BY_ORDER)

    @property
    def with_slots(self) -> list[SequenceGroup]:
        """The running groups with slots: all but texts."""
        return [group for group in self.running if group.pooling is None]

    @property
    def num_rows(self) -> int:
        """Running sequences and pending forks: each decodes, or will."""
        return len(self.sequence_in_slot) - self.num_free_slots

    @property
    def num_free_slots(self) -> int:
        """Free slots that no running group claims."""
        return len(self.free_slots) - self.num_claimed_slots

    def give_up_claim(self, group: SequenceGroup) -> None:
        """Lower the claim of a group by one slot: one of its sequences has ended, and the group goes on."""
        self._claim(group, -1)

    def _claim(self, group: SequenceGroup, num_slots: int) -> None:
        """Change the claim of a running group of several sequences by `num_slots`."""
        if group in self._num_claimed_by:
            self._num_claimed_by[group] += num_slots
            self.num_claimed_slots += num_slots

    def num_slots_by_tenant(self, slots: BoolArray) -> dict[str, int]:
        """Return how many of `slots`, [max_num_seqs] bool, each tenant with running groups has."""
        if len(self._tenant_numbers) == 1:
            return {tenant: int(np.count_nonzero(slots)) for tenant in self._tenant_numbers}
        counts = np.bincount(self._tenant_of_slot[slots], minlength=1 + max(self._tenant_numbers.values(), default=0))
        return {tenant: int(counts[number]) for tenant, number in self._tenant_numbers.items()}

    def slots_of(self, group: SequenceGroup) -> BoolArray:
        """Return which slots a running group has, [max_num_seqs] bool."""
        slots = np.zeros_like(self.is_decoding)
        slots[[sequence.slot for sequence in group.live_sequences if sequence.has_slot]] = True
        return slots

    # Sequences -----------------------------------------------------------------------------------

    def enter(self, sequence: Sequence, num_computed_tokens: int, num_skipped_blocks: Seq[int]) -> int:
        """Give a sequence a slot; return the slot.

        The first `num_skipped_blocks` of each cache group are out of the window already.
        """
        slot = self.free_slots.pop()
        sequence.slot, sequence.generation = slot, next_generation(int(self.table.generation[slot]))
        sequence.status = SequenceStatus.RUNNING
        self.sequence_in_slot[slot] = sequence
        group = sequence.group
        self._claim(group, -1)
        self.stop_checker.set_slot(slot, group.num_prompt_tokens, group.stop_conditions)
        self.num_computed_tokens[slot] = num_computed_tokens
        self.num_registered_blocks[slot] = num_computed_tokens // self.blocks.block_size
        for blocks, num_skipped in zip(self.blocks.groups, num_skipped_blocks, strict=True):
            blocks.first_blocks[slot] = num_skipped
        self._tenant_of_slot[slot] = self._tenant_numbers[group.tenant]
        self.speculates[slot] = group.speculate
        if group.sampling.num_logprobs != NO_LOGPROBS and group.beams is None:
            self.wants_logprobs[slot] = True
        for pool, key in self.things.used_by(group):
            pool.follow(key)
        return slot

    def vacate(self, sequence: Sequence) -> None:
        """Take a sequence out of its slot; the caller sees to its blocks. The next step releases the slot."""
        slot, cache, states = sequence.slot, self.blocks.prefix_cache, self.blocks.states
        self._claim(sequence.group, 1)
        if states is not None:
            states.leave(slot, self.name_behind)
        if cache is not None:
            cache.stop_writing(slot)
        for pool, key in self.things.used_by(sequence.group):
            pool.leave(key)
        self.is_decoding[slot] = False
        self.shares_last_block.discard(slot)
        self.wants_logprobs[slot] = False
        self.free_slots.append(slot)
        self.vacated_slots.append(slot)
        self.is_vacated[slot] = True
        self.num_vacated += 1

    def take_vacated_slots(self) -> Int32Array:
        """Return the slots that were vacated since the last call, for a step to release."""
        if not self.vacated_slots:
            return no_slots()
        slots, self.vacated_slots = self.vacated_slots, []
        self.is_vacated[slots] = False
        return np.array([slot for slot in slots if self.table.live[slot]], np.int32)

    def name_behind(self, slot: int, num_tokens: int) -> bytes:
        """Return the name of the last block of the first tokens of a slot; empty: not all of them are known."""
        if num_tokens > self.table.num_known_tokens[slot]:
            return b""
        sequence = self.sequence_in_slot[slot]
        hashes = sequence.block_hashes
        self.blocks.extend_names(hashes, self.table.token_ids[slot, :num_tokens], sequence.group)
        name: bytes = hashes[num_tokens // self.blocks.block_size - 1]
        return name

    def take_saved_state(self, save: Save) -> None:
        """Name a state that a step has saved, and before it the blocks in front of it."""
        states = self.blocks.states
        assert states is not None
        if save.is_rolling and save in states.saves.get(save.slot, ()):
            self.register_blocks(save.slot)
        states.take(save, self.name_behind)

    def rename_blocks(self, hasher: BlockHasher, era: int) -> None:
        """Name blocks by another hasher from now on; those that running groups hold have no name any more."""
        running = list(running_sequences(self.with_slots))
        for sequence in running:
            self.register_blocks(sequence.slot)  # else they would get a name later
        self.blocks.name_by(hasher, era)
        for sequence in running:
            held = [group.held(sequence.slot) for group in self.blocks.groups]
            self.blocks.name_anew(sequence, self.known_tokens(sequence.slot), held)
        for group in self.with_slots:
            for sequence in group.sequences:
                if not sequence.has_slot:  # a beam that forks with the next step
                    sequence.block_hashes = []

    def groups_with_prompt_logprobs(self, layout: StepLayout) -> tuple[tuple[int, SequenceGroup], ...]:
        """Return the rows of the newest step that return log-probabilities of prompts, and their groups."""
        if layout.num_prompt_logprobs is None:
            return ()
        rows = layout.num_prompt_logprobs.nonzero()[0].tolist()
        return tuple((row, self.sequence_in_slot[layout.slots[row]].group) for row in rows)

    def as_waiting(self, group: SequenceGroup) -> SequenceGroup:
        """Return a copy of an admitted group as it would be if it waited: its sequences carry their known tokens."""
        waiting = copy(group)
        waiting.sequences = [copy(sequence) for sequence in group.sequences]
        for sequence in waiting.live_sequences:
            sequence.block_hashes = sequence.block_hashes.copy()
            if sequence.has_slot:
                sequence.token_ids = self.known_tokens(sequence.slot)
            sequence.status = SequenceStatus.WAITING
        waiting.take_tokens_of_beams()
        return waiting

    # What a slot holds ---------------------------------------------------------------------------

    def known_tokens(self, slot: int) -> Int32Array:
        """Return a copy of the known tokens of a slot."""
        return self.table.token_ids[slot, : self.table.num_known_tokens[slot]].copy()

    def num_inflight_rows(self, sequence: Sequence) -> int:
        """Return how many steps in flight are still to deliver tokens of a running sequence."""
        return sum(
            int(
                np.count_nonzero(layout.sample_generations[layout.sample_slots == sequence.slot] == sequence.generation)
            )
            for layout in (sent.layout for sent in self.in_flight)
        )

    def num_surely_scheduled(self) -> Int32Array:
        """Return the tokens whose keys and values the cache is sure to hold once the sent steps have run, by slot."""
        table = self.table
        scheduled = table.num_scheduled_tokens
        return scheduled - table.num_open_tokens if table.has_allowances else scheduled

    def first_blocks_of(self, slot: int) -> list[int]:
        """Return how many blocks of a slot fell out of the window, for each cache group."""
        return [int(group.first_blocks[slot]) for group in self.blocks.groups]

    def share_blocks(self, slot: int, num_references: int = 1) -> None:
        """Add references to the blocks that a slot holds, in each cache group."""
        for group in self.blocks.groups:
            group.allocator.acquire(group.held(slot), num_references)
        if self.blocks.encoder is not None:
            self.blocks.encoder.share(slot, num_references)

    def free_blocks(self, slot: int) -> None:
        """Free the blocks that a slot holds, in each cache group."""
        for group in self.blocks.groups:
            group.allocator.free(group.held(slot))
        if self.blocks.encoder is not None:
            self.blocks.encoder.free(slot)

    def slide_window(self, slot: int, position: int) -> None:
        """Free the blocks of a slot that its next token, at `position`, does not see any more.

        With a prefix cache, only acknowledged blocks: they are registered first, and stay until they are evicted.
        """
        if self._windows and self.blocks.prefix_cache is not None:
            position = min(position, int(self.num_computed_tokens[slot]))
        for group in self._windows:
            self._move_window(group, slot, max(0, position - group.window + 1) // group.block_size)

    def slide_windows(self, slots: BoolArray) -> None:
        """Free the blocks that the next tokens of decoding `slots`, [max_num_seqs] bool, do not see any more."""
        if not self._windows:
            return
        positions = self.num_surely_scheduled()
        if self.blocks.prefix_cache is not None:
            positions = np.minimum(positions, self.num_computed_tokens)
        for group in self._windows:
            firsts = np.maximum(positions - group.window + 1, 0) // group.block_size
            for slot in (slots & (firsts > group.first_blocks)).nonzero()[0].tolist():
                self._move_window(group, slot, int(firsts[slot]))

    def _move_window(self, group: GroupBlocks, slot: int, first: int) -> None:
        if first > group.first_blocks[slot]:
            self.register_blocks(slot)
            group.free_below(slot, first, int(self.table.num_prompt_tokens[slot]) // group.block_size)

    def register_blocks(self, slot: int) -> None:
        """Register the blocks of a slot that are full, computed and acknowledged in the prefix cache."""
        num_tokens = int(min(self.num_computed_tokens[slot], self.table.num_known_tokens[slot]))
        first = self.num_registered_blocks[slot]
        if num_tokens // self.blocks.block_size > first:
            self.num_registered_blocks[slot] = self.blocks.register(
                self.sequence_in_slot[slot],
                self.table.token_ids[slot, :num_tokens],
                [group.block_ids[slot] for group in self.table.groups],
                first,
            )


def running_sequences(groups: list[SequenceGroup]) -> Iterator[Sequence]:
    """Yield the sequences of some groups that have a slot."""
    for group in groups:
        for sequence in group.sequences:
            if sequence.has_slot:
                yield sequence
