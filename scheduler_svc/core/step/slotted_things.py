"""The slotted things of one executor: a pool for each kind, and what is special to a kind.

A kind is a class beside `GrammarSlots`, and an entry in `kinds_of`, `used_by`, `load` and `told`.

Pure. Read next: `slot_pool.py`.
"""

from collections.abc import Iterable
from typing import TypeAlias

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import (
    NO_RESOURCES,
    GrammarLoad,
    GrammarLoaded,
    Int32Array,
    Resources,
    RowFlag,
    StepResult,
)
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Requirements, SequenceGroup
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.core.step.slot_pool import SlotPool, SlotState
from scheduler_svc.core.step.step_plan import StepPlan
from scheduler_svc.core.step.step_size import grammar_bytes

# A user of things. The requirements of a group say the same as the group.
User: TypeAlias = SequenceGroup | Requirements


def kinds_of(user: User) -> tuple[str, ...]:
    """Return the kinds of slots that a group needs."""
    return () if user.grammar is None else (GrammarSlots.kind,)


class GrammarSlots(SlotPool[Grammar]):
    """The grammars that outputs follow; `limits` are the executor's."""

    kind = "grammar slot"
    failed_flag = RowFlag.GRAMMAR_FAILED
    waits = Obstacle(Wait.SKIPPED, "waits for its grammar, which the executor compiles")

    def __init__(self, limits: CoreLimits) -> None:
        super().__init__(limits.num_grammar_slots, tells_loads=limits.tells_loads)
        self._limits = limits
        self.lacks_slot = Obstacle(
            Wait.SKIPPED, f"waits for a {self.kind}: requests that run use all {limits.num_grammar_slots}"
        )

    def in_table(self, table: BatchTable) -> tuple[Int32Array, list[Grammar | None]]:
        """Return the column with the grammar slot of each sequence, and the grammars in the slots."""
        return table.grammar_slot, table.grammars

    def why_never(self, requires: Requirements, grammar: Grammar) -> str:
        """Say why outputs cannot follow a grammar here; empty: they can."""
        limits = self._limits
        if not limits.num_grammar_slots:
            return "the request has a grammar, and this executor follows none (the capability GRAMMARS)"
        if requires.matcher_id not in ("", limits.matcher_id):
            return (
                f"the request's grammar goes with the matcher {requires.matcher_id!r}, this executor has "
                f"{limits.matcher_id!r}; they may allow other tokens"
            )
        if len(grammar.body) > limits.max_grammar_bytes:
            return f"its grammar has {len(grammar.body)} bytes; this executor takes {limits.max_grammar_bytes}"
        return ""

    def bind(self, group: SequenceGroup) -> None:
        """Bind an admitted group to the matcher of this executor."""
        group.matcher_id = self._limits.matcher_id

    def load(self, plan: StepPlan, grammar: Grammar) -> int:
        """Return the slot of a grammar, for which there must be room; the step loads it if it is not there."""
        taken = self.take(grammar)
        if taken.is_dropped:
            plan.grammar_drops += (taken.slot,)
        if taken.is_new:
            plan.grammar_loads.append(GrammarLoad(taken.slot, grammar))
            plan.num_admissible_bytes -= grammar_bytes(grammar)
        return taken.slot

    def load_bytes(self, grammar: Grammar) -> int:
        """Return an upper bound of the bytes in a step's message that load a grammar; 0: it is there."""
        return grammar_bytes(grammar) if self.slot_of(grammar) is None else 0


class SlottedThings:
    """Owns the pools of one executor; `limits` are the executor's."""

    def __init__(self, limits: CoreLimits) -> None:
        self.grammars = GrammarSlots(limits)
        self.pools = (self.grammars,)

    def used_by(self, user: User) -> tuple[tuple[GrammarSlots, Grammar], ...]:
        """Return the things that a group uses, each with its pool."""
        return () if user.grammar is None else ((self.grammars, user.grammar),)

    def load(self, plan: StepPlan, group: SequenceGroup) -> Resources:
        """Return the slots of the things that a group is about to use; the step loads those that are not there."""
        return NO_RESOURCES if group.grammar is None else Resources(self.grammars.load(plan, group.grammar))

    def told(self, result: StepResult) -> tuple[tuple[GrammarSlots, tuple[GrammarLoaded, ...]], ...]:
        """Return the ends of loads that a result tells, by pool."""
        return ((self.grammars, result.grammars_loaded),)

    # The same for each kind ------------------------------------------------------------------------

    def why_never(self, requires: Requirements) -> str:
        """Say why the executor can never serve a group; empty: it can."""
        return next((why for pool, key in self.used_by(requires) if (why := pool.why_never(requires, key))), "")

    def waits_for_load(self, user: User) -> bool:
        """Return whether a group waits for the end of a load."""
        return any(pool.waits_for(key) for pool, key in self.used_by(user))

    def is_loading(self, user: User) -> bool:
        """Return whether a thing that a group uses is being loaded."""
        return any(pool.state_of(key) is SlotState.LOADING for pool, key in self.used_by(user))

    def obstacle_of_loads(self, user: User) -> Obstacle | None:
        """Return why a group's things cannot be used yet, or never; None: they can be."""
        for pool, key in self.used_by(user):
            if error := pool.error_of(key):
                return Obstacle(Wait.NEVER, error)
            if pool.waits_for(key):
                return pool.waits if pool.have_room_for([key]) else pool.lacks_slot
        return None

    def obstacle_of_slots(self, user: User, others: Iterable[User] = ()) -> Obstacle | None:
        """Return why a group's things find no slot beside those in use and those of `others`; None: they do."""
        for pool, key in self.used_by(user):
            coming = [thing for other in others for place, thing in self.used_by(other) if place is pool]
            if not pool.have_room_for([key, *coming]):
                return pool.lacks_slot
        return None

    def failed_flag(self, user: User) -> RowFlag | None:
        """Return the flag that a group's rows would have because a thing could not be loaded; None: none."""
        return next((pool.failed_flag for pool, key in self.used_by(user) if pool.error_of(key)), None)

    def load_bytes(self, user: User) -> int:
        """Return an upper bound of the bytes in a step's message that load a group's things."""
        num_bytes = 0
        for pool, key in self.used_by(user):
            num_bytes += pool.load_bytes(key)
        return num_bytes

    def load_ahead(self, plan: StepPlan, user: User) -> None:
        """Let the step begin the loads that a group waits for, if there are slots and bytes for them."""
        for pool, key in self.used_by(user):
            is_wanted = pool.waits_for(key) and pool.state_of(key) is SlotState.EMPTY and pool.have_room_for([key])
            if is_wanted and pool.load_bytes(key) <= plan.num_admissible_bytes:
                pool.load(plan, key)

    def end_loads(self, result: StepResult) -> None:
        """Note the ends of loads that a result tells."""
        for pool, ends in self.told(result):
            for end in ends:
                pool.end_load(end.slot, end.error)

    @property
    def num_loading(self) -> int:
        """Loads that have not ended."""
        num_loading = 0
        for pool in self.pools:  # a loop, because every step asks and a generator is slower
            num_loading += pool.num_loading
        return num_loading
