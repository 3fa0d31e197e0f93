"""Whether a core takes what it should: a check around one decision, from outside of it.

What waits is judged by plain arithmetic on slots and blocks, so that a core is seen that makes too much of
an obstacle, as well as one that does not look. Used by `tests/property/test_fleet.py`.
"""

import math

import numpy as np

from octavo_shared.step_wire.step import Step
from scheduler_svc.core.limits import CoreLimits, PrefillMode
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.slotted_things import AdapterSlots, kinds_of
from tests.support.fleet import Member, VirtualFleet


class PlacementCheck:
    """Made before a member decides; `check` is told what it decided.

    Args:
        fleet: The fleet.
        member: Who decides.
        now_s: The time of the decision.
    """

    def __init__(self, fleet: VirtualFleet, member: Member, now_s: float) -> None:
        self._fleet = fleet
        self._core = planner = member.planner
        self._now_s = now_s
        self._takers = [other.planner for other in fleet.members if other.planner.takes_groups]
        self._newcomers = [group for group in fleet.queue if not group.has_run]
        self._line = list(fleet.queue.in_order())
        self._fitting = [g for g in fleet.queue if any(fits_when_empty(taker.limits, g) for taker in self._takers)]
        [self._inbox] = [inbox for inbox in fleet.fleet.dispatcher.inboxes if inbox.planner is planner]
        self._dispatched = {assignment.group for assignment in self._inbox.assignments}
        self._num_moves = _num_moves(planner)
        self._needs_step_of_texts = planner.admissions.unit_needs_step
        self._has_solo = planner.solo is not None or planner.queue.has_solo
        self._wanted = planner.batch.is_decoding & ~planner.batch.stop_checker.at_length_limit(planner.table.num_tokens)
        self._num_scheduled_tokens = planner.table.num_scheduled_tokens.copy()

    def check(self, step: Step | None) -> None:
        """Assert that the member failed nobody who fits, and left nobody waiting whom it should have taken."""
        assert not any(group.arrival in self._fleet.failures for group in self._fitting), "a group that fits failed"
        if not self._core.takes_groups:
            assert all(g in self._fleet.queue for g in self._newcomers), "a core that is leaving took a new group"
            return
        if any(other.planner.is_draining and other.planner.groups for other in self._fleet.members):
            return  # room may be kept for a group of that core
        is_settled = self._is_settled(step)
        if is_settled and self._core.limits.prefill_mode is PrefillMode.CHUNKED:
            for group in self._core.swapped.groups[:1]:
                needs_more = _num_unit_tokens(group) > self._num_left_tokens(step)
                assert group.has_inflight_rows or needs_more or not _has_free(self._core, group), (
                    "a swapped group could come back"
                )
        dispatcher = self._fleet.fleet.dispatcher
        dispatched = {assignment.group for inbox in dispatcher.inboxes for assignment in inbox.assignments}
        capped: set[str] = set()
        lacking: set[str] = set()  # kinds of slots
        awaited: set[ExecutorPlanner] = set()  # by a group that waits for room there
        awaited_by_text: set[ExecutorPlanner] = set()
        for group in self._fleet.queue.in_order():
            if group in dispatched or group in dispatcher.transfers.of_group:
                continue  # another core is to admit it in its next step, or when its prefix has come
            if group in self._inbox.refused and self._fleet.queue.shares.has_caps:
                if _num_unit_tokens(group) > self._num_left_tokens(step):
                    return  # it waits for a step with so much left, and whoever is behind it too
                capped.add(group.tenant)  # it was counted in this step, and those behind it have their turn in the next
            if dispatcher.why_capped(group) or group.tenant in capped:
                capped.add(group.tenant)  # it waits for others of its tenant, and whoever is behind it in its line
                continue
            if lacking.intersection(kinds_of(group)):
                if not any(_has_place(taker, group) for taker in self._takers):
                    awaited.update(self._able_when_empty(group))  # it waits for room first
                lacking.update(kinds_of(group))
                continue  # a slot that becomes free is for the one before
            verdicts = {planner: self._verdict(planner, group) for planner in self._takers}
            kept = awaited if group.pooling is None else awaited_by_text
            able = [planner for planner, verdict in verdicts.items() if verdict is None and planner not in kept]
            if able and _num_unit_tokens(group) > self._num_left_tokens(step):
                return  # it waits for a step with so much left, and whoever is behind it too
            if able == [self._core] and self._may_wait_for_its_kind(group):
                continue
            if able:
                # Where others could take it as well it may be theirs: how groups are dispatched is tested apart.
                assert not (is_settled and able == [self._core]), f"{group.request_id} waits, and nothing keeps it"
                if self._core not in able:
                    return  # those ahead may fill the others, and then whoever is behind it waits with it
                continue
            waits = {verdict.wait for verdict in verdicts.values() if verdict is not None}
            obstacles = [verdict.reason for verdict in verdicts.values() if verdict is not None]
            if any(kind in reason for kind in kinds_of(group) for reason in obstacles):
                lacking.update(kinds_of(group))
            if group.adapter is not None:  # it waits for its load, or for a slot: those behind it for the slot
                lacking.add(AdapterSlots.kind)
            if not self._able_when_empty(group):
                continue
            assert not (is_settled and group in dispatcher.unplaceable), f"{group.request_id} is kept out of the line"
            waits_in_line = Wait.SKIPPED not in waits or (Wait.IN_LINE in waits and _is_forked(group))
            if waits_in_line or self._waits_to_load(group):
                awaited.update(self._able_when_empty(group))
                if group.pooling is not None:
                    awaited_by_text.update(self._able_when_empty(group))
                if awaited_by_text.issuperset(self._takers):
                    return

    def _num_left_tokens(self, step: Step | None) -> int:
        """Return what the step left of its budget."""
        budget = self._core.limits.max_num_batched_tokens
        if step is None:
            return budget
        return budget - self._core.in_flight[-1].workload.num_tokens

    def _verdict(self, planner: ExecutorPlanner, group: SequenceGroup) -> Obstacle | None:
        """Return what keeps a group from a core; assert that it is true as far as arithmetic tells."""
        verdict = planner.obstacle(group, self._fleet.fleet.dispatcher.judged_at_s(self._now_s))
        is_slow = planner.in_flight and self._now_s - planner.in_flight[0].scheduled_at_s > planner.limits.stall_after_s
        is_coming = bool(planner.transfers.receiving)
        assert verdict is None or is_slow or is_coming or not _has_room(planner, group), (
            f"{group.request_id} has room, and: {verdict}"
        )
        return verdict

    def _may_wait_for_its_kind(self, group: SequenceGroup) -> bool:
        """Return whether another core has the numerics of its output, and this one has others."""
        preferred = group.provenance.preferred(group.progress)
        alike = [
            planner
            for planner in self._takers
            if planner.numerics == preferred and fits_when_empty(planner.limits, group)
        ]
        return self._core.numerics != preferred and bool(alike)

    def _able_when_empty(self, group: SequenceGroup) -> list[ExecutorPlanner]:
        return [planner for planner in self._takers if planner.admissions.can_ever_admit(group)]

    def _waits_to_load(self, group: SequenceGroup) -> bool:
        """Return whether nobody has begun to load what a group uses: it may wait for room to begin."""
        return bool(kinds_of(group)) and not any(taker.batch.things.is_loading(group) for taker in self._takers)

    def _is_settled(self, step: Step | None) -> bool:
        """Return whether the queue was looked at last, with budget left, so that whoever waits had its chance.

        Not so if somebody lost its place in this step, came back, was held back for lack of blocks, or is computed or
        waits to be computed alone; nor if a group does not fit any more that was dispatched before, or the line has
        another order, as when a text was charged to its tenant: those behind have their turn with the next step.
        """
        planner = self._core
        if self._has_solo or planner.solo is not None or planner.queue.has_solo:
            return False
        if self._needs_step_of_texts and step is not None and step.pooling_inputs:
            return False
        line = list(self._fleet.queue.in_order())
        if [group for group in line if group in self._line] != [group for group in self._line if group in line]:
            return False
        if not self._num_left_tokens(step) or _num_moves(planner) != self._num_moves:
            return False
        if self._inbox.refused & self._dispatched:
            return False
        if planner.limits.prefill_mode is PrefillMode.FIRST:
            if step is None:
                return not planner.groups
            return len(step.delta.prefill_chunks) > 0 or len(step.pooling_inputs) > 0
        if planner.limits.has_window and planner.prefills.running:
            return False  # one of them may lack a block
        rests = planner.batch.is_decoding & (planner.table.num_scheduled_tokens == self._num_scheduled_tokens)
        return not (planner.beam_batch.ready or np.any(self._wanted & rests))


