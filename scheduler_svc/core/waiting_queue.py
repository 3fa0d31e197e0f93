"""The groups that wait to be admitted, and the order in which they will be.

The order: by the level of the policy; on a level, groups that have run before come first, by arrival;
then the newcomers, tenant against tenant by their virtual token counters (`FairShare`), within a tenant
by arrival. Equal counters: by arrival. With one tenant that is plain first come, first served.

The one who admits iterates, takes what fits, and goes on or stops:

    for group in queue.in_order():
        if not fits(group):
            break                                  or continue: see `in_order`
        queue.remove(group)
        queue.charge(group.tenant, num_tokens)     before the next group is asked for

Whether a tenant has groups running is nobody's business here: nothing is called when a group ends,
and a group that comes back is just added.

Pure: not even a clock. Read next: `scheduler.py`.
"""

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from scheduler_svc.core.policy import FairShare, Policy, VirtualTokenCounter
from scheduler_svc.core.sequence import SequenceGroup

_BY_ARRIVAL = attrgetter("arrival")


@dataclass(slots=True)
class _Line:
    """The newcomers of a tenant on one level, by arrival."""

    counter: VirtualTokenCounter
    groups: list[SequenceGroup] = field(default_factory=list)


@dataclass(slots=True)
class _Level:
    """The groups of one level: those that have run before, by arrival, and the lines of the newcomers, none empty."""

    returned: list[SequenceGroup] = field(default_factory=list)
    lines: dict[str, _Line] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.returned) + sum(len(line.groups) for line in self.lines.values())


@dataclass(slots=True)
class _Place:
    """Where a group was put. Kept, because `has_run` may change before the group is removed."""

    group: SequenceGroup
    level: int
    is_returned: bool


