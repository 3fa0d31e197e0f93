"""Who enters the batch: groups that come back from the host pool, and groups of the waiting queue.

What ran before comes first within a tenant: while a group is swapped out, or waits for tokens in flight, only
groups of a more urgent level are admitted, and those of tenants that got less than its own did. Else one tenant
that fills the pool would stop all others. The head of the queue waits for slots and blocks, and everybody behind
it waits too, or a large request would starve. Three kinds of groups are passed over instead, because
what they wait for is sure to end: those whose prefix a step in flight computes, long prefills while
`max_long_prefills` of them run, and those whose grammar is being loaded, or finds no slot while running groups use all.
Texts to be pooled need neither slots nor blocks, and so pass groups that wait for these.
"""

import enum
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from octavo.values.wording import counted
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import RowFlag
from scheduler_svc.core.blocks.block_manager import AdmissionPlan, AllocStatus, BlockManager
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.admitted_groups import AdmissionQueue, AdmittedGroups
from scheduler_svc.core.step.pooled_groups import PooledGroups, pooled_words
from scheduler_svc.core.step.running_groups import RunningGroups
from scheduler_svc.core.step.step_plan import StepPlan
from scheduler_svc.core.step.swapping import SwappedGroups
from scheduler_svc.request.life import EventKind
from scheduler_svc.request.provenance import UNKNOWN, Numerics

# Groups that a step passes over. A look costs the time of a prefix lookup, and the next step looks again.
MAX_PASSED_GROUPS = 64


class Wait(enum.Enum):
    """How a group waits that is not admitted."""

    IN_LINE = "in_line"
    """With everybody behind it."""
    SKIPPED = "skipped"
    """Others may pass it."""
    NEVER = "never"
    """For ever: it does not fit here."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a group is not admitted now: `reason` in words, for people."""

    wait: Wait
    reason: str


HALF_OPEN = Obstacle(Wait.IN_LINE, "the executor failed recently; it gets one request until a step has finished")


def lack_of_slots(num_needed: int, num_free: int) -> Obstacle:
    """Return the obstacle of a group that needs more slots than are free."""
    return Obstacle(Wait.IN_LINE, f"needs {counted(num_needed, 'slot')} of the batch, {num_free} free")


def lack_of_grammar_slots(num_slots: int) -> Obstacle:
    """Return the obstacle of a group whose grammar has no slot, of so many."""
    return Obstacle(Wait.SKIPPED, f"waits for a grammar slot: requests that run use all {num_slots}")


WAITS_FOR_GRAMMAR = Obstacle(Wait.SKIPPED, "waits for its grammar, which the executor compiles")


@dataclass(frozen=True, slots=True)
class SwapInNeeds:
    """What the swap-in of a swapped group takes, and what is there for it.

    `has_grammar_slot`: whether its grammar has a slot, or needs none. `waits_for_grammar`: whether it is to be loaded.
    """

    num_needed_blocks: int
    num_free_blocks: int
    num_needed_slots: int
    num_free_slots: int
    has_grammar_slot: bool
    waits_for_grammar: bool

    @property
    def has_blocks(self) -> bool:
        """Whether the blocks suffice."""
        return self.num_needed_blocks <= self.num_free_blocks

    @property
    def has_slots(self) -> bool:
        """Whether the slots suffice."""
        return self.num_needed_slots <= self.num_free_slots


