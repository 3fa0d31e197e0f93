"""The groups that wait to be admitted, and the order in which they are.

The order: by the level of the policy; on a level, tenant against tenant by their virtual token counters
(`FairShare`); within a tenant, and between tenants with equal counters, groups that have run before come first,
then by arrival. With one tenant that is plain first come, first served.

So a preempted group waits for its tenant's turn like any other: a tenant that got more than its share delays no
other tenant, and one that got less passes preempted groups of others only until it has caught up.

The dispatcher asks for the first group, and takes it out of the line:

    turn = queue.first_turn()                      None: no group stands in line
    queue.hold(turn.group)                         it still waits, but its turn is used up
    queue.remove(turn.group)                       it was admitted, or was aborted
    queue.release(turn.group)                      or: it stands in line again, where it stood before

The tokens of a held group count in its tenant's turn, as if its prompt had been computed; `charge` counts
tokens that really are. Each of these calls costs O(log tenants), however many groups wait.

The queue does not know which groups run: no call tells it that a group ends, and a group that comes back is
just added.

Pure: not even a clock. Read next: `dispatcher.py`.
"""

import bisect
import heapq
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import NamedTuple

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import FairShare, Policy
from scheduler_svc.core.waiting.tenant_shares import EQUAL_SHARES, TenantShares
from scheduler_svc.core.waiting.waiting_lines import Level, Line, LineTurn
from scheduler_svc.core.waiting.waiting_work import WaitingWork, Work


class Turn(NamedTuple):
    """Where a group stands in line; the smaller turn comes first. No two are equal, by arrival.

    Turns of one tenant may be of different moments, so their counters say nothing: the earlier arrival comes first.
    """

    level: int
    counter: float
    is_newcomer: bool
    arrival: int
    group: SequenceGroup

    def __lt__(self, other: tuple[object, ...]) -> bool:
        assert isinstance(other, Turn)
        begin = 2 if (self.level, self.group.tenant) == (other.level, other.group.tenant) else 0
        return self[begin:4] < other[begin:4]

    def __gt__(self, other: tuple[object, ...]) -> bool:
        assert isinstance(other, Turn)
        return other < self


@dataclass(slots=True)
class _Place:
    """Where a group was put. Kept, because `has_run` may change before the group is removed."""

    group: SequenceGroup
    level: int
    is_returned: bool
    work: Work
    is_held: bool = False


