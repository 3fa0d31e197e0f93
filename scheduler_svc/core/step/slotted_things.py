"""The slotted things of one executor: a pool for each kind, and what is special to a kind.

A kind is a class beside `GrammarSlots` and `AdapterSlots`, and an entry in `kinds_of`, `used_by`, `load` and `told`.

Pure. Read next: `slot_pool.py`.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, TypeAlias

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import (
    NO_RESOURCES,
    Adapter,
    AdapterLoad,
    AdapterLoaded,
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
from scheduler_svc.core.step.slot_pool import SlotPool, SlotState, Taken
from scheduler_svc.core.step.step_plan import StepPlan
from scheduler_svc.core.step.step_size import adapter_bytes, grammar_bytes

# Long enough for the requests that wait for an adapter to end, or to be tried elsewhere, by one failed load.
RETRY_FAILED_AFTER_S = 10.0

# A user of things. The requirements of a group say the same as the group.
User: TypeAlias = SequenceGroup | Requirements


# A pool and the thing of its kind that is used; the end of a load. Any: which kind goes with which pool is no type.
Use: TypeAlias = tuple["GrammarSlots | AdapterSlots", Any]
Told: TypeAlias = tuple["GrammarSlots | AdapterSlots", tuple[GrammarLoaded, ...] | tuple[AdapterLoaded, ...]]


def kinds_of(user: User) -> tuple[str, ...]:
    """Return the kinds of slots that a group needs."""
    kinds = () if user.grammar is None else (GrammarSlots.kind,)
    return kinds if user.adapter is None else (*kinds, AdapterSlots.kind)


class GrammarSlots(SlotPool[Grammar]):
    """The grammars that outputs follow; `limits` are the executor's."""

    kind = "grammar slot"
    failed_flag: RowFlag | None = RowFlag.GRAMMAR_FAILED
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


class AdapterSlots(SlotPool[Adapter]):
    """The adapters that sequences are computed with; `limits` are the executor's.

    A load that has failed is not tried here again for `RETRY_FAILED_AFTER_S`; after that, by who asks for it.

    Attributes:
        digests: What the executor told of the content in each slot; empty: nothing, as before the end of a load.
        failed_at_s: When the load into a slot failed, by slot; none of these is old enough to be tried again.
    """

    kind = "adapter slot"
    failed_flag: RowFlag | None = None
    waits = Obstacle(Wait.SKIPPED, "waits for its adapter, which the executor loads")

    def __init__(self, limits: CoreLimits) -> None:
        super().__init__(limits.num_adapter_slots, tells_loads=True)
        self.digests = [b""] * limits.num_adapter_slots
        self.failed_at_s: dict[int, float] = {}
        self._forgiven: set[int] = set()  # slots whose load has failed long ago
        self._found: dict[bytes, int] = {}  # slots of adapters that were loaded as any content, by what it was
        self.lacks_slot = Obstacle(
            Wait.SKIPPED, f"waits for an {self.kind}: requests that run use all {limits.num_adapter_slots}"
        )

    def name_of(self, key: Adapter) -> bytes:
        """Return the digest; without one, no two attempts to load an adapter are one."""
        return key.identity

    def slot_of(self, key: Adapter) -> int | None:
        """Return the slot that holds an adapter, or one with the same content; None: none does."""
        found = self._found.get(key.digest) if key.digest else None
        slot = super().slot_of(key) if found is None else found
        return None if slot in self._forgiven else slot

    def take(self, key: Adapter) -> Taken:
        """Return the slot for an adapter; if its load failed there long ago, the same one, which is loaded again."""
        if (slot := super().slot_of(key)) in self._forgiven:
            self._unused.move_to_end(slot, last=False)
        return super().take(key)

    def retry_failed(self, now_s: float) -> None:
        """Let loads that failed long enough ago be tried again."""
        for slot, at_s in list(self.failed_at_s.items()):
            if now_s - at_s >= RETRY_FAILED_AFTER_S:
                del self.failed_at_s[slot]
                self._forgiven.add(slot)

    def in_table(self, table: BatchTable) -> tuple[Int32Array, list[Adapter | None]]:
        """Return the column with the adapter slot of each sequence, and the adapters in the slots."""
        return table.adapter_slot, table.adapters

    def why_never(self, requires: Requirements, adapter: Adapter) -> str:
        """Say why nothing can be computed with an adapter here; empty: it can."""
        if not self.num_slots:
            return "the request has an adapter, and this executor has no slots for adapters (the capability ADAPTERS)"
        return ""

    def bind(self, group: SequenceGroup) -> None:
        """Do nothing: a group may go on at any executor that has its adapter."""

    def load(self, plan: StepPlan, adapter: Adapter) -> int:
        """Return the slot of an adapter, for which there must be room; the step loads it if it is not there."""
        taken = self.take(adapter)
        if taken.is_dropped:
            plan.adapter_drops += (taken.slot,)
        if taken.is_new:
            plan.adapter_loads.append(AdapterLoad(taken.slot, adapter))
            plan.num_admissible_bytes -= adapter_bytes(adapter)
        return taken.slot

    def load_bytes(self, adapter: Adapter) -> int:
        """Return an upper bound of the bytes in a step's message that load an adapter; 0: it is there."""
        return adapter_bytes(adapter) if self.slot_of(adapter) is None else 0

    def forget(self, slot: int, former: Adapter) -> None:
        """Find an adapter no more in its slot, which is for another one."""
        super().forget(slot, former)
        self._forgiven.discard(slot)
        self.failed_at_s.pop(slot, None)
        if self._found.get(self.digests[slot]) == slot:
            del self._found[self.digests[slot]]
        self.digests[slot] = b""

    def note_digest(self, slot: int, digest: bytes) -> None:
        """Note the content of a loaded slot. The first one that was loaded as any content serves those with its digest.

        A later one serves none of them: those that run are counted at the first.
        """
        adapter, other = self.keys[slot], self._slot_of.get(digest)
        assert adapter is not None, "it was loaded"
        self.digests[slot] = digest
        if digest and not adapter.digest and (other is None or self.errors[other]):
            self._found.setdefault(digest, slot)