def _is_forked(group: SequenceGroup) -> bool:
    """Return whether the dispatcher does not see that blocks of a group are computed or sent: it names none of them."""
    return not group.is_lone and group.is_forked


def _num_unit_tokens(group: SequenceGroup) -> int:
    """Return the tokens that a step must have left for the group: of a text, or of an input that is found nowhere."""
    if group.pooling is not None:
        return group.num_prompt_tokens
    return 0 if group.encoder_token_ids is None else len(group.encoder_token_ids)


def fits_when_empty(limits: CoreLimits, group: SequenceGroup) -> bool:
    """Return whether an executor that has nothing to do has room for the group, and for one token more of each."""
    return _fits(limits, group, min(pool.num_blocks for pool in limits.groups), limits.max_num_seqs)


def _num_moves(planner: ExecutorPlanner) -> tuple[int, int, int]:
    """Return numbers of which one changes when a group loses its place or gets it back."""
    num_preemptions = sum(planner.preemption.num_preemptions.values())
    return num_preemptions, len(planner.swapped), len(planner.preempted.groups)


def _has_room(planner: ExecutorPlanner, group: SequenceGroup) -> bool:
    """Return whether nothing keeps the group from a core, even if it shares no block with anybody."""
    limits = planner.limits
    if group.pooling is not None:
        return fits_when_empty(limits, group)
    level, _ = planner.batch.order_of(group)
    turn = level, planner.queue.counter_of(group)
    if any(planner.groups.turn_of(other) <= turn for other in [*planner.swapped, *planner.preempted.groups]):
        return False
    if planner.blocks.prefix_cache is not None and planner.in_flight:
        return False  # a step may compute its prefix
    is_long = 0 < limits.long_prefill_threshold < len(group.live_sequences[0].token_ids)
    if is_long and any(prefill.is_long for prefill in planner.prefills.running):
        return False
    return _has_free(planner, group)


