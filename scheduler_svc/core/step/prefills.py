"""Running sequences that have more than one token to catch up with: they are computed in chunks.

New prompts, recomputing after a preemption or a lost executor, and the first token after a swap-in are
all the same: a sequence with some tokens computed and the rest not. Once its last chunk is sent, the
sequence decodes. If it is the lead of a group that is not forked yet, the others fork off it in that step
and sample their first token from the same logits.

A sequence may share its first blocks with the lead of its group, which computes them in the same
admission; it gets its first chunk once these blocks are sent.
"""

import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from octavo_shared.step_wire.step import NO_LOGPROBS, Admission, EncoderInput, Fork, Int32Array, no_slots
from scheduler_svc.core.blocks.saved_states import PASSING_BLOCKS, SavedStates
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.beam_batch import BeamBatch
from scheduler_svc.core.step.step_plan import StepPlan


@dataclass(slots=True, eq=False)
class Prefill:
    """A sequence that catches up: tokens from `num_scheduled_tokens` to `num_tokens` are to be sent.

    `tables` are its block tables, one a cache group. Its first `num_shared_tokens` are computed by `lead`, if there is
    one. The `pending_forks` of its group fork off it at the end; it and they attend to `encoder_input` besides. Its
    state is saved behind `places` tokens, ascending, and was last saved, or loaded, behind `num_saved_tokens`.
    """

    sequence: Sequence
    num_tokens: int
    num_scheduled_tokens: int
    tables: list[Int32Array]
    is_long: bool
    num_shared_tokens: int = 0
    lead: "Prefill | None" = None
    pending_forks: Seq[Sequence] = ()
    encoder_input: EncoderInput | None = None
    places: list[int] = field(default_factory=list)
    num_saved_tokens: int = 0

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that are still to be sent."""
        return self.num_tokens - self.num_scheduled_tokens

    @property
    def waits_for_lead(self) -> bool:
        """Whether the shared blocks are not sent yet."""
        return self.lead is not None and self.lead.num_scheduled_tokens < self.num_shared_tokens


class Shares(Protocol):
    """The shares of tenants in what is computed."""

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that are computed for a tenant."""


