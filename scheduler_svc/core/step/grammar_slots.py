"""The grammar slots of an executor: which grammar is in which, and how many sequences that run follow it.

Equal grammars share a slot. One that nobody follows any more stays loaded, so that the next request with it finds it
compiled. When no slot is empty, the grammar that nobody has followed for the longest time makes room: one step drops it
and loads the other one. A grammar that somebody follows is never dropped.

A sequence counts from the moment it gets a slot of the batch until it vacates it, so what is counted is what is live
once the next step has released its slots; executors drop and load right behind that.
"""

from collections import OrderedDict
from collections.abc import Iterable

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import GrammarLoad
from scheduler_svc.core.step.step_plan import StepPlan
from scheduler_svc.core.step.step_size import grammar_bytes


class GrammarSlots:
    """Owns the grammar slots of one executor.

    Args:
        num_slots: How many there are; 0: the executor follows no grammars.

    Attributes:
        grammars: What each slot holds; None: it is empty.
        num_followers: Sequences that run and follow it, for each slot.
        num_loads: Grammars that were loaded so far.
    """

    def __init__(self, num_slots: int) -> None:
        self.grammars: list[Grammar | None] = [None] * num_slots
        self.num_followers = [0] * num_slots
        self.num_loads = 0
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
        """Slots whose grammar some running sequence follows."""
        return len(self.grammars) - len(self._unused)

    def slot_of(self, grammar: Grammar) -> int | None:
        """Return the slot that holds a grammar; None: none does."""
        return self._slot_of.get(grammar.digest)

    def have_room_for(self, grammars: Iterable[Grammar]) -> bool:
        """Return whether these can be followed beside those that are in use."""
        slots = {grammar.digest: self._slot_of.get(grammar.digest) for grammar in grammars}
        num_wanted = sum(slot is None or not self.num_followers[slot] for slot in slots.values())
        return num_wanted <= len(self._unused)

    def load(self, plan: StepPlan, grammar: Grammar) -> int:
        """Return the slot of a grammar for a sequence that is about to follow it; a step loads it if it is not there.

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