class WaitingQueue:
    """The waiting groups of a fleet, or of one planner.

    Args:
        policy: Puts groups on levels.
        shares: The shares of tenants. The dispatcher keeps their caps, by closing lines.

    Attributes:
        work: What there is to compute for the waiting groups.
        num_texts: Groups that are to be pooled.
    """

    def __init__(self, policy: Policy, shares: TenantShares = EQUAL_SHARES) -> None:
        self._policy = policy
        self.shares = shares
        self._fair_share = FairShare(shares)
        self._places: dict[int, _Place] = {}  # by arrival
        self._levels: dict[int, Level] = {}
        self._level_numbers: list[int] = []  # sorted keys of `_levels`
        self._open_level_numbers: list[int] = []  # levels with a group that can have a turn, sorted
        self._held: dict[int, SequenceGroup] = {}  # by arrival
        self._num_waiting_of: Counter[str] = Counter()
        self.work = WaitingWork()
        self.num_texts = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Of all groups."""
        return self.work.total.num_prompt_tokens

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

    @property
    def num_in_line(self) -> int:
        """Groups that wait and are not held."""
        return len(self._places) - len(self._held)

    # Groups come and go --------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Add a group: a new one, or with `has_run` set a group that was preempted or lost its executor."""
        assert group.arrival not in self._places, f"a group with arrival {group.arrival} waits already"
        group.share_again()
        self.num_texts += group.pooling is not None
        number = self._policy.level(group)
        place = self._places[group.arrival] = _Place(group, number, group.has_run, Work.of(group))
        self._num_waiting_of[group.tenant] += 1
        self.work.add(number, group.tenant, place.work)
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = Level()
            bisect.insort(self._level_numbers, number)
        if group.tenant not in level.lines:
            level.lines[group.tenant] = Line(self._fair_share.enter(number, group.tenant))
        self._enter_line(place)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a waiting group, because it was admitted or aborted."""
        assert group in self, f"the group with arrival {group.arrival} does not wait"
        self.num_texts -= group.pooling is not None
        place = self._places[group.arrival]
        level = self._levels[place.level]
        if place.is_held:
            self._let_go(place)
            level.renew_entry(group.tenant, level.lines[group.tenant])
        else:
            self._leave_line(place)
        del self._places[group.arrival]
        self._num_waiting_of[group.tenant] -= 1
        self.work.remove(place.level, group.tenant, place.work)
        if not self._num_waiting_of[group.tenant]:
            del self._num_waiting_of[group.tenant]
        if not len(line := level.lines[group.tenant]) and not line.num_held:
            del level.lines[group.tenant]
            self._fair_share.leave(place.level, group.tenant)
        if not level.lines:
            del self._levels[place.level]
            self._level_numbers.remove(place.level)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that are computed for a tenant, prompt and output alike.

        Tokens of a tenant that never waited, or that was forgotten since, are not counted.
        """
        self._fair_share.charge(tenant, num_tokens)

    def set_shares(self, shares: TenantShares) -> None:
        """Let tenants have other shares from now on. O(tenants that wait)."""
        self.shares = shares
        self._fair_share.set_shares(shares)
        for level in self._levels.values():
            for tenant, line in level.lines.items():
                level.renew_entry(tenant, line)

    # Dispatching ---------------------------------------------------------------------------------

    def first_turn(self) -> Turn | None:
        """Return the first turn, by the counters of this moment; None: no group stands in line."""
        if not self._open_level_numbers:
            return None
        number = self._open_level_numbers[0]
        turn, group = self._levels[number].first_turn()
        return Turn(number, *turn, group)

    def hold(self, group: SequenceGroup) -> None:
        """Take a waiting group out of the line; it still waits, and keeps its place for `release`."""
        place = self._places[group.arrival]
        assert place.group is group, f"the group with arrival {group.arrival} does not wait"
        level = self._levels[place.level]
        assert not place.is_held, f"the group with arrival {group.arrival} is held already"
        place.is_held = True
        self._held[group.arrival] = group
        level.lines[group.tenant].hold(group.num_input_tokens, is_newcomer=not place.is_returned)
        self._leave_line(place)

    def release(self, group: SequenceGroup) -> None:
        """Let a held group stand in line again."""
        place = self._places[group.arrival]
        self._let_go(place)
        self._enter_line(place)

    def close_line(self, turn: Turn) -> None:
        """Let no group of the tenant have a turn on this level, until `open_line`."""
        level, line = self._levels[turn.level], self._levels[turn.level].lines[turn.group.tenant]
        line.is_closed = True
        level.renew_entry(turn.group.tenant, line)
        self._count_in_line(turn.level, -len(line))

    def open_line(self, turn: Turn) -> None:
        """Let the groups of a closed line have their turns again."""
        level = self._levels.get(turn.level)
        line = None if level is None else level.lines.get(turn.group.tenant)
        if level is not None and line is not None and line.is_closed:
            line.is_closed = False
            level.renew_entry(turn.group.tenant, line)
            self._count_in_line(turn.level, len(line))

    def _let_go(self, place: _Place) -> None:
        assert place.is_held, f"the group with arrival {place.group.arrival} is not held"
        place.is_held = False
        del self._held[place.group.arrival]
        line = self._levels[place.level].lines[place.group.tenant]
        line.hold(place.group.num_input_tokens, is_newcomer=not place.is_returned, sign=-1)

    def _enter_line(self, place: _Place) -> None:
        level, group = self._levels[place.level], place.group
        line = level.lines[group.tenant]
        self._count_in_line(place.level, 0 if line.is_closed else 1)
        line.groups(is_newcomer=not place.is_returned).add(group)
        level.renew_entry(group.tenant, line)

    def _leave_line(self, place: _Place) -> None:
        level, group = self._levels[place.level], place.group
        line = level.lines[group.tenant]
        self._count_in_line(place.level, 0 if line.is_closed else -1)
        line.groups(is_newcomer=not place.is_returned).remove(group)
        level.renew_entry(group.tenant, line)

    def _count_in_line(self, number: int, change: int) -> None:
        """Change the number of groups that can have a turn on a level."""
        level = self._levels[number]
        was_open = level.num_in_line > 0
        level.num_in_line += change
        if was_open and not level.num_in_line:
            self._open_level_numbers.remove(number)
        elif level.num_in_line and not was_open:
            bisect.insort(self._open_level_numbers, number)

    # The order of admission ----------------------------------------------------------------------

    def in_order(self) -> Generator[SequenceGroup]:
        """Yield the groups in the order of admission, lazily; nothing is taken out. Held groups come first.

        The next group is chosen when it is asked for, by the counters of that moment. A group that was
        yielded and still waits then uses up its tenant's turn for the rest of the walk, as if its prompt
        had been computed. So a walk that takes no group sees the order of a walk that takes every group.

        The queue may change during a walk: removed groups are not yielded any more, added groups may
        be left out, and no group is yielded twice.
        """
        yield from list(self._held.values())
        index = 0
        while index < len(self._level_numbers):
            number = self._level_numbers[index]
            yield from self._level_in_order(number)
            index = bisect.bisect_right(self._level_numbers, number)

    @property
    def has_solo(self) -> bool:
        """Whether a group waits for a step of its own: only the planners of a fleet give it one."""
        return False

    def solo(self) -> Generator[SequenceGroup]:
        """Yield that group."""
        yield from ()

    def wanted_elsewhere(self, groups: Iterable[SequenceGroup], now_s: float) -> Iterator[SequenceGroup]:
        """Yield groups for which other planners have room: here there are no others."""
        yield from ()

    def num_ahead_of(self, group: SequenceGroup) -> int:
        """Return how many groups `in_order` yields before this one. O(number of groups)."""
        assert group in self, f"the group with arrival {group.arrival} does not wait"
        place = self._places[group.arrival]
        if place.is_held:
            return list(self._held).index(group.arrival)
        num_ahead = len(self._held)
        num_ahead += sum(level.num_in_line for number, level in self._levels.items() if number < place.level)
        level = self._levels[place.level]
        own_line, is_newcomer = level.lines[group.tenant], not place.is_returned
        position = own_line.groups(is_newcomer=is_newcomer).position(group) + len(own_line.returned) * is_newcomer
        own_turn = next(islice(_turns_of(own_line), position, None))
        return num_ahead + sum(
            position if line is own_line else sum(1 for _ in takewhile(own_turn.__gt__, _turns_of(line)))
            for line in level.lines.values()
        )

    def turn_of(self, group: SequenceGroup, level: int) -> Turn:
        """Return the turn of a group that stands first in line on a level."""
        return Turn(level, self.counter_of(group), not group.has_run, group.arrival, group)

    def counter_of(self, group: SequenceGroup) -> float:
        """Return the virtual token counter of the tenant of a group on its level, whether it waits there or not."""
        return self._fair_share.value_of(self._policy.level(group), group.tenant)

    def work_ahead_of(self, group: SequenceGroup) -> Work:
        """Return the least work that is computed before a newcomer that does not wait yet.

        That is the work that waits on earlier levels, and of its tenant on its own level. O(levels x tenants).
        """
        return self.work.ahead_of(self._policy.level(group), group.tenant)

    def num_waiting_of(self, tenant: str) -> int:
        """Return how many groups of a tenant wait."""
        return self._num_waiting_of[tenant]

    def _level_in_order(self, number: int) -> Iterator[SequenceGroup]:
        last_of: dict[tuple[str, bool], SequenceGroup] = {}
        num_passed_tokens_of: Counter[str] = Counter()

        def next_turn(tenant: str) -> tuple[float, bool, int, str] | None:
            level = self._levels.get(number)
            line = None if level is None else level.lines.get(tenant)
            if line is None:
                return None
            for is_newcomer in (True,) if (tenant, True) in last_of else (False, True):  # none twice, if it comes back
                group = line.groups(is_newcomer=is_newcomer).first_after(last_of.get((tenant, is_newcomer)))
                if group is not None:
                    num_passed_tokens = line.num_tokens_before(is_newcomer=is_newcomer) + num_passed_tokens_of[tenant]
                    return line.counter.value_after(num_passed_tokens), is_newcomer, group.arrival, tenant
            return None

        level = self._levels.get(number)
        turns = [turn for tenant in (level.lines if level is not None else ()) if (turn := next_turn(tenant))]
        heapq.heapify(turns)
        while turns:
            noted = heapq.heappop(turns)
            tenant = noted[-1]
            turn = next_turn(tenant)
            if turn is None:
                continue
            if turn > noted:  # its tenant was charged meanwhile
                heapq.heappush(turns, turn)
                continue
            group = self._places[turn[2]].group
            yield group
            last_of[tenant, turn[1]] = group
            if group in self:
                num_passed_tokens_of[tenant] += group.num_input_tokens
            if (following := next_turn(tenant)) is not None:
                heapq.heappush(turns, following)


def _turns_of(line: Line) -> Iterator[LineTurn]:
    """Yield the turns of the groups in a line, as if each prompt before a group were charged and nothing else."""
    num_passed_tokens = 0
    for is_newcomer in (False, True):
        num_tokens_before = line.num_tokens_before(is_newcomer=is_newcomer)
        for group in line.groups(is_newcomer=is_newcomer):
            yield line.counter.value_after(num_tokens_before + num_passed_tokens), is_newcomer, group.arrival
            num_passed_tokens += group.num_input_tokens
