"""A step while it is being decided, the decision with what it does to groups, and a step in flight."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import (
    AdapterLoad,
    Admission,
    Fork,
    GrammarLoad,
    Int32Array,
    PoolingInput,
    RowFlag,
    Step,
    TableDelta,
    no_pairs,
    no_slots,
    no_triples,
    pairs,
)
from scheduler_svc.core.blocks.encoder_blocks import Encoding
from scheduler_svc.core.blocks.host_blocks import Copy
from scheduler_svc.core.blocks.saved_states import Save
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.request.life import EventKind


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """What a decision did to a group. Counts are of its first live sequence.

    Attributes:
        num_tokens: Tokens that were known, prompt and output.
        num_computed_tokens: How many of these needed no computation.
        cause: Why, in words; empty: `kind` says it.
    """

    group: SequenceGroup
    kind: EventKind
    num_tokens: int
    num_computed_tokens: int = 0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """A group that can never go on, and why, in words; with the `flag` of its rows, if they would have one.

    `lacks_adapter`: its adapter could not be loaded.
    """

    group: SequenceGroup
    message: str
    flag: RowFlag | None = None
    lacks_adapter: bool = False


@dataclass(slots=True)
class StepPlan:
    """What `ExecutorPlanner.schedule` has decided so far. `token_budget` is the rest of the budget.

    `now_s` is the time of the decision. `num_admissible_bytes` is the rest of
    `CoreLimits.max_admitted_bytes`. `has_steps_in_flight`: results are still to come. With `preempted` groups
    the step has no admissions. `solo`: the one group that is computed; None: all are. `is_closed`: no other group is
    admitted. `pooling_groups`: the texts that it computes. `encodings`: what its encoder computes. `saves`: the states
    that it saves. `moved_states`: those that it swaps out, by way of their blocks. `held_states`: blocks of states that
    it loads or swaps. `copies`: the named blocks among those that it swaps out. `events` and `failures` are for the
    caller.
    """

    token_budget: int
    now_s: float
    num_admissible_bytes: int
    has_steps_in_flight: bool
    solo: SequenceGroup | None = None
    is_closed: bool = False
    preempted: list[SequenceGroup] = field(default_factory=list)
    events: list[GroupEvent] = field(default_factory=list)
    failures: list[GroupFailure] = field(default_factory=list)
    has_held_back: bool = False
    grammar_drops: tuple[int, ...] = ()
    grammar_loads: list[GrammarLoad] = field(default_factory=list)
    adapter_drops: tuple[int, ...] = ()
    adapter_loads: list[AdapterLoad] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    beam_forks: list[Fork] = field(default_factory=list)
    appended_tokens: list[tuple[int, int]] = field(default_factory=list)
    replaced_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    appended_blocks: Int32Array = field(default_factory=no_pairs)
    appended_blocks_of_chunks: list[tuple[int, int]] = field(default_factory=list)
    prefill_chunks: list[tuple[int, int]] = field(default_factory=list)
    released_slots: Int32Array = field(default_factory=no_slots)
    activated_slots: Int32Array = field(default_factory=no_slots)
    deactivated_slots: Int32Array = field(default_factory=no_slots)
    allowances: Int32Array | None = None
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    saves: tuple[Save, ...] = ()
    moved_states: tuple[Save, ...] = ()
    held_states: tuple[int, ...] = ()
    copies: Seq[Copy] = ()
    num_decodes: int = 0
    pooling_groups: tuple[SequenceGroup, ...] = ()
    encodings: tuple[Encoding, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the step would neither compute, move, load nor release anything."""
        moves = self.blocks_to_swap_out or self.blocks_to_swap_in
        work = self.num_decodes or self.prefill_chunks or self.pooling_groups or self.encodings
        loads = self.grammar_loads or self.adapter_loads
        return not (work or moves or loads or len(self.released_slots))

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, without those of texts."""
        return self.num_decodes + sum(num_tokens for _, num_tokens in self.prefill_chunks)

    def computes(self, group: SequenceGroup) -> bool:
        """Return whether the step may compute a running group."""
        return self.solo is None or self.solo is group

    def note(self, group: SequenceGroup, kind: EventKind, num_computed_tokens: int = 0, cause: str = "") -> None:
        """Note an event of a group, for people."""
        num_tokens = len(group.live_sequences[0].token_ids)
        self.events.append(GroupEvent(group, kind, num_tokens, num_computed_tokens, cause))

    def fail(
        self, group: SequenceGroup, message: str, flag: RowFlag | None = None, *, lacks_adapter: bool = False
    ) -> None:
        """Note that a group has ended because it can never go on; see `GroupFailure`."""
        self.failures.append(GroupFailure(group, message, flag, lacks_adapter))

    def to_step(self, epoch: int, step_id: int, first_state: int = 0) -> Step:
        """Return the decided step; `first_state`: the id of the first saved state on the wire."""
        appended_blocks = self.appended_blocks
        if self.appended_blocks_of_chunks:
            appended_blocks = np.concatenate((appended_blocks, pairs(*self.appended_blocks_of_chunks)))
        delta = TableDelta(
            released_slots=self.released_slots,
            grammar_drops=self.grammar_drops,
            grammar_loads=tuple(self.grammar_loads),
            adapter_drops=self.adapter_drops,
            adapter_loads=tuple(self.adapter_loads),
            admissions=tuple(self.admissions),
            beam_forks=tuple(self.beam_forks),
            replaced_blocks=pairs(*self.replaced_blocks) if self.replaced_blocks else no_triples(),
            appended_blocks=appended_blocks,
            deactivated_slots=self.deactivated_slots,
            activated_slots=self.activated_slots,
            prefill_chunks=_pairs(self.prefill_chunks),
            forks=tuple(self.forks),
        )
        if self.appended_tokens:
            delta.appended_tokens = pairs(*self.appended_tokens)
        if self.allowances is not None:
            delta.allowances = self.allowances
        step = Step(
            epoch=epoch,
            step_id=step_id,
            delta=delta,
            blocks_to_swap_out=_pairs(self.blocks_to_swap_out),
            blocks_to_swap_in=_pairs(self.blocks_to_swap_in),
            blocks_to_copy=_pairs(self.blocks_to_copy),
        )
        if saves := [*self.saves, *self.moved_states]:
            step.states_to_save = pairs(*[(save.slot, save.num_tokens, first_state + save.block) for save in saves])
        if self.pooling_groups:
            step.pooling_inputs = tuple(_text(number, group) for number, group in enumerate(self.pooling_groups))
        return step


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step that was scheduled at `scheduled_at_s` and is not acknowledged.

    `num_vacated` counts the slots that were vacated before it: if none was since, all its rows are current.
    `prompt_groups` are the groups for which it returns log-probabilities of the prompt, by row of the layout, in order.
    `num_chunk_tokens` counts the tokens that it computes beyond one for each row.
    `pooling_groups` are the texts that it computes, in their order. `saves` are the states that it saves, `copies` the
    named blocks that it copies to the host. `encodings` are what its encoder computes. `num_moved_bytes` move between
    device and host.
    """

    step: Step
    layout: StepLayout
    scheduled_at_s: float
    num_vacated: int
    prompt_groups: tuple[tuple[int, SequenceGroup], ...]
    num_chunk_tokens: int
    pooling_groups: tuple[SequenceGroup, ...] = ()
    saves: Seq[Save] = ()
    copies: Seq[Copy] = ()
    encodings: Seq[Encoding] = ()
    num_moved_bytes: int = 0

    @property
    def workload(self) -> StepLayout:
        """The layout, with a row more for each text and each input of the encoder, to estimate the cost of the step."""
        if not (self.pooling_groups or self.encodings):
            return self.layout
        layout, lengths = self.layout, [group.num_prompt_tokens for group in self.pooling_groups]
        lengths += [encoding.num_tokens for encoding in self.encodings]
        return replace(
            layout,
            slots=np.concatenate((layout.slots, np.zeros_like(lengths, np.int32))),
            starts=np.concatenate((layout.starts, np.zeros_like(lengths, np.int32))),
            lengths=np.concatenate((layout.lengths, np.array(lengths, np.int32))),
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What a call of `ExecutorPlanner.schedule` decided.

    The caller ends the requests of `failures`, then sends the step. Groups to be computed again are in the
    queue already.

    Attributes:
        in_flight: The step, which is in flight from now on; None: there is nothing to do.
        failures: Groups that can never go on.
        events: What was done to groups, in order.
    """

    in_flight: StepInFlight | None
    failures: list[GroupFailure]
    events: list[GroupEvent]

    @property
    def step(self) -> Step | None:
        """The step to send."""
        return None if self.in_flight is None else self.in_flight.step


def _pairs(rows: list[tuple[int, int]]) -> Int32Array:
    return pairs(*rows) if rows else no_pairs()


def _text(number: int, group: SequenceGroup) -> PoolingInput:
    assert group.pooling is not None
    return PoolingInput(number, group.prompt_token_ids, group.token_type_ids, group.pooling)
