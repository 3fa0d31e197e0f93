"""Admissions: groups that come back from the host pool, and groups of the waiting queue, enter the batch.

Groups that ran before come first within a tenant: while one is swapped out, or waits for tokens in flight, only
groups of a more urgent level are admitted, and groups of tenants that got less than its own. Else one tenant that
fills the pool would stop all others. While the head of the queue waits for slots and blocks, every group behind it
waits too, or a large request would starve. Three kinds of groups are passed over instead, because their wait is sure
to end: groups with a prefix that a step in flight computes, long prefills while `max_long_prefills` of them run, and
groups with a grammar that is being loaded, or finds no slot while running groups use all. `demand.py` has the rule.

Texts to be pooled need neither slots nor blocks, and so pass groups that wait for these. A step computes a text whole,
and an input of the encoder too: they are units of work. While one is longer than the budget that running groups leave,
one step goes to units alone; the next step has all other groups again, so that no stream waits for more than one such
step.
"""

from collections.abc import Iterable
from contextlib import closing
from itertools import takewhile

from octavo.values.wording import counted
from octavo_shared.step_wire.step import Int32Array, PoolingTask
from scheduler_svc.core.blocks.admission_plan import AdmissionPlan
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.blocks.encoder_blocks import EncoderPlan, Encoding
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Requirements, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.admitted_groups import AdmissionQueue, AdmittedGroups
from scheduler_svc.core.step.demand import Demand, Obstacle, Wait, fit, obstacle_of_batch
from scheduler_svc.core.step.running_groups import RunningGroups
from scheduler_svc.core.step.slotted_things import AdapterSlots
from scheduler_svc.core.step.step_plan import StepPlan
from scheduler_svc.core.step.step_size import pooled_bytes, pooling_bytes
from scheduler_svc.core.step.swapping import SwappedGroups
from scheduler_svc.request.life import EventKind
from scheduler_svc.request.provenance import UNKNOWN, Numerics

# Most groups that a step passes over: each costs a prefix lookup, in every step.
MAX_PASSED_GROUPS = 64

_ANSWERS = {PoolingTask.EMBED: "vectors", PoolingTask.SCORE: "scores"}


