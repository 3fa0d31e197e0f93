"""The grammar slots of an executor: which grammar is in which, and how many sequences that run follow it.

Equal grammars share a slot. One that nobody follows any more stays loaded, so that the next request with it finds it
compiled. When no slot is empty, the grammar that nobody has followed for the longest time makes room: one step drops it
and loads the other one. A grammar that somebody follows is never dropped.

Where the executor tells the end of a load (`tells_loads`), a grammar is loaded in a step before those that admit who
follows it: only once it is told are they. Until then the slot is nobody else's, whoever has left meanwhile.

A sequence counts from the moment it gets a slot of the batch until it vacates it, so what is counted is what is live
once the next step has released its slots; executors drop and load right behind that.
"""

from collections import OrderedDict
from collections.abc import Iterable

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import GrammarLoad, GrammarLoaded
from scheduler_svc.core.step.step_plan import StepPlan
from scheduler_svc.core.step.step_size import grammar_bytes


class GrammarSlots:
    """Owns the grammar slots of one executor.

    Args:
        num_slots: How many there are; 0: the executor follows no grammars.
        tells_loads: Whether the executor tells the end of each load.

    Attributes:
        grammars: What each slot holds; None: it is empty.
        num_followers: Sequences that run and follow it, for each slot.
        num_loads: Grammars that were loaded so far.
        is_loading: Whether the end of its load is to be told, for each slot.
        errors: Why nobody can follow its grammar, for each slot; empty: that is not known.
    """

    def __init__(self, num_slots: int, *, tells_loads: bool = False) -> None:
        self.tells_loads = tells_loads
        self.grammars: list[Grammar | None] = [None] * num_slots
        self.num_followers = [0] * num_slots
        self.num_loads = 0
        self.is_loading = [False] * num_slots
        self.errors = [""] * num_slots
        self._slot_of: dict[bytes, int] = {}  # by digest
        # Whose grammar nobody follows, or that are empty; the next one to be taken comes first.
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))

    @property
    def num_slots(self) -> int:
        """How many there are."""
        return len(self.grammars)

    @property
    def num_loaded(self) -> int:
        """Slots that hold a grammar."""
        return len(self._slot_of)

    @property
    def num_in_use(self) -> int:
        """Slots whose grammar some running sequence follows, or that are being loaded."""
        return len(self.grammars) - len(self._unused)

    def slot_of(self, grammar: Grammar) -> int | None:
        """Return the slot that holds a grammar; None: none does."""
        return self._slot_of.get(grammar.digest)

    @property
    def num_loading(self) -> int:
        """Slots whose load has not ended."""
        return sum(self.is_loading)

    def waits_for(self, grammar: Grammar | None) -> bool:
        """Return whether who follows a grammar has to wait for its load, which may not have begun."""
        if grammar is None or not self.tells_loads:
            return False
        slot = self._slot_of.get(grammar.digest)
        return slot is None or self.is_loading[slot]

    def loads(self, grammar: Grammar) -> bool:
        """Return whether a grammar is being loaded."""
        slot = self._slot_of.get(grammar.digest)
        return slot is not None and self.is_loading[slot]

    def error_of(self, grammar: Grammar) -> str:
        """Return why a grammar that was loaded cannot be followed; empty: that is not known."""
        slot = self._slot_of.get(grammar.digest)
        return "" if slot is None else self.errors[slot]

    def end_loads(self, loaded: Iterable[GrammarLoaded]) -> None:
        """The executor tells the ends of loads."""
        for end in loaded:
            self.is_loading[end.slot] = False
            self.errors[end.slot] = end.error
            self._unused[end.slot] = None

    def have_room_for(self, grammars: Iterable[Grammar]) -> bool:
        """Return whether these can be followed beside those that are in use."""
        slots = {grammar.digest: self._slot_of.get(grammar.digest) for grammar in grammars}
        num_wanted = sum(slot is None or slot in self._unused for slot in slots.values())
        return num_wanted <= len(self._unused)

    def load(self, plan: StepPlan, grammar: Grammar) -> int:
        """Return the slot of a grammar that a sequence is about to follow; a step loads it if it is not there.

        There must be room for it.
        """
        slot = self._slot_of.get(grammar.digest)
        if slot is not None:
            return slot
        slot = next(iter(self._unused))
        if (former := self.grammars[slot]) is not None:
            del self._slot_of[former.digest]
            plan.grammar_drops.append(slot)
        self.grammars[slot] = grammar
        self._slot_of[grammar.digest] = slot
        self.num_loads += 1
        self.errors[slot] = ""
        if self.tells_loads:
            self.is_loading[slot] = True
            del self._unused[slot]
        plan.grammar_loads.append(GrammarLoad(slot, grammar))
        plan.num_admissible_bytes -= grammar_bytes(grammar)
        return slot

    def load_bytes(self, grammar: Grammar) -> int:
        """Return a bound of what a step's message takes to load a grammar; 0: it is there."""
        return 0 if grammar.digest in self._slot_of else grammar_bytes(grammar)

    def follow(self, grammar: Grammar) -> None:
        """A sequence that follows a loaded grammar got a slot of the batch."""
        slot = self._slot_of[grammar.digest]
        self._unused.pop(slot, None)
        self.num_followers[slot] += 1

    def leave(self, grammar: Grammar) -> None:
        """A sequence that followed a grammar vacated its slot of the batch."""
        slot = self._slot_of[grammar.digest]
        self.num_followers[slot] -= 1
        if not self.num_followers[slot]:
            self._unused[slot] = None