class Admissions:
    """Admits groups to one batch.

    Args:
        limits: Slots, budget, watermark.
        queue: Where new groups come from.
        running: Where they are admitted to.
        swapped: The host pool.
        pooled: Those that are pooled.
        groups: Those that come back first, or are computed again.
        numerics: Of the executor.
    """

    def __init__(
        self,
        limits: CoreLimits,
        queue: AdmissionQueue,
        running: RunningGroups,
        swapped: SwappedGroups,
        pooled: PooledGroups,
        groups: AdmittedGroups,
        numerics: Numerics = UNKNOWN,
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._batch = running.batch
        self._blocks: BlockManager = running.batch.blocks
        self._prefills = running.prefills
        self._beam_batch = running.beam_batch
        self._swapped = swapped
        self._pooled = pooled
        self._groups = groups
        self._numerics = numerics

    # From the host pool --------------------------------------------------------------------------

    def swap_in(self, plan: StepPlan) -> None:
        """Bring swapped groups back while slots, blocks and budget last: in the order of the queue, by fair shares."""
        for group in sorted(self._swapped, key=self._groups.turn_of):
            if group.has_inflight_rows or not plan.token_budget:
                return
            if self._batch.grammar_slots.waits_for(group.grammar):
                self._load_ahead(plan, group)
                continue
            needs = self.needs_to_swap_in(group)
            if not self._batch.running and not needs.has_blocks:
                self._groups.recompute_swapped(plan, group)
                return
            if not self._can_ever_be_sent(group):  # it has grown out of a message; the queue ends it
                self._groups.recompute_swapped(plan, group)
                continue
            has_all = needs.has_blocks and needs.has_slots and needs.has_grammar_slot
            if not (has_all and self._fits_message(plan, group)):
                return
            self._swap_in_group(plan, group)

    def needs_to_swap_in(self, group: SequenceGroup) -> SwapInNeeds:
        """Return what the swap-in of a swapped group takes. While anything runs, the watermark is not free for it."""
        reserve = self._blocks.num_watermark_blocks if self._batch.running else 0
        return SwapInNeeds(
            num_needed_blocks=self._swapped.num_blocks_to_swap_in(group),
            num_free_blocks=max(0, self._blocks.allocator.num_free_blocks - reserve),
            num_needed_slots=group.num_slots,
            num_free_slots=self._batch.num_free_slots,
            has_grammar_slot=self._has_grammar_slot(group),
            waits_for_grammar=self._batch.grammar_slots.waits_for(group.grammar),
        )

    def _has_grammar_slot(self, group: SequenceGroup) -> bool:
        return group.grammar is None or self._batch.grammar_slots.have_room_for([group.grammar])

    def _load_ahead(self, plan: StepPlan, group: SequenceGroup) -> None:
        """Have this step begin to load the grammar that a group waits for, if there are a slot and the bytes for it."""
        slots, grammar = self._batch.grammar_slots, group.grammar
        if grammar is None or not slots.waits_for(grammar) or slots.loads(grammar):
            return
        if slots.have_room_for([grammar]) and slots.load_bytes(grammar) <= plan.num_admissible_bytes:
            slots.load(plan, grammar)

    def _swap_in_group(self, plan: StepPlan, group: SequenceGroup) -> None:
        moves, sequences = self._swapped.swap_in(group)
        plan.blocks_to_swap_in.extend(moves)
        plan.note(group, EventKind.SWAPPED_IN, sequences[0].num_computed_tokens)
        self._batch.add(group)
        for back in sequences:
            self._blocks.hash_blocks(back.sequence)
            self._prefills.start(
                plan,
                back.sequence,
                back.block_ids,
                back.num_computed_tokens,
                num_skipped_blocks=back.num_skipped_blocks,
            )

    # From the queue ------------------------------------------------------------------------------

    def admit(self, plan: StepPlan) -> None:
        """Admit waiting groups, in order, while slots, budget, blocks and the message last."""
        with closing(self._queue.in_order()) as groups:
            self._admit_all(plan, groups)

    def admit_solo(self, plan: StepPlan) -> None:
        """Admit the group that waits for a step of its own, which this one is then."""
        with closing(self._queue.solo()) as groups:
            self._admit_all(plan, groups)

    def admit_texts(self, plan: StepPlan) -> None:
        """Admit the waiting texts that stand before everybody else, while budget and message last."""
        with closing(self._queue.in_order()) as groups:
            for group in groups:
                if group.pooling is None or self.judge(group) is not None or not self._admit_text(plan, group):
                    return

    def _admit_text(self, plan: StepPlan, group: SequenceGroup) -> bool:
        """Compute a text in this step, if it fits; return whether it does."""
        if group.num_prompt_tokens > plan.token_budget:
            self._pooled.needs_step = not plan.pooling_groups
            return False
        if self._pooled.message_bytes(group) > plan.num_admissible_bytes:
            return False
        self._queue.remove(group)
        self._note_admission(plan, group, 0)
        group.order = self._batch.order_of(group)
        self._pooled.start(plan, group)
        return True

    def _admit_all(self, plan: StepPlan, groups: Iterable[SequenceGroup]) -> None:
        num_passed = 0
        for group in groups:
            if num_passed == MAX_PASSED_GROUPS or not (plan.token_budget or group.pooling is not None):
                return
            verdict = self.judge(group)
            if verdict is None:
                if not self._admit_text(plan, group):
                    return
            elif isinstance(verdict, AdmissionPlan):
                if not self._fits_message(plan, group):
                    return
                self._queue.remove(group)
                self._admit_group(plan, group, verdict)
            elif verdict.wait is Wait.SKIPPED:
                self._load_ahead(plan, group)
                num_passed += 1
            elif verdict.wait is Wait.IN_LINE:
                return
            elif (flag := self._flag_of_grammar(group)) or (group.has_outgrown and not self.must_not_go_on(group)):
                self._queue.remove(group)
                group.end()
                plan.fail(group, verdict.reason, flag)

    def _fits_message(self, plan: StepPlan, group: SequenceGroup) -> bool:
        """Return whether the message of the step can carry the group as well."""
        return self._message_bytes(group) <= plan.num_admissible_bytes

    def _can_ever_be_sent(self, group: SequenceGroup) -> bool:
        """Return whether a message can carry the group; any one sequence fits: see `CoreLimits`."""
        return group.is_lone or self._message_bytes(group) <= self._limits.max_admitted_bytes

    def _message_bytes(self, group: SequenceGroup) -> int:
        num_bytes = sum(self._blocks.admission_bytes(sequence) for sequence in group.sequences_to_compute)
        return num_bytes if group.grammar is None else num_bytes + self._batch.grammar_slots.load_bytes(group.grammar)

    def can_ever_admit(self, group: SequenceGroup) -> bool:
        """Return whether the group may run here, and fits into an empty batch with one token more for each sequence."""
        if group.pooling is not None:
            return self._pooled.can_ever_admit(group)
        if not self._fits_but_for_blocks(group):
            return False
        # `CoreLimits`: whoever has the pool for itself can grow to its end
        return group.is_lone or self._blocks.can_ever_allocate(group)

    def lacks_blocks_only(self, group: SequenceGroup) -> bool:
        """Return whether the sequences of a group need more than the whole cache, and nothing else keeps it out."""
        if group.pooling is not None or group.is_lone:
            return False
        return self._fits_but_for_blocks(group) and not self._blocks.can_ever_allocate(group)

    def _fits_but_for_blocks(self, group: SequenceGroup) -> bool:
        if not self._limits.is_generative or self.must_not_go_on(group):
            return False
        if (group.stop_conditions.accepted_len or 0) > self._limits.max_model_len:
            return False
        longest = max(len(sequence.token_ids) for sequence in group.live_sequences)
        if longest >= self._limits.max_model_len:
            return False
        return group.is_lone or (group.num_slots <= self._limits.max_num_seqs and self._can_ever_be_sent(group))

    def must_not_go_on(self, group: SequenceGroup) -> bool:
        """Return whether a group that waits needs another kind of executor.

        One that follows its grammar as the one did that it began at; or the kind that made what there is of it, if it
        requires that.
        """
        if group.grammar is not None and self._why_not_followed(group, group.grammar):
            return True
        if not group.requires_same_numerics:
            return False
        return group.provenance.preferred(group.progress) not in (None, self._numerics)

    def _why_not_followed(self, group: SequenceGroup, grammar: Grammar) -> str:
        """Say why outputs cannot follow a grammar here; empty: they can."""
        limits = self._limits
        if not limits.num_grammar_slots:
            return "the request has a grammar, and this executor follows none (the capability GRAMMARS)"
        if group.matcher_id not in ("", limits.matcher_id):
            return (
                f"the request's grammar goes with the matcher {group.matcher_id!r}, this executor has "
                f"{limits.matcher_id!r}; they may allow other tokens"
            )
        if len(grammar.body) > limits.max_grammar_bytes:
            return f"its grammar has {len(grammar.body)} bytes; this executor takes {limits.max_grammar_bytes}"
        return ""

    def _flag_of_grammar(self, group: SequenceGroup) -> RowFlag | None:
        """Return the flag that the rows of a group would have because its grammar could not be loaded; None: none."""
        has_failed = group.grammar is not None and self._batch.grammar_slots.error_of(group.grammar)
        return RowFlag.GRAMMAR_FAILED if has_failed else None

    def _obstacle_of_grammar(self, grammar: Grammar) -> Obstacle | None:
        """Return why a grammar cannot be followed now where the executor tells the ends of loads; None: it can."""
        slots = self._batch.grammar_slots
        if error := slots.error_of(grammar):
            return Obstacle(Wait.NEVER, error)
        if not slots.waits_for(grammar):
            return None
        if not slots.have_room_for([grammar]):
            return lack_of_grammar_slots(slots.num_slots)
        return WAITS_FOR_GRAMMAR

    def judge(self, group: SequenceGroup) -> AdmissionPlan | Obstacle | None:
        """Return the blocks with which the group could be admitted now, or why it cannot be; None: it needs none."""
        if not self.can_ever_admit(group):
            return Obstacle(Wait.NEVER, self.why_never(group))
        if group.pooling is not None:
            return None
        if group.grammar is not None and (obstacle := self._obstacle_of_grammar(group.grammar)):
            return obstacle
        first_return = self._groups.first_return
        if first_return is not None and first_return <= (self._batch.order_of(group)[0], self._queue.counter_of(group)):
            return Obstacle(Wait.IN_LINE, f"preempted requests resume first: {len(self._groups.returning)}")
        if group.num_slots > (num_free_slots := self._batch.num_free_slots):
            return lack_of_slots(group.num_slots, num_free_slots)
        if not self._has_grammar_slot(group):
            return lack_of_grammar_slots(self._limits.num_grammar_slots)
        allocation = self._blocks.plan_admission(group)
        if self._is_long(allocation) and not self._prefills.has_room_for_long:
            return Obstacle(
                Wait.SKIPPED, ("its prompt is long, and --max-long-prefills long prompts are already being computed")
            )
        if self._blocks.waits_for_prefix(allocation):
            return Obstacle(Wait.SKIPPED, "a step in flight is computing the next block of its prefix")
        if allocation.status is AllocStatus.LATER:
            needed = counted(allocation.num_needed, "block")
            return Obstacle(Wait.IN_LINE, f"needs {needed}, {allocation.num_free} free")
        return allocation

    def why_never(self, group: SequenceGroup) -> str:
        """Say which rule of `can_ever_admit` the group breaks, with the numbers."""
        if group.pooling is not None:
            return self._pooled.why_never(group)
        if not self._limits.is_generative:
            return f"the model generates nothing; it gives {pooled_words(self._limits.pooling_tasks)}"
        if group.grammar is not None and (why := self._why_not_followed(group, group.grammar)):
            return why
        if self.must_not_go_on(group):
            return (
                f"{group.provenance.spans[-1].numerics.described} computed its tokens so far, this one is "
                f"{self._numerics.described}, and the request requires the same numerics (require_same_numerics)"
            )
        limits, longest = self._limits, max(len(sequence.token_ids) for sequence in group.live_sequences)
        accepted_len = group.stop_conditions.accepted_len
        if accepted_len is not None and accepted_len > limits.max_model_len:
            return (
                f"the request was accepted for {accepted_len} tokens (a prompt of {group.num_prompt_tokens}); this "
                f"executor holds sequences of {limits.max_model_len}"
            )
        if longest >= limits.max_model_len:
            return f"{longest} tokens plus one output token exceed max_model_len, {limits.max_model_len}"
        if group.num_slots > limits.max_num_seqs:
            return f"the request needs {counted(group.num_slots, 'slot')} of the batch, which has {limits.max_num_seqs}"
        if not self._can_ever_be_sent(group):
            return (
                f"computing its {counted(len(group.sequences_to_compute), 'sequence')} needs a message of up to "
                f"{self._message_bytes(group)} bytes; {limits.max_admitted_bytes} are left of "
                "--max-message-bytes of the scheduler or the executor"
            )
        num_blocks = self._blocks.num_blocks_ever_needed(group)
        return (
            f"the request needs {num_blocks} blocks, but the whole KV cache has only {limits.num_blocks} blocks of "
            f"{limits.block_size} tokens; --kv-cache-gib and --kv-cache-dtype of the executor set its size"
        )

    def _is_long(self, allocation: AdmissionPlan) -> bool:
        lead = allocation.sequences[0]
        return self._prefills.is_long(len(lead.sequence.token_ids) - len(lead.found) * self._blocks.block_size)

    def _admit_group(self, plan: StepPlan, group: SequenceGroup, allocation: AdmissionPlan) -> None:
        pending_forks = () if group.is_lone else group.live_sequences[len(allocation.sequences) :]
        self._note_admission(plan, group, len(allocation.sequences[0].found) * self._blocks.block_size)
        if group.grammar is not None:
            group.matcher_id = self._limits.matcher_id
        if group.beam_search is not None:
            self._beam_batch.start(group)
        self._batch.add(group)
        tables = self._blocks.allocate(allocation)
        lead = None
        for blocks, block_ids in zip(allocation.sequences, tables, strict=True):
            num_computed_blocks = len(blocks.found) + blocks.num_shared
            prefill = self._prefills.start(
                plan,
                blocks.sequence,
                block_ids,
                num_computed_blocks * self._blocks.block_size,
                lead=lead if blocks.num_shared else None,
                pending_forks=pending_forks,
            )
            lead = lead or prefill

    def _note_admission(self, plan: StepPlan, group: SequenceGroup, num_cached_tokens: int) -> None:
        """A group is admitted, with so many tokens in the cache."""
        if not group.has_run:
            group.has_run = True
            group.first_scheduled_at_s = plan.now_s
            group.num_cached_tokens = num_cached_tokens
        group.provenance.go_on(self._numerics, group.progress)
        plan.note(group, EventKind.ADMITTED, num_cached_tokens)
