"""Moves: room that is kept for groups that are to leave their planner, so that no newcomer takes it.

A planner that drains, or is for prompts alone, lets a group go only once another planner has room for it. Groups that
run already go before newcomers of the same level.

Pure. Read next: `placement.py`.
"""

import math
from collections.abc import Iterable

from scheduler_svc.core.fleet.capacity import is_open_to
from scheduler_svc.core.fleet.placement import Offer, Placement
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.admission import MAX_PASSED_GROUPS
from scheduler_svc.core.step.demand import Wait
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.waiting_queue import Turn, WaitingQueue


def keep_room(
    placement: Placement, queue: WaitingQueue, planner: ExecutorPlanner, group: SequenceGroup
) -> Offer | Wait:
    """Keep room elsewhere for a group of a planner; return where, or how it has to wait."""
    waiting = planner.batch.as_waiting(group)
    if not any(is_open_to(inbox.planner, waiting) for inbox in placement.takers if not inbox.planner.is_draining):
        return Wait.NEVER
    offer = placement.choose(queue.turn_of(waiting, group.order[0]))
    if isinstance(offer, Offer):
        placement.keep(offer)
    return offer


class RoomForMoves:
    """Keeps room for the groups of draining planners, in one pass through the line.

    Args:
        placement: The planners with room.
        queue: The line.
        draining: The planners that groups leave.
        now_s: Monotonic time, in seconds; -inf: no planner is stalled.
    """

    def __init__(
        self, placement: Placement, queue: WaitingQueue, draining: Iterable[ExecutorPlanner], now_s: float
    ) -> None:
        self._placement, self._queue, self._now_s = placement, queue, now_s
        # Of each draining planner the first level with groups for which no room was kept yet.
        self._first_levels = dict.fromkeys(draining, -math.inf)

    def must_be_awaited(self, newcomer: Turn) -> bool:
        """Keep room for the groups that go before a newcomer; return whether one of them found none: then it waits."""
        for planner, first_level in self._first_levels.items():
            if newcomer.level < first_level or planner.oldest_step.stalled_s(self._now_s) is not None:
                continue
            self._first_levels[planner] = newcomer.level + 1
            num_passed = 0
            for group in planner.movable:
                if group.order[0] < first_level:
                    continue
                if group.order[0] > newcomer.level or num_passed == MAX_PASSED_GROUPS:
                    break
                offer = keep_room(self._placement, self._queue, planner, group)
                if offer is Wait.IN_LINE:
                    return True
                num_passed += not isinstance(offer, Offer)
        return False
