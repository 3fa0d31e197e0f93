"""The fleet: one waiting queue, one core for each executor that is attached, and the dispatcher between them.

When an executor is lost, the groups of its core go back to the queue with all their known tokens; they
have run, so they come before newcomers. What a core knows of others it sees here and nowhere else.

Whoever owns a fleet changes it, its cores and its groups by the methods of `Fleet` alone, so that the calls in
their order, with `is_complete` at each decision, are all that its decisions depend on
(`scheduler_svc/step_log/`). To look at it anywhere changes nothing.

Pure. Read next: `dispatcher.py`, `executor_core.py`.
"""

from collections import Counter
from collections.abc import Callable

from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import Int32Array, StepResult
from scheduler_svc.core.blocks.block_holders import ALL_CORES
from scheduler_svc.core.fleet.capacity import Demand, is_open_to
from scheduler_svc.core.fleet.dispatcher import Dispatcher, InboxQueue
from scheduler_svc.core.fleet.inbox import Inbox
from scheduler_svc.core.fleet.placement import avoids
from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.admission import Obstacle, Wait
from scheduler_svc.core.step.executor_core import ExecutorCore
from scheduler_svc.core.step.results import StepUpdates
from scheduler_svc.core.step.step_cost import StepCost
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.core.waiting.policy import Policy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.provenance import UNKNOWN, Numerics