class WaitingQueue:
    """The waiting groups of a fleet, or of one scheduler.

    To add or to remove a group costs a binary search and moving the pointers behind it: some
    microseconds among 10,000 groups.

    Args:
        policy: Puts groups on levels.
        tenant_weights: Shares by tenant, finite and above 0; a tenant that is not named has weight 1.

    Raises: InvalidFieldError: a weight is not a finite number above 0.
    """

    def __init__(self, policy: Policy, tenant_weights: Mapping[str, float] | None = None) -> None:
        self._policy = policy
        self._fair_share = FairShare(tenant_weights)
        self._places: dict[int, _Place] = {}  # by arrival
        self._levels: dict[int, _Level] = {}
        self._level_numbers: list[int] = []  # sorted keys of `_levels`
        self._num_waiting_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, group: object) -> bool:
        return (
            isinstance(group, SequenceGroup)
            and (place := self._places.get(group.arrival)) is not None
            and place.group is group
        )

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Yield all groups in the order in which they were added, which is not that of admission."""
        return (place.group for place in self._places.values())

    # Groups come and go --------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Let a group wait: a new one, or with `has_run` set one that was preempted or lost its executor."""
        assert group.arrival not in self._places, f"a group with arrival {group.arrival} waits already"
        number = self._policy.level(group)
        place = self._places[group.arrival] = _Place(group, number, group.has_run)
        self._num_waiting_of[group.tenant] += 1
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level()
            bisect.insort(self._level_numbers, number)
        if place.is_returned:
            bisect.insort(level.returned, group, key=_BY_ARRIVAL)
            return
        line = level.lines.get(group.tenant)
        if line is None:
            line = level.lines[group.tenant] = _Line(self._fair_share.enter(number, group.tenant))
        bisect.insort(line.groups, group, key=_BY_ARRIVAL)

    def remove(self, group: SequenceGroup) -> None:
        """Take a waiting group out, because it is admitted or because nobody wants it any more."""
        assert group in self, f"the group with arrival {group.arrival} does not wait"
        place = self._places.pop(group.arrival)
        self._num_waiting_of[group.tenant] -= 1
        if not self._num_waiting_of[group.tenant]:
            del self._num_waiting_of[group.tenant]
        level = self._levels[place.level]
        groups = level.returned if place.is_returned else level.lines[group.tenant].groups
        del groups[_position(groups, group)]
        if not groups and not place.is_returned:
            del level.lines[group.tenant]
            self._fair_share.leave(place.level, group.tenant)
        if not level.returned and not level.lines:
            del self._levels[place.level]
            self._level_numbers.remove(place.level)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that are computed for a tenant, prompt and output alike.

        Tokens of a tenant that never waited, or left so long ago that it is forgotten, are not counted.
        """
        self._fair_share.charge(tenant, num_tokens)

    # The order of admission ----------------------------------------------------------------------

    def in_order(self) -> Iterator[SequenceGroup]:
        """Yield the groups in the order of admission, lazily; nothing is taken out.

        The next group is chosen when it is asked for, by the counters of that moment. A group that was
        yielded and still waits then is passed over: its tenant's turn is used up, for the rest of the
        walk, as if its prompt had been computed. So a walk that only looks sees the order of one that
        takes every group and charges its prompt.

        The queue may change during a walk: what is removed is not yielded any more, what is added may
        be left out, and no group is yielded twice. A step of a walk costs time in proportion to the
        waiting tenants of the level, however many groups wait.
        """
        index = 0
        while index < len(self._level_numbers):
            number = self._level_numbers[index]
            yield from self._returned_in_order(number)
            yield from self._newcomers_in_order(number)
            index = bisect.bisect_right(self._level_numbers, number)

    def num_ahead_of(self, group: SequenceGroup) -> int:
        """Return how many groups `in_order` yields before this one. O(number of groups)."""
        assert group in self, f"the group with arrival {group.arrival} does not wait"
        place = self._places[group.arrival]
        num_ahead = sum(len(level) for number, level in self._levels.items() if number < place.level)
        level = self._levels[place.level]
        if place.is_returned:
            return num_ahead + _position(level.returned, group)
        own_line = level.lines[group.tenant]
        position = _position(own_line.groups, group)
        num_passed_tokens = sum(earlier.num_prompt_tokens for earlier in own_line.groups[:position])
        own_turn = own_line.counter.value_after(num_passed_tokens), group.arrival
        num_ahead += len(level.returned) + position
        return num_ahead + sum(
            _num_turns_before(own_turn, line) for line in level.lines.values() if line is not own_line
        )

    def num_waiting_of(self, tenant: str) -> int:
        """Return how many groups of a tenant wait."""
        return self._num_waiting_of[tenant]

    def _returned_in_order(self, number: int) -> Iterator[SequenceGroup]:
        last: SequenceGroup | None = None
        while (level := self._levels.get(number)) is not None:
            last = _first_after(level.returned, last)
            if last is None:
                return
            yield last

    def _newcomers_in_order(self, number: int) -> Iterator[SequenceGroup]:
        last_of: dict[str, SequenceGroup] = {}
        num_passed_tokens_of: dict[str, int] = {}
        while (level := self._levels.get(number)) is not None:
            turns = [
                (line.counter.value_after(num_passed_tokens_of.get(tenant, 0)), head.arrival, head)
                for tenant, line in level.lines.items()
                if (head := _first_after(line.groups, last_of.get(tenant))) is not None
            ]
            if not turns:
                return
            *_, first = min(turns)
            yield first
            last_of[first.tenant] = first
            if first in self:
                num_passed_tokens = num_passed_tokens_of.get(first.tenant, 0) + first.num_prompt_tokens
                num_passed_tokens_of[first.tenant] = num_passed_tokens


def _num_turns_before(turn: tuple[float, int], line: _Line) -> int:
    """Return how many groups of a line have their turn before this value of a counter and this arrival."""
    num_passed_tokens = 0
    for position, group in enumerate(line.groups):
        if (line.counter.value_after(num_passed_tokens), group.arrival) > turn:
            return position
        num_passed_tokens += group.num_prompt_tokens
    return len(line.groups)


def _position(groups: list[SequenceGroup], group: SequenceGroup) -> int:
    """Return the index of a group that is among them."""
    return bisect.bisect_left(groups, group.arrival, key=_BY_ARRIVAL)


def _first_after(groups: list[SequenceGroup], last: SequenceGroup | None) -> SequenceGroup | None:
    """Return the first group that arrived after `last`, which need not be among them any more."""
    if not groups or last is None or groups[0].arrival > last.arrival:
        return groups[0] if groups else None
    index = bisect.bisect_right(groups, last.arrival, key=_BY_ARRIVAL)
    return groups[index] if index < len(groups) else None
