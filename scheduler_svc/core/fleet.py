"""The fleet: one waiting queue, and one core for each executor that is attached.

Groups wait in one place and are placed at the moment a core can take them. Every core looks at the
queue in the same order, and takes a group only if no other core that could take it now is the better
place: the one where fewest tokens are computed before the group has its first one (prompt less cached
prefix, prefills that run, one token for each sequence that decodes), then the one with most free blocks.
What a walk over the queue has placed on a core counts for the next group, so that a burst is dealt out.

When an executor is lost, the groups of its core go back to the queue with all their known tokens; they
have run, so they come before newcomers. What a core knows of others it sees here and nowhere else.

Pure. Read next: `waiting_queue.py`, `scheduler.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from scheduler_svc.core.admission import HALF_OPEN, MAX_PASSED_GROUPS, Obstacle, Wait, lack_of_slots
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy import Policy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting_queue import WaitingQueue


class Fleet:
    """Owns the queue and the cores.

    Args:
        queue: The one waiting queue.
        policy: The queue's policy; cores order their groups by it as well.
        prefix_key: Secret of the prefix caches.
        is_complete: Says whether no other executor is expected back. As long as one is, a group that fits
            none of those here waits for it.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        policy: Policy,
        prefix_key: bytes = b"",
        is_complete: Callable[[], bool] = lambda: True,
    ) -> None:
        self.queue = queue
        self.cores: list[Scheduler] = []
        self._policy = policy
        self._prefix_key = prefix_key
        self.is_complete = is_complete

    # Executors come and go -----------------------------------------------------------------------

    def join(self, limits: SchedulerLimits, epoch: int, name: str = "") -> Scheduler:
        """Return the core of an executor that was attached, by its address; it takes groups from now on."""
        view = _QueueOfCore(self)
        core = view.core = Scheduler(limits, view, self._policy, epoch, self._prefix_key, name)
        self.cores.append(core)
        return core

    def leave(self, core: Scheduler) -> list[SequenceGroup]:
        """Forget the core of an executor that is lost; return its groups, in order, with their known tokens.

        Whoever calls queues them again, those that are to be computed again.
        """
        self.cores.remove(core)
        return core.evacuate()

    # Groups --------------------------------------------------------------------------------------

    def core_of(self, group: SequenceGroup) -> Scheduler | None:
        """Return the core that has a group; None: it waits in the queue, or has ended."""
        return next((core for core in self.cores if core.has(group)), None)

    def can_ever_take(self, group: SequenceGroup) -> bool:
        """Return whether some core could take the group if it were empty."""
        return any(core.can_ever_take(group) for core in self._takers)

    def why_never(self, group: SequenceGroup) -> str:
        """Say why no core can ever take the group: the reason of the first one."""
        return next(core.why_never(group) for core in self._takers)

    def may_take(self, core: Scheduler) -> bool:
        """Return whether groups may be placed on a core: it stays, or all are leaving, and it takes some back."""
        return core in self._takers

    @property
    def _takers(self) -> list[Scheduler]:
        """The cores that new groups may be placed on; all of them if every one is leaving."""
        return [core for core in self.cores if core.takes_groups] or self.cores

    def abort(self, group: SequenceGroup) -> None:
        """End a group, wherever it is."""
        core = self.core_of(group)
        if core is not None:
            core.abort(group)
        else:
            if group in self.queue:
                self.queue.remove(group)
            group.end()

    # Placement -----------------------------------------------------------------------------------

    def place(self, group: SequenceGroup, now_s: float, placements: "Placements | None" = None) -> Scheduler | Obstacle:
        """Return the core that is to take the group now, or why none can.

        The obstacle is the one that lets the group wait most patiently: aside before in line before never.

        Args:
            group: Waits.
            now_s: Monotonic time, in seconds.
            placements: Of the groups before it; None: it is the first one.
        """
        placements = placements or self.placements()
        able: list[Scheduler] = []
        obstacles: list[Obstacle] = []
        for core in self._takers:
            obstacle = self._doubt(core, group) or core.obstacle(group, now_s) or placements.obstacle(core, group)
            if obstacle is None:
                able.append(core)
            else:
                obstacles.append(obstacle)
        if able:
            return min(able, key=lambda core: (placements.cost_of(core, group), -core.blocks.allocator.num_free_blocks))
        obstacle = min(obstacles, key=lambda obstacle: _PATIENCE.index(obstacle.wait))
        if obstacle.wait is Wait.NEVER and not (group.has_outgrown and self.is_complete()):
            return Obstacle(Wait.ASIDE, f"{obstacle.reason}; it waits for an executor that can hold it")
        return obstacle

    def _doubt(self, core: Scheduler, group: SequenceGroup) -> Obstacle | None:
        """Return that a group is not to run on a core after a loss, although it might; None: nothing speaks against it.

        Who was lost somewhere goes elsewhere next, and to no executor in doubt, as long as there is a choice.
        """
        if group.lost_on and (core.is_probing or core.name == group.lost_on):
            others = (other for other in self._takers if not other.is_probing and other.name != group.lost_on)
            if any(other.can_ever_take(group) for other in others):
                return Obstacle(Wait.ASIDE, "it lost an executor last time, and another one than this can take it")
        return None

    def placements(self) -> "Placements":
        """Return what a walk has placed that begins: nothing."""
        return Placements(self._takers)

    def obstacles(self, group: SequenceGroup, now_s: float) -> list[tuple[Scheduler, Obstacle | None]]:
        """Return what keeps a group from each core, for people; None: nothing but those ahead and the token budget."""
        leaving = Obstacle(Wait.IN_LINE, "the executor is leaving the fleet")
        judged_at_s = self.judged_at_s(now_s)
        return [
            (core, self._doubt(core, group) or core.obstacle(group, judged_at_s) if self.may_take(core) else leaving)
            for core in self.cores
        ]

    def judged_at_s(self, now_s: float) -> float:
        """Return the time by which steps are overdue: never for a core that is alone, which takes all."""
        return now_s if len(self.cores) > 1 else -math.inf


