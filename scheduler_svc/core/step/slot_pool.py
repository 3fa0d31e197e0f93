"""Slots of an executor that hold one thing each, which many sequences use: which is where, and how many use it.

Equal things, those with equal digests, share a slot. One that nobody uses any more stays loaded, so that the next
request with it finds it there. When no slot is empty, the thing that nobody has used for the longest time makes room:
one step drops it and loads the other one. A thing that somebody uses is never dropped.

A slot is EMPTY, then LOADING, then READY. Where the executor tells the end of a load (`tells_loads`), a thing is loaded
in a step before those that admit who uses it: only once it is told are they. Until then the slot is nobody else's,
whoever has left meanwhile. Elsewhere the load ends in its step, and the slot is READY at once.

A sequence counts from the moment it gets a slot of the batch until it vacates it, so what is counted is what is live
once the next step has released its slots; executors drop and load right behind that.

Pure. Read next: `slotted_things.py`, what is special to each kind of thing.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar


class SlotState(enum.Enum):
    """What may be done with what is in a slot: whoever uses a thing waits until it is READY."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"


class HasDigest(Protocol):
    """What a slot may hold."""

    @property
    def digest(self) -> bytes:
        """Stands for the content."""


Key = TypeVar("Key", bound=HasDigest)


class Taken(NamedTuple):
    """The slot of a thing. `is_new`: a step has to load it, and to drop what was there before if `is_dropped`."""

    slot: int
    is_new: bool = False
    is_dropped: bool = False


class SlotPool(Generic[Key]):
    """Owns the slots of one kind of thing of one executor.

    Args:
        num_slots: How many there are; 0: the executor has none of that kind.
        tells_loads: Whether the executor tells the end of each load.

    Attributes:
        keys: What each slot holds; None: it is empty.
        states: How far its load is, for each slot.
        num_followers: Sequences that run and use it, for each slot.
        errors: Why nobody can use what was loaded, for each slot; empty: that is not known.
        num_loads: Things that were loaded so far.
        num_loading: Slots whose load has not ended.
    """

    def __init__(self, num_slots: int, *, tells_loads: bool = False) -> None:
        self.tells_loads = tells_loads
        self.keys: list[Key | None] = [None] * num_slots
        self.states = [SlotState.EMPTY] * num_slots
        self.num_followers = [0] * num_slots
        self.errors = [""] * num_slots
        self.num_loads = self.num_loading = 0
        self._slot_of: dict[bytes, int] = {}  # by digest
        # What nobody uses, and what is empty; the next one to be taken comes first.
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))

    @property
    def num_slots(self) -> int:
        """How many there are."""
        return len(self.keys)

    @property
    def num_loaded(self) -> int:
        """Slots that hold something."""
        return len(self._slot_of)

    @property
    def num_in_use(self) -> int:
        """Slots whose thing some running sequence uses, or that are being loaded."""
        return len(self.keys) - len(self._unused)

    def slot_of(self, key: Key) -> int | None:
        """Return the slot that holds a thing; None: none does."""
        return self._slot_of.get(key.digest)

    def state_of(self, key: Key) -> SlotState:
        """Return the state of the slot that holds a thing; EMPTY: none does."""
        slot = self._slot_of.get(key.digest)
        return SlotState.EMPTY if slot is None else self.states[slot]

    def waits_for(self, key: Key) -> bool:
        """Return whether who uses a thing has to wait for the end of its load, which may not have begun."""
        return self.tells_loads and self.state_of(key) is not SlotState.READY

    def error_of(self, key: Key) -> str:
        """Return why a thing that was loaded cannot be used; empty: that is not known."""
        slot = self._slot_of.get(key.digest)
        return "" if slot is None else self.errors[slot]

    def have_room_for(self, keys: Iterable[Key]) -> bool:
        """Return whether these can be used beside those that are in use."""
        slots = {key.digest: self._slot_of.get(key.digest) for key in keys}
        num_wanted = sum(slot is None or slot in self._unused for slot in slots.values())
        return num_wanted <= len(self._unused)

    def take(self, key: Key) -> Taken:
        """Return the slot of a thing that a sequence is about to use; there must be room for it."""
        slot = self._slot_of.get(key.digest)
        if slot is not None:
            return Taken(slot)
        slot = next(iter(self._unused))
        if (former := self.keys[slot]) is not None:
            del self._slot_of[former.digest]
        self.keys[slot], self.errors[slot] = key, ""
        self._slot_of[key.digest] = slot
        self.num_loads += 1
        self.states[slot] = SlotState.READY
        if self.tells_loads:
            self.states[slot] = SlotState.LOADING
            self.num_loading += 1
            del self._unused[slot]
        return Taken(slot, is_new=True, is_dropped=former is not None)

    def end_load(self, slot: int, error: str = "") -> None:
        """The executor tells the end of a load; `error`: why nobody can use it; empty: all can."""
        self.states[slot], self.errors[slot] = SlotState.READY, error
        self.num_loading -= 1
        self._unused[slot] = None

    def follow(self, key: Key) -> None:
        """A sequence that uses a loaded thing got a slot of the batch."""
        slot = self._slot_of[key.digest]
        self._unused.pop(slot, None)
        self.num_followers[slot] += 1

    def leave(self, key: Key) -> None:
        """A sequence that used a thing vacated its slot of the batch."""
        slot = self._slot_of[key.digest]
        self.num_followers[slot] -= 1
        if not self.num_followers[slot]:
            self._unused[slot] = None
