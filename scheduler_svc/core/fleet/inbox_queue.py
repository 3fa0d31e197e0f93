"""The queue that a planner admits from: its inbox, and behind it the queue of the fleet. Pure."""

from collections.abc import Generator, Iterable, Iterator

from scheduler_svc.core.fleet.dispatcher import Dispatcher
from scheduler_svc.core.fleet.inbox import Inbox
from scheduler_svc.core.sequence import SequenceGroup


class InboxQueue:
    """The queue as one planner sees it (`AdmissionQueue`): groups dispatched to it stand first."""

    def __init__(self, dispatcher: Dispatcher, inbox: Inbox) -> None:
        self._dispatcher = dispatcher
        self._inbox = inbox

    @property
    def has_solo(self) -> bool:
        """Whether a group that runs alone was dispatched to the planner."""
        return any(given.group.runs_alone for given in self._inbox.assignments)

    def solo(self) -> Generator[SequenceGroup]:
        """Yield that group, for the planner to admit."""
        return self._dispatcher.serve_solo(self._inbox)

    def in_order(self) -> Generator[SequenceGroup]:
        """Yield the groups to admit in the step that the planner decides now; the rest goes back into the line."""
        return self._dispatcher.serve(self._inbox)

    def wanted_elsewhere(self, groups: Iterable[SequenceGroup], now_s: float) -> Iterator[SequenceGroup]:
        """Yield, in order, groups of the planner for which other planners have room now."""
        return self._dispatcher.wanted_elsewhere(self._inbox.planner, groups, now_s)

    def add(self, group: SequenceGroup) -> None:
        """Queue a group that was preempted: any planner may take it."""
        self._dispatcher.queue.add(group)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group that is admitted here, or has ended."""
        self._dispatcher.queue.remove(group)

    def counter_of(self, group: SequenceGroup) -> float:
        """Return the virtual token counter of the tenant of a group on its level."""
        return self._dispatcher.queue.counter_of(group)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that are computed for a tenant."""
        self._dispatcher.queue.charge(tenant, num_tokens)