class Fleet:
    """Owns the queue and the cores.

    Args:
        queue: The one waiting queue.
        policy: The queue's policy; cores order their groups by it as well.
        prefix_key: Secret of the prefix caches.
        is_complete: Says whether no other executor is expected back. As long as one is, a group that has outgrown those
            here waits for it.

    Attributes:
        dispatcher: Gives waiting groups to cores.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        policy: Policy,
        prefix_key: bytes = b"",
        is_complete: Callable[[], bool] = lambda: True,
    ) -> None:
        self.queue = queue
        self.dispatcher = Dispatcher(queue, self.expects_nobody)
        self.is_complete = is_complete
        self.cores: list[ExecutorCore] = []
        self._past_preemptions: Counter[PreemptionMode] = Counter()
        self._policy = policy
        self._prefix_key = prefix_key

    def expects_nobody(self) -> bool:
        """Return what `is_complete` says now."""
        return self.is_complete()

    # Executors come and go -----------------------------------------------------------------------

    def join(
        self,
        limits: CoreLimits,
        epoch: int,
        name: str = "",
        numerics: Numerics = UNKNOWN,
        info: ExecutorInfo | None = None,
    ) -> ExecutorCore:
        """Return the core of an executor that was attached, and what it said of itself; it takes groups from now on."""
        inbox = Inbox(limits)
        queue = InboxQueue(self.dispatcher, inbox)
        core = inbox.core = ExecutorCore(
            limits, queue, self._policy, epoch, self._prefix_key, self.dispatcher.holders, name, numerics, info
        )
        self.cores.append(core)
        self.dispatcher.add(inbox)
        return core

    def adopt_blocks(self, core: ExecutorCore, block_ids: Int32Array, names: bytes) -> None:
        """Let a core that has just joined find what its executor has kept: blocks, [n], and 16 bytes for each."""
        core.blocks.adopt(block_ids, names)

    def leave(self, core: ExecutorCore) -> list[SequenceGroup]:
        """Forget the core of an executor that is lost; return its groups, in order, with their known tokens.

        Whoever calls queues them again, those that are to be computed again.
        """
        self._forget(core)
        return core.evacuate()

    def forget(self, core: ExecutorCore) -> None:
        """Forget a core without asking it any more; what was dispatched to it waits in line again."""
        self._forget(core)

    def _forget(self, core: ExecutorCore) -> None:
        self.cores.remove(core)
        self._past_preemptions.update(core.preemption.num_preemptions)
        self.dispatcher.remove(core)

    def set_takes_groups(self, core: ExecutorCore, takes_groups: bool) -> None:
        """Say whether a core is to get new groups: not while its executor leaves."""
        core.takes_groups = takes_groups

    def set_draining(self, core: ExecutorCore, is_draining: bool) -> None:
        """Say whether a core gives its groups to others, as far as they have room: its executor is to be ended."""
        core.is_draining = is_draining

    def set_probing(self, core: ExecutorCore, is_probing: bool) -> None:
        """Say whether it is in doubt that the executor of a core works."""
        core.is_probing = is_probing

    def set_step_cost(self, core: ExecutorCore, step_cost: StepCost) -> None:
        """Let a core go on with what was learned of its executor in an earlier attachment."""
        core.step_cost = step_cost

    def note_hang(self, core: ExecutorCore) -> None:
        """The oldest step of a core was called hung; if it was only slow, the next one gets more time."""
        core.step_cost.note_hang()

    @property
    def num_preemptions(self) -> dict[PreemptionMode, int]:
        """Preemptions so far, those of cores that have left included."""
        counts = self._past_preemptions.copy()
        for core in self.cores:
            counts.update(core.preemption.num_preemptions)
        return {mode: counts[mode] for mode in PreemptionMode}

    # Decisions -----------------------------------------------------------------------------------

    def schedule(self, core: ExecutorCore, now_s: float) -> tuple[Decision, set[ExecutorCore]]:
        """Return what a core decides, and the cores that groups were dispatched to meanwhile: they are to look."""
        decision = core.schedule(now_s)
        return decision, self.dispatcher.take_dispatched()

    def dispatch(self, now_s: float) -> set[ExecutorCore]:
        """Give the first groups in line to cores that have room; return those cores, which are to look."""
        return self.dispatcher.dispatch(now_s)

    def process(self, core: ExecutorCore, result: StepResult) -> StepUpdates:
        """Take the result of the oldest step in flight of a core.

        Raises: ExecutorFaultError: it is not a result of that step; the executor must be given up.
        """
        return core.process(result)

    # Groups --------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Let a group wait: a new one, or one that lost its executor or was withdrawn."""
        self.queue.add(group)

    def withdraw(self, group: SequenceGroup) -> None:
        """Take a group that waits out of the queue; it is live, and may be added again."""
        self.dispatcher.withdraw(group)

    def finish(self, core: ExecutorCore, sequence: Sequence) -> None:
        """End a sequence that got a token of a core with which its text holds a stop string.

        Its group may have left the core since: preempted there, and dispatched to another one, or admitted by it.
        """
        group = sequence.group
        holder = core if group in core.groups else self.core_of(group)
        if holder is None and group.is_last(sequence) and sequence.status is not SequenceStatus.FINISHED:
            self.abort(group)
        else:
            (holder or core).finish(sequence)

    def note_loss(self, group: SequenceGroup, executor: str) -> None:
        """A group lost the executor of this name while it ran there: it goes elsewhere next, if it can."""
        group.lost_on = executor

    def forgive_loss(self, group: SequenceGroup) -> None:
        """A group that lost an executor has had a token since."""
        group.lost_on, group.runs_alone = "", False

    def set_runs_alone(self, group: SequenceGroup, runs_alone: bool) -> None:
        """Say whether a group is computed alone until its next token: it is suspected to break executors."""
        group.runs_alone = runs_alone

    def core_of(self, group: SequenceGroup) -> ExecutorCore | None:
        """Return the core that has a group; None: it waits in the queue, or has ended."""
        return next((core for core in self.cores if group in core.groups), None)

    def can_ever_take(self, group: SequenceGroup) -> bool:
        """Return whether some core could take the group if it were empty."""
        return any(core.admissions.can_ever_admit(group) for core in self._takers)

    def num_cached_tokens(self, group: SequenceGroup) -> int:
        """Return how many tokens of a group that has not run some core has in its prefix cache."""
        demands = [Demand.of(group, core) for core in self.cores]
        depths = [self.dispatcher.holders.depths(demand.block_names, ALL_CORES) for demand in demands]
        counts = [held[0].num_blocks * demand.block_size for held, demand in zip(depths, demands, strict=True) if held]
        return max(counts, default=0)

    def can_take(self, group: SequenceGroup) -> bool:
        """Return whether some core would take the group if it were empty; one that leaves or drains, if it has run."""
        return any(is_open_to(core, group) for core in self._takers)

    def lacks_its_kind(self, group: SequenceGroup) -> bool:
        """Return whether a waiting group that requires one kind of executor finds none of it."""
        return bool(self._takers) and all(core.admissions.must_not_go_on(group) for core in self._takers)

    def why_never(self, group: SequenceGroup) -> str:
        """Say why no core can ever take the group: the reason of the first one."""
        return next(core.admissions.why_never(group) for core in self._takers)

    @property
    def _takers(self) -> list[ExecutorCore]:
        """The cores that new groups may be placed on; all of them if every one is leaving."""
        return [inbox.core for inbox in self.dispatcher.takers()]

    def abort(self, group: SequenceGroup) -> None:
        """End a group, wherever it is."""
        core = self.core_of(group)
        if core is not None:
            core.abort(group)
        else:
            if group in self.queue:
                self.dispatcher.withdraw(group)
            group.end()

    # Placement -----------------------------------------------------------------------------------

    def place(self, group: SequenceGroup, now_s: float) -> ExecutorCore | Obstacle:
        """Return the core that the group would be dispatched to if it stood first in line, or why it would wait.

        The obstacle is the most hopeful one: skipped before in line before never.
        """
        if (capped := self.dispatcher.why_capped(group)) is not None:
            return capped
        core = self.dispatcher.place(group, self._policy.level(group), now_s)
        if core is not None:
            return core
        obstacles = [obstacle for _, obstacle in self.obstacles(group, now_s) if obstacle is not None]
        if not obstacles:
            return Obstacle(Wait.IN_LINE, "it fits, and waits for token budget in a step")
        obstacle = min(obstacles, key=lambda obstacle: _MOST_HOPEFUL_FIRST.index(obstacle.wait))
        if obstacle.wait is Wait.NEVER and not (group.has_outgrown and self.is_complete()):
            return Obstacle(Wait.SKIPPED, f"{obstacle.reason}; waiting for an executor that can hold it")
        return obstacle

    def obstacles(self, group: SequenceGroup, now_s: float) -> list[tuple[ExecutorCore, Obstacle | None]]:
        """Return what keeps a group from each core, for people; None: nothing but those ahead and the token budget."""
        leaving = Obstacle(Wait.IN_LINE, "the executor is leaving the fleet")
        judged_at_s, capped = self.dispatcher.judged_at_s(now_s), self.dispatcher.why_capped(group)
        takers, preferred = self._takers, self.dispatcher.preferred(group, self._policy.level(group), now_s)
        return [
            (core, capped or (self._obstacle(core, group, judged_at_s, preferred) if core in takers else leaving))
            for core in self.cores
        ]

    def _obstacle(
        self, core: ExecutorCore, group: SequenceGroup, judged_at_s: float, preferred: list[ExecutorCore]
    ) -> Obstacle | None:
        staying = [other for other in self._takers if not other.is_draining]
        if core.is_draining and not (group.has_run and not any(is_open_to(other, group) for other in staying)):
            return Obstacle(Wait.IN_LINE, "the executor is draining")
        if preferred and core not in preferred:
            return Obstacle(Wait.SKIPPED, "another executor with the same numerics id will take it soon")
        if avoids(core, group, staying):
            return Obstacle(Wait.SKIPPED, "it lost this executor last time, and another one can take it")
        return core.obstacle(group, judged_at_s)


_MOST_HOPEFUL_FIRST = (Wait.SKIPPED, Wait.IN_LINE, Wait.NEVER)