class Admissions:
    """Admits groups to the batch of one executor.

    Attributes:
        unit_needs_step: Whether a text, or an input of the encoder, waits that is longer than the budget that running
            groups leave.
    """

    def __init__(
        self,
        limits: CoreLimits,
        queue: AdmissionQueue,
        running: RunningGroups,
        swapped: SwappedGroups,
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
        self._groups = groups
        self.numerics = numerics
        self._things = running.batch.things
        self.unit_needs_step = False

    # From the host pool --------------------------------------------------------------------------

    def swap_in(self, plan: StepPlan) -> None:
        """Bring swapped groups back while slots, blocks and budget last: in the order of the queue, by fair shares."""
        for group in sorted(self._swapped, key=self._groups.turn_of):
            if group.has_inflight_rows or not plan.token_budget:
                return
            if self._things.waits_for_load(group):
                self._things.load_ahead(plan, group)
                continue
            if isinstance(self._things.failed_pool(group), AdapterSlots):  # admission ends it
                self._groups.recompute_swapped(plan, group)
                continue
            demand = self.demand_to_swap_in(group)
            if not self._batch.num_rows and demand.obstacle_of_blocks is not None:
                self._groups.recompute_swapped(plan, group)
                return
            if not self._can_ever_be_sent(group):  # it has outgrown a message; admission ends it
                self._groups.recompute_swapped(plan, group)
                continue
            encoder = self._blocks.plan_encoder(group)
            if self.obstacle_to_swap_in(demand) is not None or not self._fits_step(plan, group, encoder):
                return
            if not self._swapped.can_states_return(group):
                return
            self._swap_in_group(plan, group, encoder)

    def demand_to_swap_in(self, group: SequenceGroup) -> Demand:
        """Return what the swap-in of a group takes. While any group runs, the watermark is not free for it."""
        num_free_blocks = [
            max(0, of.allocator.num_free_blocks - (of.num_watermark_blocks if self._batch.num_rows else 0))
            for of in self._blocks.wanted
        ]
        num_needed = self._swapped.num_blocks_to_swap_in(group)
        if (encoder := self._blocks.plan_encoder(group)) is not None:
            num_needed.append(encoder.num_needed)
        return Demand(group.requires, self._blocks.scarcest(num_needed, num_free_blocks))

    def obstacle_to_swap_in(self, demand: Demand) -> Obstacle | None:
        """Return why a swapped group cannot come back; None: only budget and message may keep it out."""
        requires = demand.requires
        obstacle = demand.obstacle_of_blocks or obstacle_of_batch(requires, self._batch.num_free_slots)
        obstacle = obstacle or self._things.obstacle_of_slots(requires)
        return obstacle or (self._things.obstacle_of_loads(requires) if self._things.waits_for_load(requires) else None)

    def _swap_in_group(self, plan: StepPlan, group: SequenceGroup, encoder: EncoderPlan | None) -> None:
        sequences = self._swapped.swap_in(plan, group)
        encoder_inputs, encoding = self._blocks.allocate_encoder(encoder, len(sequences))
        if encoding is not None:
            self._encode(plan, group, encoding)
        plan.note(group, EventKind.SWAPPED_IN, sequences[0].num_computed_tokens)
        self._batch.add(group)
        for back, encoder_input in zip(sequences, encoder_inputs, strict=True):
            self._blocks.hash_blocks(back.sequence)
            self._prefills.start(
                plan,
                back.sequence,
                back.tables,
                back.num_computed_tokens,
                back.num_skipped_blocks,
                state_block=back.state_block,
                encoder_input=encoder_input,
            )

    # From the queue ------------------------------------------------------------------------------

    def admit(self, plan: StepPlan) -> None:
        """Admit waiting groups, in order, while slots, budget, blocks and the message last."""
        with closing(self._queue.in_order()) as groups:
            self._admit_all(plan, groups)

    def admit_solo(self, plan: StepPlan) -> None:
        """Admit the group that waits for a step of its own to this step."""
        with closing(self._queue.solo()) as groups:
            self._admit_all(plan, groups)

    def admit_units(self, plan: StepPlan) -> None:
        """Give the step to units of work, since one needs it: swapped groups first; the next step is for all."""
        self.unit_needs_step = False
        if not plan.is_closed:
            if self._blocks.encoder is not None and not plan.preempted:
                self.swap_in(plan)
            with closing(self._queue.in_order()) as groups:
                self._admit_all(plan, takewhile(lambda group: group.has_unit, groups))

    def _admit_all(self, plan: StepPlan, groups: Iterable[SequenceGroup]) -> None:
        num_passed = 0
        for group in groups:
            if num_passed == MAX_PASSED_GROUPS or not (plan.token_budget or group.pooling is not None):
                return
            verdict = self.judge(group)
            if isinstance(verdict, Demand):
                encoder = None if verdict.plan is None else verdict.plan.encoder
                if not self._fits_step(plan, group, encoder):
                    return
                self._queue.remove(group)
                if verdict.plan is None:
                    self._admit_text(plan, group)
                else:
                    self._admit_group(plan, group, verdict.plan)
            elif verdict.wait is Wait.SKIPPED:
                self._things.load_ahead(plan, group)
                num_passed += 1
            elif verdict.wait is Wait.IN_LINE:
                return
            elif (failed := self._things.failed_pool(group)) is not None or (
                group.has_outgrown and not self.must_not_go_on(group)
            ):
                self._queue.remove(group)
                group.end()
                flag = None if failed is None else failed.failed_flag
                plan.fail(group, verdict.reason, flag, lacks_adapter=isinstance(failed, AdapterSlots))

    def _fits_step(self, plan: StepPlan, group: SequenceGroup, encoder: EncoderPlan | None = None) -> bool:
        """Return whether the step's message has room for the group, and its budget for a unit of work."""
        num_tokens = 0 if encoder is None else encoder.num_tokens_to_encode
        if group.pooling is not None:
            num_tokens = group.num_prompt_tokens
        if num_tokens > plan.token_budget:
            self.unit_needs_step = not (plan.pooling_groups or plan.encodings)
            return False
        return self._message_bytes(group) <= plan.num_admissible_bytes

    def _can_ever_be_sent(self, group: SequenceGroup) -> bool:
        """Return whether a message can carry the group; any one sequence fits: see `CoreLimits`."""
        return group.is_lone or self._message_bytes(group) <= self._limits.max_admitted_bytes

    def _message_bytes(self, group: SequenceGroup) -> int:
        """Return an upper bound of the bytes of the group in a step's message; of a text, with its answer."""
        if group.pooling is not None:
            limits = self._limits
            num_values = limits.embedding_size if group.pooling is PoolingTask.EMBED else limits.num_scores
            return pooling_bytes(group.num_prompt_tokens) + pooled_bytes(num_values)
        num_bytes = sum(self._blocks.admission_bytes(sequence) for sequence in group.sequences_to_compute)
        return num_bytes + self._things.load_bytes(group)

    def can_ever_admit(self, group: SequenceGroup) -> bool:
        """Return whether the group may run here, and fits an empty batch with one token more for each sequence."""
        return not self.why_never(group)

    def lacks_blocks_only(self, group: SequenceGroup) -> bool:
        """Return whether a group never fits only because its sequences need more than the whole cache."""
        if group.is_lone:
            return False
        return not self._why_never_but_for_blocks(group) and not self._blocks.can_ever_allocate(group)

    def must_not_go_on(self, group: SequenceGroup) -> bool:
        """Return whether a waiting group needs an executor with another sampler, grammar matcher or other numerics.

        A group with a grammar needs the matcher that it began with. A group that requires the same numerics needs
        those that made its tokens.
        """
        if group.sampling.no_repeat_ngram_size and self._why_never_sampled(group):
            return True
        if not (group.requires_same_numerics or self._things.used_by(group)):
            return False  # as for most groups
        requires = group.requires
        return bool(self._things.why_never(requires)) or requires.numerics not in (None, self.numerics)

    def judge(self, group: SequenceGroup) -> Demand | Obstacle:
        """Return what the group takes if it can be admitted now, or why it cannot."""
        if why := self.why_never(group):
            return Obstacle(Wait.NEVER, why)
        requires, uses_things = group.requires, bool(self._things.used_by(group))
        return fit(
            requires,
            lambda: self.demand_of(group, requires),
            num_free_slots=self._batch.num_free_slots,
            loads=self._things.obstacle_of_loads(requires) if uses_things else None,
            returning=self._obstacle_of_turn(group),
            things=self._things.obstacle_of_slots(requires) if uses_things else None,
        )

    def demand_of(self, group: SequenceGroup, requires: Requirements) -> Demand:
        """Return what a waiting group takes here, whether it can be admitted or not."""
        plan, prefills = self._blocks.plan_admission(group), self._prefills
        lead = plan.sequences[0]
        is_long = prefills.is_long(len(lead.sequence.token_ids) - lead.num_cached * self._blocks.block_size)
        has_too_many_long = is_long and not prefills.has_room_for_long
        is_coming = self._blocks.waits_for_prefix(plan)
        return Demand(requires, plan.scarcest, has_too_many_long, is_coming, plan)

    def _obstacle_of_turn(self, group: SequenceGroup) -> Obstacle | None:
        first_return = self._groups.first_return
        if first_return is None or first_return > (self._batch.order_of(group)[0], self._queue.counter_of(group)):
            return None
        return Obstacle(Wait.IN_LINE, f"preempted requests resume first: {len(self._groups.returning)}")

    def why_never(self, group: SequenceGroup) -> str:
        """Say which rule of `can_ever_admit` the group breaks, with the numbers; empty: none."""
        if group.pooling is not None:
            return self._why_never_pooled(group)
        if why := self._why_never_but_for_blocks(group):
            return why
        if group.is_lone or self._blocks.can_ever_allocate(group):
            return ""  # `CoreLimits`: a sequence that has the pool for itself can grow to its end
        num_needed, num_blocks, cache_group = self._blocks.scarcest_ever(group)
        return (
            f"the request needs {num_needed} blocks{cache_group}, but the whole KV cache has only "
            f"{num_blocks} blocks of {self._limits.block_size} tokens; --kv-cache-gib and --kv-cache-dtype of the "
            "executor set its size"
        )

    def _why_never_but_for_blocks(self, group: SequenceGroup) -> str:
        limits = self._limits
        if not limits.is_generative:
            return f"the model generates nothing; it {self._offered}"
        if self.must_not_go_on(group):
            return (
                self._why_never_sampled(group)
                or self._things.why_never(group.requires)
                or (
                    f"{group.provenance.spans[-1].numerics.described} computed its tokens so far, this one is "
                    f"{self.numerics.described}, and the request requires the same numerics (require_same_numerics)"
                )
            )
        accepted_len = group.stop_conditions.accepted_len
        if accepted_len is not None and accepted_len > limits.max_model_len:
            return (
                f"the request was accepted for {accepted_len} tokens (a prompt of {group.num_prompt_tokens}); this "
                f"executor holds sequences of {limits.max_model_len}"
            )
        is_encoded = group.encoder_token_ids is not None or limits.max_encoder_tokens
        if is_encoded and (why := self._why_never_encoded(group.encoder_token_ids)):
            return why
        longest = max(len(sequence.token_ids) for sequence in group.live_sequences)
        if longest >= limits.max_model_len:
            return f"{longest} tokens plus one output token exceed max_model_len, {limits.max_model_len}"
        if group.is_lone:
            return ""
        if group.num_slots > limits.max_num_seqs:
            return f"the request needs {counted(group.num_slots, 'slot')} of the batch, which has {limits.max_num_seqs}"
        if not self._can_ever_be_sent(group):
            return (
                f"computing its {counted(len(group.sequences_to_compute), 'sequence')} needs a message of up to "
                f"{self._message_bytes(group)} bytes; {limits.max_admitted_bytes} are left of "
                "--max-message-bytes of the scheduler or the executor"
            )
        return ""

    def _why_never_sampled(self, group: SequenceGroup) -> str:
        size = group.sampling.no_repeat_ngram_size
        if not size or self._limits.bans_ngrams:
            return ""
        return (
            f"the request has no_repeat_ngram_size {size}, which this executor's sampler lacks (the capability "
            "NO_REPEAT_NGRAM)"
        )

    def _why_never_encoded(self, token_ids: Int32Array | None) -> str:
        longest = self._limits.max_encoder_tokens
        if token_ids is None:
            return "the model has an encoder, so the request needs an input for it (encoder_prompt)" if longest else ""
        if not longest:
            return "the model has no encoder; give what encoder_prompt says in the prompt"
        if 1 <= len(token_ids) <= longest:
            return ""
        return (
            f"the encoder's input has {counted(len(token_ids), 'token')}; a step encodes it whole, and takes 1 to "
            f"{longest}: the least of the model's max_encoder_tokens, its blocks and --max-num-batched-tokens"
        )

    def _why_never_pooled(self, group: SequenceGroup) -> str:
        limits, num_tokens = self._limits, group.num_prompt_tokens
        assert group.pooling is not None
        if group.pooling not in limits.pooling_tasks:
            return f"the model gives no {_ANSWERS[group.pooling]}; it {self._offered}"
        if num_tokens > limits.max_model_len:
            return f"the text has {num_tokens} tokens; the model takes {limits.max_model_len} (max_model_len)"
        if num_tokens > limits.max_num_batched_tokens:
            return (
                f"the text has {num_tokens} tokens; a step computes it whole, and has {limits.max_num_batched_tokens} "
                "(--max-num-batched-tokens of the scheduler or the executor)"
            )
        if self._message_bytes(group) <= limits.max_admitted_bytes:
            return ""
        return (
            f"the text and its answer take up to {self._message_bytes(group)} bytes; {limits.max_admitted_bytes} are "
            "left of --max-message-bytes of the scheduler or the executor"
        )

    @property
    def _offered(self) -> str:
        """What the model does, in words."""
        answers = " and ".join(_ANSWERS[task] for task in self._limits.pooling_tasks)
        offered = [f"gives {answers}"] if answers else []
        return " and ".join([*offered, "generates"] if self._limits.is_generative else offered)

    def _admit_text(self, plan: StepPlan, group: SequenceGroup) -> None:
        """Compute a whole text in this step."""
        num_tokens = group.num_prompt_tokens
        self._note_admission(plan, group, 0)
        self._batch.add(group)
        group.sequences[0].status = SequenceStatus.RUNNING
        plan.token_budget -= num_tokens
        plan.num_admissible_bytes -= self._message_bytes(group)
        plan.pooling_groups += (group,)
        self._queue.charge(group.tenant, num_tokens)

    def _admit_group(self, plan: StepPlan, group: SequenceGroup, allocation: AdmissionPlan) -> None:
        pending_forks = () if group.is_lone else group.live_sequences[len(allocation.sequences) :]
        lead_blocks, size = allocation.sequences[0], self._blocks.block_size
        self._note_admission(
            plan, group, lead_blocks.num_cached * size, lead_blocks.num_brought * size, allocation.encoder
        )
        for pool, _ in self._things.used_by(group):
            pool.bind(group)
        if group.beam_search is not None:
            self._beam_batch.start(group)
        self._batch.add(group)
        taken = self._blocks.allocate(allocation)
        plan.held_states += taken.held
        plan.blocks_to_swap_in += taken.swap_ins
        if taken.encoding is not None:
            self._encode(plan, group, taken.encoding)
        lead, places = None, list[int]()
        for blocks, of_sequence, state_block, encoder_input in zip(
            allocation.sequences, taken.tables, taken.state_blocks, taken.encoder_inputs, strict=True
        ):
            num_computed_blocks = blocks.num_cached + blocks.num_shared
            if self._blocks.states is not None:
                num_tokens = len(blocks.sequence.token_ids)
                places = self._blocks.states.places(num_tokens, blocks.num_cached, blocks.num_in_chain)
            prefill = self._prefills.start(
                plan,
                blocks.sequence,
                of_sequence,
                num_computed_blocks * self._blocks.block_size,
                [part.num_skipped for part in blocks.parts],
                lead=lead if blocks.num_shared else None,
                pending_forks=pending_forks,
                state_block=state_block,
                encoder_input=encoder_input,
                places=places,
            )
            lead = lead or prefill

    def _encode(self, plan: StepPlan, group: SequenceGroup, encoding: Encoding) -> None:
        """Encode the input of a group in this step."""
        plan.encodings += (encoding,)
        plan.token_budget -= encoding.num_tokens
        self._queue.charge(group.tenant, encoding.num_tokens)

    def _note_admission(
        self,
        plan: StepPlan,
        group: SequenceGroup,
        num_cached_tokens: int,
        num_brought_tokens: int = 0,
        encoder: EncoderPlan | None = None,
    ) -> None:
        """Note that a group is admitted with `num_cached_tokens` in the prefix cache, some of them on the host."""
        if not group.has_run:
            group.has_run = True
            group.first_scheduled_at_s = plan.now_s
            group.num_cached_tokens, group.num_brought_tokens = num_cached_tokens, num_brought_tokens
            group.num_pulled_tokens = min(group.num_arrived_tokens, num_cached_tokens)
            group.has_found_input = encoder is not None and encoder.found is not None
        group.provenance.go_on(self.numerics, group.progress, group.adapter)
        causes = [f"{num_brought_tokens} of them from the host cache"] if num_brought_tokens else []
        if encoder is not None:
            causes.append(f"its encoder's input {'is encoded' if encoder.found is None else 'was found'}")
        cause = "; ".join([*causes, *filter(None, [group.pulled])])
        group.pulled, group.num_arrived_tokens, group.pulls_nothing = "", 0, False
        plan.note(group, EventKind.ADMITTED, num_cached_tokens, cause)