class SlottedThings:
    """Owns the pools of one executor; `limits` are the executor's."""

    def __init__(self, limits: CoreLimits) -> None:
        self.grammars = GrammarSlots(limits)
        self.adapters = AdapterSlots(limits)
        self.pools = self.grammars, self.adapters

    def used_by(self, user: User) -> Seq[Use]:
        """Return the things that a group uses, each with its pool."""
        if user.grammar is None and user.adapter is None:
            return ()
        uses: list[Use] = [] if user.grammar is None else [(self.grammars, user.grammar)]
        return uses if user.adapter is None else [*uses, (self.adapters, user.adapter)]

    def load(self, plan: StepPlan, group: SequenceGroup) -> Resources:
        """Return the slots of the things that a group is about to use; the step loads those that are not there."""
        if group.grammar is None and group.adapter is None:
            return NO_RESOURCES
        return Resources(
            None if group.grammar is None else self.grammars.load(plan, group.grammar),
            None if group.adapter is None else self.adapters.load(plan, group.adapter),
        )

    def told(self, result: StepResult) -> tuple[Told, ...]:
        """Return the ends of loads that a result tells, by pool."""
        return (self.grammars, result.grammars_loaded), (self.adapters, result.adapters_loaded)

    def end_loads(self, result: StepResult, now_s: float) -> None:
        """Note the ends of loads that a result tells."""
        for pool, ends in self.told(result):
            for end in ends:
                pool.end_load(end.slot, end.error)
        for loaded in result.adapters_loaded:
            self.adapters.note_digest(loaded.slot, loaded.digest)
            if loaded.error:
                self.adapters.failed_at_s[loaded.slot] = now_s

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

    def failed_pool(self, user: User) -> GrammarSlots | AdapterSlots | None:
        """Return the pool of a thing that could not be loaded, which ends its users; None: all can be used."""
        return next((pool for pool, key in self.used_by(user) if pool.error_of(key)), None)

    def load_bytes(self, user: User) -> int:
        """Return an upper bound of the bytes in a step's message that load a group's things."""
        num_bytes = 0
        for pool, key in self.used_by(user):
            num_bytes += pool.load_bytes(key)
        return num_bytes

    def load_ahead(self, plan: StepPlan, user: User) -> None:
        """Let the step begin the loads that a group waits for, if there are slots and bytes for all of them.

        So no two groups that each wait for two things take them from each other.
        """
        if self.obstacle_of_slots(user) is not None or self.load_bytes(user) > plan.num_admissible_bytes:
            return
        for pool, key in self.used_by(user):
            if pool.waits_for(key) and pool.state_of(key) is SlotState.EMPTY:
                pool.load(plan, key)

    @property
    def num_loading(self) -> int:
        """Loads that have not ended."""
        num_loading = 0
        for pool in self.pools:  # a loop, because every step asks and a generator is slower
            num_loading += pool.num_loading
        return num_loading
