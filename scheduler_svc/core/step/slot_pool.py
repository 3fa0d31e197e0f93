"""Slots of an executor that hold one thing each, such as a grammar, and how many sequences use each.

Things with equal digests share a slot. An unused thing stays loaded, so that the next request with it finds it there.
When no slot is empty, the thing that has been unused for longest makes room: one step drops it and loads the new one.
A thing in use is never dropped.

A slot is EMPTY, then LOADING, then READY. Where the executor tells the end of a load (`tells_loads`), sequences that
use a thing are admitted only once its load has ended. Until then the slot is not given to another thing, even if these
sequences have ended meanwhile. Elsewhere the load ends in its step, and the slot is READY at once.

A sequence counts from the moment it gets a slot of the batch until it vacates it. So the counts are those after the
next step has released its slots; executors drop and load right after that.

Pure. Read next: `slotted_things.py`, what is special to each kind of thing.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar


class SlotState(enum.Enum):
    """The state of the thing in a slot: sequences that use it wait until it is READY."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"


class HasDigest(Protocol):
    """A thing that a slot may hold."""

    @property
    def digest(self) -> bytes:
        """Stands for the content."""


Key = TypeVar("Key", bound=HasDigest)


class Taken(NamedTuple):
    """The slot of a thing. `is_new`: a step has to load it, and if `is_dropped` to drop the former thing."""

    slot: int
    is_new: bool = False
    is_dropped: bool = False


class SlotPool(Generic[Key]):
    """Owns the slots of one kind of thing of one executor.

    Args:
        num_slots: How many there are; 0: the executor has none of this kind.
        tells_loads: Whether the executor tells the end of each load.

    Attributes:
        keys: The thing in each slot; None: it is empty.
        states: The state of each slot.
        num_followers: Running sequences that use the thing in each slot.
        errors: Why the thing in each slot cannot be used; empty: no error is known.
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
        # Unused and empty slots; the next one to be taken comes first.
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return len(self.keys)

    @property
    def num_loaded(self) -> int:
        """Slots that hold a thing."""
        return len(self._slot_of)

    @property
    def num_in_use(self) -> int:
        """Slots that running sequences use, or that are being loaded."""
        return len(self.keys) - len(self._unused)

    def slot_of(self, key: Key) -> int | None:
        """Return the slot that holds a thing; None: none does."""
        return self._slot_of.get(self.name_of(key))

    def name_of(self, key: Key) -> bytes:
        """Return what two things have in common that are one."""
        return key.digest

    def state_of(self, key: Key) -> SlotState:
        """Return the state of the slot that holds a thing; EMPTY: none does."""
        slot = self.slot_of(key)
        return SlotState.EMPTY if slot is None else self.states[slot]

    def waits_for(self, key: Key) -> bool:
        """Return whether users of a thing have to wait for the end of its load, which may not have begun."""
        return self.tells_loads and self.state_of(key) is not SlotState.READY

    def error_of(self, key: Key) -> str:
        """Return why a loaded thing cannot be used; empty: no error is known."""
        slot = self.slot_of(key)
        return "" if slot is None else self.errors[slot]

    def have_room_for(self, keys: Iterable[Key]) -> bool:
        """Return whether these things can be used beside those in use."""
        slots = {self.name_of(key): self.slot_of(key) for key in keys}
        num_wanted = sum(slot is None or slot in self._unused for slot in slots.values())
        return num_wanted <= len(self._unused)

    def take(self, key: Key) -> Taken:
        """Return the slot for a thing that a sequence is about to use; there must be room for it."""
        slot = self.slot_of(key)
        if slot is not None:
            return Taken(slot)
        slot = next(iter(self._unused))
        if (former := self.keys[slot]) is not None:
            self.forget(slot, former)
        self.keys[slot], self.errors[slot] = key, ""
        self._slot_of[self.name_of(key)] = slot
        self.num_loads += 1
        self.states[slot] = SlotState.READY
        if self.tells_loads:
            self.states[slot] = SlotState.LOADING
            self.num_loading += 1
            del self._unused[slot]
        return Taken(slot, is_new=True, is_dropped=former is not None)

    def forget(self, slot: int, former: Key) -> None:
        """Find a thing no more in its slot, which is for another one."""
        del self._slot_of[self.name_of(former)]

    def end_load(self, slot: int, error: str = "") -> None:
        """Note the end of a load; `error`: why the thing cannot be used; empty: it can."""
        self.states[slot], self.errors[slot] = SlotState.READY, error
        self.num_loading -= 1
        self._unused[slot] = None

    def follow(self, key: Key) -> None:
        """Count a sequence that uses a loaded thing and got a slot of the batch."""
        slot = self.slot_of(key)
        assert slot is not None, "it is loaded"
        self._unused.pop(slot, None)
        self.num_followers[slot] += 1

    def leave(self, key: Key) -> None:
        """Discount a sequence that used a thing and vacated its slot of the batch."""
        slot = self.slot_of(key)
        assert slot is not None, "it is loaded"
        self.num_followers[slot] -= 1
        if not self.num_followers[slot]:
            self._unused[slot] = None