_PATIENCE = (Wait.ASIDE, Wait.IN_LINE, Wait.NEVER)


class Placements:
    """What a walk over the queue has placed on which core, so that a burst is dealt out and not placed on one.

    A group that is another core's is still in the queue, and counts there as if it had been taken.

    Args:
        cores: Those that groups may be placed on.
    """

    def __init__(self, cores: Sequence[Scheduler]) -> None:
        self._loads = {core: core.load for core in cores}
        self._num_free_slots = {core: core.batch.num_free_slots for core in cores}
        self._probed: set[Scheduler] = set()

    def add(self, core: Scheduler, group: SequenceGroup) -> None:
        """Count a group as one of a core."""
        self._loads[core] += core.num_tokens_to_compute(group) + group.num_slots
        self._num_free_slots[core] -= group.num_slots
        if core.is_probing:
            self._probed.add(core)

    def cost_of(self, core: Scheduler, group: SequenceGroup) -> int:
        """Return the tokens that are computed on a core before the group has its first one."""
        return self._loads[core] + core.num_tokens_to_compute(group)

    def obstacle(self, core: Scheduler, group: SequenceGroup) -> Obstacle | None:
        """Return that the slots of a core are taken; None: enough are left."""
        if core in self._probed:
            return HALF_OPEN
        if group.num_slots > (num_free_slots := self._num_free_slots[core]):
            return lack_of_slots(group.num_slots, num_free_slots)
        return None


class _QueueOfCore:
    """The queue as one core sees it: the groups that are placed there, up to the first one that has to wait."""

    core: Scheduler

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def in_order(self) -> Iterator[SequenceGroup]:
        fleet, num_passed, num_of_others = self._fleet, 0, 0
        if not fleet.may_take(self.core):
            return
        if len(fleet.cores) == 1 and fleet.is_complete() and self.core.takes_groups and not self.core.is_probing:
            yield from fleet.queue.in_order()
            return
        judged_at_s, placements = fleet.judged_at_s(self.core.now_s), fleet.placements()
        for group in fleet.queue.in_order():
            if not (self.core.takes_groups or group.has_run):
                continue  # a leaving core takes back what it preempted, and no more
            place = fleet.place(group, judged_at_s, placements)
            if isinstance(place, Obstacle):
                if place.wait is Wait.NEVER:
                    yield group  # what fits nowhere is for the first who looks to end
                    continue
                # What waits for another executor costs next to nothing to look at, and may be much.
                num_passed += not group.lost_on and fleet.can_ever_take(group)
                if place.wait is Wait.IN_LINE or num_passed == MAX_PASSED_GROUPS:
                    return
                continue
            placements.add(place, group)
            if place is self.core:
                yield group
            else:
                num_of_others += 1
                if num_of_others == MAX_PASSED_GROUPS * len(fleet.cores):
                    return

    def add(self, group: SequenceGroup) -> None:
        self._fleet.queue.add(group)

    def remove(self, group: SequenceGroup) -> None:
        self._fleet.queue.remove(group)

    def charge(self, tenant: str, num_tokens: int) -> None:
        self._fleet.queue.charge(tenant, num_tokens)
