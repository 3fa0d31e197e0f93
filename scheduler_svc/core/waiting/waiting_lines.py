"""The lines in which groups of one level wait: one for each tenant, with groups that ran before in front.

Pure. The docstring of `waiting_queue.py` has the order.
"""

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import MAX_STALE_ENTRIES, VirtualTokenCounter

_BY_ARRIVAL = attrgetter("arrival")

# Counter of the tenant, whether the group is a newcomer, its arrival: the smaller turn comes first.
LineTurn: TypeAlias = tuple[float, bool, int]

# Room in front of a line is given back when it is larger than this and than half of the list.
_MAX_ROOM_IN_FRONT = 1024


class GroupsByArrival:
    """Groups by arrival. Removing the first group, and adding it again, moves no other group."""

    __slots__ = ("_begin", "_groups")

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []
        self._begin = 0  # entries before it are garbage

    def __len__(self) -> int:
        return len(self._groups) - self._begin

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (self._groups[index] for index in range(self._begin, len(self._groups)))

    @property
    def first(self) -> SequenceGroup:
        """The group that arrived first; it must exist."""
        return self._groups[self._begin]

    def add(self, group: SequenceGroup) -> None:
        """Insert a group by its arrival."""
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
        """Return how many groups are before a group that is among them."""
        return bisect.bisect_left(self._groups, group.arrival, lo=self._begin, key=_BY_ARRIVAL) - self._begin

    def first_after(self, last: SequenceGroup | None) -> SequenceGroup | None:
        """Return the first group that arrived after `last`, which need not be among them any more."""
        if not len(self) or last is None or self.first.arrival > last.arrival:
            return self.first if len(self) else None
        index = bisect.bisect_right(self._groups, last.arrival, lo=self._begin, key=_BY_ARRIVAL)
        return self._groups[index] if index < len(self._groups) else None


@dataclass(slots=True)
class Line:
    """The groups of a tenant on one level that stand in line, and the number and tokens of its held groups.

    `returned` groups ran before, and go before the `newcomers`, so that held newcomers do not count against them.
    No group in a closed line has a turn. `serial` is the number of its entry in the heap; -1: it has none.
    """

    counter: VirtualTokenCounter
    returned: GroupsByArrival = field(default_factory=GroupsByArrival)
    newcomers: GroupsByArrival = field(default_factory=GroupsByArrival)
    num_held: int = 0
    num_held_tokens: int = 0
    num_held_returned_tokens: int = 0
    is_closed: bool = False
    serial: int = -1

    def __len__(self) -> int:
        return len(self.returned) + len(self.newcomers)

    def groups(self, *, is_newcomer: bool) -> GroupsByArrival:
        """Return one of the two parts."""
        return self.newcomers if is_newcomer else self.returned

    def hold(self, num_tokens: int, *, is_newcomer: bool, sign: int = 1) -> None:
        """Count a group of `num_tokens` as held; with `sign` -1, as held no more."""
        self.num_held += sign
        self.num_held_tokens += sign * num_tokens
        if not is_newcomer:
            self.num_held_returned_tokens += sign * num_tokens

    def num_tokens_before(self, *, is_newcomer: bool) -> int:
        """Return the tokens of held groups that count in the turn of a group."""
        return self.num_held_tokens if is_newcomer else self.num_held_returned_tokens

    @property
    def turn(self) -> LineTurn:
        """The turn of its first group; it must have one."""
        is_newcomer = not len(self.returned)
        counter = self.counter.value_after(self.num_tokens_before(is_newcomer=is_newcomer))
        return counter, is_newcomer, self.groups(is_newcomer=is_newcomer).first.arrival


@dataclass(slots=True)
class Level:
    """The lines of the tenants on one level.

    A line stays while it has groups, in line or held. `heap` has an entry (turn, serial, tenant) for each line
    with a group that can have a turn, and stale entries. A charge makes the counter greater than its entry says;
    every other change of a turn makes a new entry.
    """

    lines: dict[str, Line] = field(default_factory=dict)
    heap: list[tuple[LineTurn, int, str]] = field(default_factory=list)
    num_in_line: int = 0
    num_entries: int = 0

    def renew_entry(self, tenant: str, line: Line) -> None:
        """Make a new entry for a line whose turn has changed."""
        if not len(line) or line.is_closed:
            line.serial = -1
            return
        if len(self.heap) > 4 * len(self.lines) + MAX_STALE_ENTRIES:
            self.heap = [entry for entry in self.heap if self._is_of_line(entry)]
            heapq.heapify(self.heap)
        self.num_entries += 1
        line.serial = self.num_entries
        heapq.heappush(self.heap, (line.turn, line.serial, tenant))

    def first_turn(self) -> tuple[LineTurn, SequenceGroup]:
        """Return the first turn and its group; a group must stand in line."""
        while True:
            turn, serial, tenant = entry = self.heap[0]
            if not self._is_of_line(entry):
                heapq.heappop(self.heap)
                continue
            line = self.lines[tenant]
            if line.turn == turn:
                return turn, line.groups(is_newcomer=turn[1]).first
            heapq.heapreplace(self.heap, (line.turn, serial, tenant))

    def _is_of_line(self, entry: tuple[LineTurn, int, str]) -> bool:
        line = self.lines.get(entry[2])
        return line is not None and line.serial == entry[1]