def _has_free(planner: ExecutorPlanner, group: SequenceGroup) -> bool:
    """Return whether a core has slots and blocks of each cache group for the group beside those that run."""
    limits = planner.limits
    if group.grammar is not None:
        followed = {group.grammar, *(other.grammar for other in planner.batch.running if other.grammar is not None)}
        if len(followed) > limits.num_grammar_slots:
            return False
    if group.adapter is not None:
        used = {group.adapter, *(other.adapter for other in planner.batch.running if other.adapter is not None)}
        if len(used) > limits.num_adapter_slots or planner.batch.things.waits_for_load(group):
            return False
    return _has_place(planner, group)


def _has_place(planner: ExecutorPlanner, group: SequenceGroup) -> bool:
    """Return whether a core has slots of the batch and blocks for the group beside those that run."""
    limits = planner.limits
    free = []
    for allocator in (of.allocator for of in planner.blocks.groups):
        num_reserved = math.ceil(allocator.num_blocks * limits.watermark) if allocator.num_used_blocks else 0
        free.append(allocator.num_free_blocks - num_reserved)
    encoder = planner.blocks.encoder
    if encoder is not None and encoder.num_blocks_of(group) > encoder.num_free:
        return False  # as if its input were found nowhere
    num_taken_slots = sum(other.num_slots for other in planner.batch.running)
    return _fits(limits, group, min(free), limits.max_num_seqs - num_taken_slots)


def _fits(limits: CoreLimits, group: SequenceGroup, num_free_blocks: int, num_free_slots: int) -> bool:
    if group.pooling is not None:
        longest = min(limits.max_model_len, limits.max_num_batched_tokens)
        return group.pooling in limits.pooling_tasks and group.num_prompt_tokens <= longest
    follows = limits.num_grammar_slots > 0 and group.matcher_id in ("", limits.matcher_id)
    if group.grammar is not None and not follows:
        return False
    if group.adapter is not None and not limits.num_adapter_slots:
        return False
    longest = max(len(sequence.token_ids) for sequence in group.live_sequences)
    num_blocks = group.num_slots * -(-(longest + 1) // limits.block_size)
    return longest < limits.max_model_len and group.num_slots <= num_free_slots and num_blocks <= num_free_blocks
