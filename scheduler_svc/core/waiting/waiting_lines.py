"""The lines in which groups of one level wait: those that ran before, and one for the newcomers of each tenant.

Pure. Used by `waiting_queue.py`, whose docstring has the order.
"""

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import MAX_STALE_ENTRIES, VirtualTokenCounter

_BY_ARRIVAL = attrgetter("arrival")

# Room in front of a line is given back when it is so large, and half of the list.
_MAX_ROOM_IN_FRONT = 1024


class GroupsByArrival:
    """Groups by arrival. Taking the first one, and putting it back, moves nobody else."""

    __slots__ = ("_begin", "_groups")

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []
        self._begin = 0  # what is before was taken, and is garbage

    def __len__(self) -> int:
        return len(self._groups) - self._begin

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (self._groups[index] for index in range(self._begin, len(self._groups)))

    @property
    def first(self) -> SequenceGroup:
        """The one that arrived first; there is one."""
        return self._groups[self._begin]

    def add(self, group: SequenceGroup) -> None:
        """Put a group where it belongs by its arrival."""
        if self._begin and (not len(self) or group.arrival < self.first.arrival):
            self._begin -= 1
            self._groups[self._begin] = group
        else:
            bisect.insort(self._groups, group, lo=self._begin, key=_BY_ARRIVAL)

    def remove(self, group: SequenceGroup) -> None:
        """Take out a group that is among them."""
        if group is not self.first:
            del self._groups[self._begin + self.position(group)]
            return
        self._begin += 1
        if self._begin > _MAX_ROOM_IN_FRONT and 2 * self._begin > len(self._groups):
            del self._groups[: self._begin]
            self._begin = 0

    def position(self, group: SequenceGroup) -> int:
        """Return how many are before a group that is among them."""
        return bisect.bisect_left(self._groups, group.arrival, lo=self._begin, key=_BY_ARRIVAL) - self._begin

    def first_after(self, last: SequenceGroup | None) -> SequenceGroup | None:
        """Return the first group that arrived after `last`, which need not be among them any more."""
        if not len(self) or last is None or self.first.arrival > last.arrival:
            return self.first if len(self) else None
        index = bisect.bisect_right(self._groups, last.arrival, lo=self._begin, key=_BY_ARRIVAL)
        return self._groups[index] if index < len(self._groups) else None


@dataclass(slots=True)
class Line:
    """The newcomers of a tenant on one level: those that stand in line, and the number and tokens of those held.

    `serial` is that of its entry in the heap; -1: it has none.
    """

    counter: VirtualTokenCounter
    groups: GroupsByArrival = field(default_factory=GroupsByArrival)
    num_held: int = 0
    num_held_tokens: int = 0
    serial: int = -1

    @property
    def turn(self) -> tuple[float, int]:
        """The counter with which the first group has its turn, and its arrival."""
        return self.counter.value_after(self.num_held_tokens), self.groups.first.arrival


@dataclass(slots=True)
class Level:
    """The groups of one level: those that have run before, and the lines of the newcomers.

    A line stays while it holds somebody. `heap` has an entry (counter, arrival, serial, tenant) for each line
    in which somebody stands, and stale ones. A counter that was charged is greater than its entry says;
    whatever else changes a turn makes a new entry.
    """

    returned: GroupsByArrival = field(default_factory=GroupsByArrival)
    lines: dict[str, Line] = field(default_factory=dict)
    heap: list[tuple[float, int, int, str]] = field(default_factory=list)
    num_in_line: int = 0
    num_held: int = 0
    num_entries: int = 0

    def renew_entry(self, tenant: str, line: Line) -> None:
        """The turn of a line has changed."""
        if not len(line.groups):
            line.serial = -1
            return
        if len(self.heap) > 4 * len(self.lines) + MAX_STALE_ENTRIES:
            self.heap = [entry for entry in self.heap if self._is_of_line(entry)]
            heapq.heapify(self.heap)
        self.num_entries += 1
        line.serial = self.num_entries
        heapq.heappush(self.heap, (*line.turn, line.serial, tenant))

    def first_newcomer(self) -> tuple[float, SequenceGroup]:
        """Return the newcomer whose turn it is, and the counter that says so; somebody stands in line."""
        while True:
            counter, arrival, serial, tenant = entry = self.heap[0]
            if not self._is_of_line(entry):
                heapq.heappop(self.heap)
                continue
            line = self.lines[tenant]
            if line.turn == (counter, arrival):
                return counter, line.groups.first
            heapq.heapreplace(self.heap, (*line.turn, serial, tenant))

    def _is_of_line(self, entry: tuple[float, int, int, str]) -> bool:
        line = self.lines.get(entry[3])
        return line is not None and line.serial == entry[2]