class Prefills:
    """Owns the prefills of a batch that have tokens left to send, in the order of their groups."""

    def __init__(
        self,
        limits: CoreLimits,
        batch: Batch,
        beam_batch: BeamBatch,
        shares: Shares,
    ) -> None:
        self._limits = limits
        self._has_window, self._none = limits.has_window, [0] * len(limits.groups)
        self._batch = batch
        self._states = batch.blocks.states
        self._beam_batch = beam_batch
        self._shares = shares
        self.running: list[Prefill] = []

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that are still to be sent, over all prefills."""
        return sum(prefill.num_remaining_tokens for prefill in self.running)

    def is_long(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` to compute make a long prefill."""
        return 0 < self._limits.long_prefill_threshold < num_tokens

    @property
    def num_long(self) -> int:
        """Long prefills that run."""
        return sum(prefill.is_long for prefill in self.running)

    @property
    def has_room_for_long(self) -> bool:
        """Whether one more long prefill may run."""
        return self.num_long < self._limits.max_long_prefills

    def is_running(self, group: SequenceGroup) -> bool:
        """Return whether a sequence of the group still catches up."""
        return any(prefill.sequence.group is group for prefill in self.running)

    def is_catching_up(self, sequence: Sequence) -> bool:
        """Return whether a sequence has tokens left to send."""
        return any(prefill.sequence is sequence for prefill in self.running)

    def start(
        self,
        plan: StepPlan,
        sequence: Sequence,
        tables: Seq[Int32Array],
        num_computed_tokens: int,
        num_skipped_blocks: Seq[int],
        *,
        lead: Prefill | None = None,
        pending_forks: Seq[Sequence] = (),
        state_block: int | None = None,
        encoder_input: EncoderInput | None = None,
        places: Seq[int] = (),
    ) -> Prefill:
        """Admit a sequence to a slot, with its blocks, and send as much of it as the step takes.

        Args:
            plan: The step.
            sequence: Has no slot yet, and the hashes of its full blocks if there is a prefix cache.
            tables: Its block tables, one a cache group.
            num_computed_tokens: Tokens whose keys and values are in the blocks, or are computed by `lead`.
            num_skipped_blocks: Leading blocks that are out of the window already, of each cache group.
            lead: The prefill that computes its shared blocks; None: it has none.
            pending_forks: The sequences that fork off it.
            state_block: The saved state that it begins with; None: there is none, or it begins at its first token.
            encoder_input: What it attends to besides; None: nothing.
            places: Behind how many tokens its state is saved, ascending: at ends of full blocks.
        """
        group, token_ids = sequence.group, sequence.token_ids
        plan.num_admissible_bytes -= self._batch.blocks.admission_bytes(sequence)
        resources = self._batch.things.load(plan, group)
        slot = self._batch.enter(sequence, num_computed_tokens, num_skipped_blocks)
        sequence.token_ids = no_slots()
        plan.admissions.append(
            Admission(
                slot,
                sequence.generation,
                token_ids,
                group.num_prompt_tokens,
                num_computed_tokens,
                self._batch.blocks.wire_ids(tables),
                self._beam_batch.sampling_of(group) if group.beams else group.sampling_of(sequence),
                group.block_salt,
                group.token_rules,
                group.num_prompt_logprobs if group.lacks_prompt_logprobs and lead is None else NO_LOGPROBS,
                group.traceparent,
                resources,
                None if state_block is None else self._batch.blocks.first_state + state_block,
                encoder_input,
            )
        )
        prefill = Prefill(
            sequence,
            num_tokens=len(token_ids),
            num_scheduled_tokens=num_computed_tokens,
            tables=[*tables],
            is_long=self.is_long(len(token_ids) - num_computed_tokens),
            num_shared_tokens=num_computed_tokens if lead else 0,
            lead=lead,
            pending_forks=pending_forks,
            encoder_input=encoder_input,
            places=[*places],
            num_saved_tokens=num_computed_tokens,
        )
        if self._states is not None and places:
            size = self._states.block_size
            self._states.expect(slot, [sequence.block_hashes[place // size - 1] for place in places])
        self._send_chunk(plan, prefill)
        if prefill.num_remaining_tokens:
            bisect.insort(self.running, prefill, key=_order_of)
        return prefill

    def continue_all(self, plan: StepPlan) -> None:
        """Send the next chunk of each prefill, as far as the budget goes.

        Prefills that end in this step go first, so that they decode in the next one. No prompt starves by
        that: each prefill that passes it ends, and no group is admitted while it takes the rest of the budget.
        """
        if not self.running:
            return
        for prefill in sorted(self.running, key=lambda prefill: prefill.num_remaining_tokens > plan.token_budget):
            if not plan.token_budget:
                break
            if not plan.computes(prefill.sequence.group):
                continue
            self._batch.slide_window(prefill.sequence.slot, prefill.num_scheduled_tokens)
            self._send_chunk(plan, prefill)
        self.running = [prefill for prefill in self.running if prefill.num_remaining_tokens]

    def drop(self, group: SequenceGroup) -> None:
        """Drop the prefills of a group that leaves the batch."""
        self.running = [prefill for prefill in self.running if prefill.sequence.group is not group]

    def num_without_room(self) -> list[int]:
        """Return for each cache group how many prefills cannot go on because the next token has no block there.

        This happens with a window only. A prefill that waits for a step in flight is not counted: it may free blocks.
        """
        if not self._has_window:
            return self._none
        stuck = self._none.copy()
        size, is_cached = self._batch.blocks.block_size, self._batch.blocks.prefix_cache is not None
        for prefill in self.running:
            slot = prefill.sequence.slot
            self._batch.slide_window(slot, prefill.num_scheduled_tokens)
            if not is_cached or self._batch.num_computed_tokens[slot] >= prefill.num_scheduled_tokens:
                for index, table in enumerate(prefill.tables):
                    stuck[index] += prefill.num_scheduled_tokens == len(table) * size
        return stuck

    def _send_chunk(self, plan: StepPlan, prefill: Prefill) -> None:
        """Give a prefill its next chunk, if it can have one."""
        if prefill.waits_for_lead:
            return
        num_tokens = min(prefill.num_remaining_tokens, plan.token_budget)
        if prefill.is_long:
            num_tokens = min(num_tokens, self._limits.long_prefill_threshold)
        if self._has_window:
            num_tokens = min(num_tokens, self._take_room(plan, prefill, num_tokens))
        if not num_tokens:
            return
        if self._states is not None:
            num_tokens = self._save_state(plan, prefill, num_tokens, self._states)
        slot, start = prefill.sequence.slot, prefill.num_scheduled_tokens
        prefill.num_scheduled_tokens += num_tokens
        plan.token_budget -= num_tokens
        plan.prefill_chunks.append((slot, num_tokens))
        self._shares.charge(prefill.sequence.group.tenant, num_tokens)
        cache, size = self._batch.blocks.prefix_cache, self._batch.blocks.block_size
        if cache is not None:
            first, last = start // size, prefill.num_scheduled_tokens // size
            cache.start_writing(slot, prefill.sequence.block_hashes[first:last])
        if not prefill.num_remaining_tokens:
            self._catch_up(plan, prefill)

    def _save_state(self, plan: StepPlan, prefill: Prefill, num_tokens: int, states: SavedStates) -> int:
        """Save the state of a prefill as it is, if it is one to save.

        Returns:
            How many tokens its next chunk has, of `num_tokens`: it ends where the state is to be saved, and else at the
            end of a block, unless it is the last one.
        """
        sequence, start, size = prefill.sequence, prefill.num_scheduled_tokens, states.block_size
        is_place = prefill.places[:1] == [start]
        is_passed = states.finds_prefixes and start - prefill.num_saved_tokens >= PASSING_BLOCKS * size
        if is_place or (is_passed and start % size == 0):
            name = sequence.block_hashes[start // size - 1]
            if (save := states.save(sequence.slot, start, name, goes_first=not is_place)) is not None:
                plan.saves += (save,)
            prefill.num_saved_tokens, prefill.places = start, prefill.places[is_place:]
        if prefill.places and start + num_tokens >= prefill.places[0]:
            return prefill.places[0] - start
        end = (start + num_tokens) // size * size
        return end - start if num_tokens < prefill.num_remaining_tokens and end > start else num_tokens

    def _take_room(self, plan: StepPlan, prefill: Prefill, num_tokens: int) -> int:
        """Take blocks for the next tokens, as far as every cache group has some; return how many tokens have room.

        Nothing is taken for none: a step that computes nothing is not sent.
        """
        blocks, slot, start = self._batch.blocks, prefill.sequence.slot, prefill.num_scheduled_tokens
        pools = list(zip(blocks.groups, prefill.tables, strict=True))
        num_blocks = min(len(table) + group.allocator.num_free_blocks for group, table in pools)
        num_tokens = min(num_tokens, num_blocks * blocks.block_size - start)
        for index, (group, table) in enumerate(pools):
            taken = group.allocator.allocate(max(0, blocks.num_blocks_for(start + num_tokens) - len(table)))
            plan.appended_blocks_of_chunks.extend((slot, group.first_id + block) for block in taken.tolist())
            prefill.tables[index] = np.concatenate((table, taken))
        return num_tokens

    def _catch_up(self, plan: StepPlan, prefill: Prefill) -> None:
        """Let a sequence whose last chunk is sent decode, and its siblings fork off."""
        sequence, group = prefill.sequence, prefill.sequence.group
        if group.beams is not None:
            self._beam_batch.expect_row(sequence)
            return
        self._batch.is_decoding[sequence.slot] = True
        self._fork(plan, prefill)

    def _fork(self, plan: StepPlan, prefill: Prefill) -> None:
        """Let the pending forks share all blocks of the lead, which is at the end of the prompt.

        No token of the lead is in flight then: a fork would copy an unknown token.
        """
        if not prefill.pending_forks:
            return
        batch, parent_slot = self._batch, prefill.sequence.slot
        for group, table in zip(batch.blocks.groups, prefill.tables, strict=True):
            group.allocator.acquire(table[group.first_blocks[parent_slot] :], len(prefill.pending_forks))
        if batch.blocks.encoder is not None and (given := prefill.encoder_input) is not None:
            own = given.block_ids - np.int32(batch.blocks.encoder.first_id)
            batch.blocks.encoder.allocator.acquire(own, len(prefill.pending_forks))
        for sequence in prefill.pending_forks:
            slot = batch.enter(sequence, prefill.num_tokens, batch.first_blocks_of(parent_slot))
            batch.is_decoding[slot] = True
            sequence.token_ids = no_slots()
            sequence.share_hashes_of(prefill.sequence)
            plan.forks.append(Fork(parent_slot, slot, sequence.generation, sequence.group.sampling_of(sequence)))
            batch.shares_last_block.add(slot)
        batch.shares_last_block.add(parent_slot)


def _order_of(prefill: Prefill) -> tuple[tuple[int, int], int]:
    group = prefill.sequence.group
    return group.order, group.sequences.index(prefill.sequence)
