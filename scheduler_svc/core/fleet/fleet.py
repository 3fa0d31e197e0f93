"""The fleet: one waiting queue, one planner for each executor that is attached, and the dispatcher between them.

When an executor is lost, the groups of its planner go back to the queue with all their known tokens; they
have run, so they come before newcomers.

The owner of a fleet changes it, its planners and its groups only by the methods of `Fleet`. So its decisions depend
only on these calls in their order, and on `is_complete` at each decision (`scheduler_svc/step_log/`). Reading any part
of it changes nothing.

Pure. Read next: `dispatcher.py`, `executor_planner.py`.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator

from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import Int32Array, StepResult
from scheduler_svc.core.blocks.block_holders import ALL_PLANNERS
from scheduler_svc.core.blocks.block_naming import BlockNaming
from scheduler_svc.core.blocks.prefix_cache import BlockHasher
from scheduler_svc.core.fleet.capacity import Footprint, is_open_to
from scheduler_svc.core.fleet.dispatcher import Dispatcher
from scheduler_svc.core.fleet.inbox import Inbox
from scheduler_svc.core.fleet.placement import avoids, lacks_adapter
from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.block_transfers import NOTHING_ENDED
from scheduler_svc.core.step.demand import FULL, Obstacle, Wait
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_cost import StepCost
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.core.waiting.policy import Policy
from scheduler_svc.core.waiting.tenant_shares import TenantShares
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.provenance import UNKNOWN, Numerics


class Fleet:
    """Owns the queue and the planners.

    Args:
        queue: The one waiting queue.
        policy: The queue's policy; planners order their groups by it as well.
        prefix_key: Secret of the prefix caches.
        is_complete: Says whether no other executor is expected back. As long as one is, a group that has outgrown the
            attached ones waits for it.

    Attributes:
        dispatcher: Gives waiting groups to planners.
        naming: What the names of blocks stand for beside tokens.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        policy: Policy,
        prefix_key: bytes = b"",
        is_complete: Callable[[], bool] = lambda: True,
    ) -> None:
        self.queue = queue
        self.dispatcher = Dispatcher(queue, self.expects_no_executor)
        self.is_complete = is_complete
        self.planners: list[ExecutorPlanner] = []
        self._past_preemptions: Counter[PreemptionMode] = Counter()
        self._policy = policy
        self._prefix_key = prefix_key
        self.naming = BlockNaming()

    def expects_no_executor(self) -> bool:
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
    ) -> ExecutorPlanner:
        """Return a planner for an executor that was attached; it takes groups from now on."""
        inbox = Inbox(limits)
        queue = InboxQueue(self.dispatcher, inbox)
        planner = inbox.planner = ExecutorPlanner(
            limits, queue, self._policy, epoch, self._prefix_key, self.dispatcher.holders, name, numerics, info
        )
        if not self.planners:
            self.naming.follow(numerics.weights_digest)
        planner.blocks.hasher, planner.blocks.era = self._hasher(limits.block_size), self.naming.era
        self.planners.append(planner)
        self.dispatcher.add(inbox)
        return planner

    def _hasher(self, block_size: int) -> BlockHasher:
        return BlockHasher(self.naming.key(self._prefix_key), block_size)

    def adopt_blocks(self, planner: ExecutorPlanner, block_ids: Int32Array, names: bytes) -> None:
        """Give a planner that has just joined its executor's cached blocks: ids, [n], and names of 16 bytes each."""
        planner.blocks.adopt(block_ids, names)

    def leave(self, planner: ExecutorPlanner) -> list[SequenceGroup]:
        """Forget the planner of a lost executor; return its groups, in order, with their known tokens.

        The caller queues the groups that are to go on.
        """
        self._forget(planner)
        return planner.evacuate()

    def forget(self, planner: ExecutorPlanner) -> None:
        """Forget a planner and the groups that it has; groups that were dispatched to it wait in line again."""
        self._forget(planner)

    def _forget(self, planner: ExecutorPlanner) -> None:
        self.planners.remove(planner)
        self._past_preemptions.update(planner.preemption.num_preemptions)
        self.dispatcher.remove(planner)

    def set_takes_groups(self, planner: ExecutorPlanner, takes_groups: bool) -> None:
        """Say whether a planner is to get new groups: not while its executor leaves."""
        planner.takes_groups = takes_groups

    def set_draining(self, planner: ExecutorPlanner, is_draining: bool) -> None:
        """Say whether a planner gives its groups to others that have room: its executor is to be ended."""
        planner.is_draining = is_draining

    def set_probing(self, planner: ExecutorPlanner, is_probing: bool) -> None:
        """Say whether it is in doubt that the executor of a planner works."""
        planner.is_probing = is_probing

    def set_step_cost(self, planner: ExecutorPlanner, step_cost: StepCost) -> None:
        """Give a planner the step cost that was learned of its executor in an earlier attachment."""
        planner.step_cost = step_cost

    def note_hang(self, planner: ExecutorPlanner) -> None:
        """Note that the oldest step of a planner was called hung; if it was only slow, the next one gets more time."""
        planner.step_cost.note_hang()

    @property
    def num_preemptions(self) -> dict[PreemptionMode, int]:
        """Preemptions so far, of former planners too."""
        counts = self._past_preemptions.copy()
        for planner in self.planners:
            counts.update(planner.preemption.num_preemptions)
        return {mode: counts[mode] for mode in PreemptionMode}

    def change_weights(self, weights_digest: str, *, keeps_live: bool) -> list[SequenceGroup]:
        """Let all executors go on with other weights; no step is in flight, and no cached block is found again.

        Returns: with `keeps_live` the running groups, which go on with what older weights have computed of them. All
            other groups are computed again.
        """
        self.naming.follow(weights_digest)
        return self._change_weights(keeps_live=keeps_live)

    def lose_blocks(self) -> None:
        """Let all groups be computed again: the contents of all blocks are gone. No step is in flight."""
        self._reset_naming()
        self._change_weights(keeps_live=False)

    def _change_weights(self, *, keeps_live: bool) -> list[SequenceGroup]:
        self.dispatcher.recall_all()
        weights_digest = self.naming.weights_digest
        kept: list[SequenceGroup] = []
        for planner in self.planners:
            hasher = self._hasher(planner.blocks.block_size)
            kept += planner.change_weights(weights_digest, hasher, self.naming.era, keeps_live=keeps_live)
        return kept

    def reset_prefixes(self) -> None:
        """Let no block be found again that is cached now."""
        self._reset_naming()
        self.dispatcher.recall_all()
        for planner in self.planners:
            planner.rename_blocks(self._hasher(planner.blocks.block_size), self.naming.era)

    def _reset_naming(self) -> None:
        """Let no block be found that has a name; a scheduler before this one may have had the key that comes now."""
        self.naming.reset()
        for planner in self.planners:
            planner.blocks.forget_names()

    def set_tenant_shares(self, shares: TenantShares) -> None:
        """Let tenants have other shares from now on; running groups go on."""
        self.queue.set_shares(shares)

    # Decisions -----------------------------------------------------------------------------------

    def schedule(self, planner: ExecutorPlanner, now_s: float) -> tuple[Decision, set[ExecutorPlanner]]:
        """Return what a planner decides, and the planners to which groups were dispatched meanwhile."""
        if not self.dispatcher.transfers.is_idle:
            self.dispatcher.transfers.look(now_s)
        decision = planner.schedule(now_s)
        return decision, self.dispatcher.take_dispatched()

    def dispatch(self, now_s: float) -> set[ExecutorPlanner]:
        """Give the first groups in line to planners with room; return the planners that got new groups."""
        if not self.dispatcher.transfers.is_idle:
            self.dispatcher.transfers.look(now_s)
        return self.dispatcher.dispatch(now_s)

    def process(self, planner: ExecutorPlanner, result: StepResult) -> StepUpdates:
        """Take the result of the oldest step in flight of a planner.

        Raises: ExecutorFaultError: it is not a result of that step; the executor must be given up.
        """
        updates = planner.process(result)
        if result.adapters_loaded or result.grammars_loaded:
            self.dispatcher.forget_refusals(planner)
        if planner.ended_transfers is not NOTHING_ENDED:
            self.dispatcher.transfers.take(planner)
        return updates

    # Groups --------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Queue a group: a new one, or one that lost its executor or was withdrawn."""
        self.queue.add(group)

    def withdraw(self, group: SequenceGroup) -> None:
        """Take a waiting group out of the queue; it stays live, and may be added again."""
        self.dispatcher.withdraw(group)

    def finish(self, planner: ExecutorPlanner, sequence: Sequence) -> None:
        """End a sequence whose text holds a stop string with a token that came from `planner`.

        Its group may have been preempted since, and dispatched to or admitted by another planner.
        """
        group = sequence.group
        holder = planner if group in planner.groups else self.planner_of(group)
        if holder is None and group.is_last(sequence) and sequence.status is not SequenceStatus.FINISHED:
            self.abort(group)
        else:
            (holder or planner).finish(sequence)

    def note_loss(self, group: SequenceGroup, executor: str) -> None:
        """Note that a running group lost the executor of this name: it is placed on another one next, if it can be."""
        group.lost_on = executor

    def forgive_loss(self, group: SequenceGroup) -> None:
        """Note that a group that lost an executor has had a token since."""
        group.lost_on, group.runs_alone = "", False

    def set_runs_alone(self, group: SequenceGroup, runs_alone: bool) -> None:
        """Say whether a group is computed alone until its next token: it is suspected to break executors."""
        group.runs_alone = runs_alone

    def planner_of(self, group: SequenceGroup) -> ExecutorPlanner | None:
        """Return the planner that has a group; None: it waits in the queue, or has ended."""
        return next((planner for planner in self.planners if group in planner.groups), None)

    def can_ever_take(self, group: SequenceGroup) -> bool:
        """Return whether some planner could take the group if it were empty."""
        return any(planner.admissions.can_ever_admit(group) for planner in self._takers)

    def num_cached_tokens(self, group: SequenceGroup) -> int:
        """Return the most tokens of a group that a planner has in its prefix cache; the group has not run."""
        footprints = [Footprint.of(group, planner) for planner in self.planners]
        depths = [self.dispatcher.holders.depths(footprint.block_names, ALL_PLANNERS) for footprint in footprints]
        counts = [held[0].num_blocks * it.block_size for held, it in zip(depths, footprints, strict=True) if held]
        return max(counts, default=0)

    def can_take(self, group: SequenceGroup) -> bool:
        """Return whether some planner would take the group if it were empty; see `is_open_to`."""
        return any(is_open_to(planner, group) for planner in self._takers)

    def must_not_go_on(self, group: SequenceGroup) -> bool:
        """Return whether there are planners, but none with the numerics and matcher that a waiting group requires."""
        return bool(self._takers) and all(planner.admissions.must_not_go_on(group) for planner in self._takers)

    def lacks_blocks_only(self, group: SequenceGroup) -> bool:
        """Return whether some planner could take the group if its cache were larger."""
        return any(planner.admissions.lacks_blocks_only(group) for planner in self._takers)

    def why_never(self, group: SequenceGroup) -> str:
        """Say why no planner can ever take the group: the reason of the first that may go on with it, or the first."""
        takers = self._takers
        offering = [planner for planner in takers if planner.offers(group)] or takers
        may_go_on = (planner for planner in offering if not planner.admissions.must_not_go_on(group))
        return next(may_go_on, offering[0]).admissions.why_never(group)

    def offers(self, group: SequenceGroup) -> bool:
        """Return whether some executor does the group's task, though perhaps not with so many tokens."""
        return any(planner.offers(group) for planner in self._takers)

    @property
    def _takers(self) -> list[ExecutorPlanner]:
        """The planners that groups may be dispatched to; all of them if every planner is leaving."""
        return [inbox.planner for inbox in self.dispatcher.takers()]

    def abort(self, group: SequenceGroup) -> None:
        """End a group, wherever it is."""
        planner = self.planner_of(group)
        self.dispatcher.transfers.abort(group)
        if planner is not None:
            planner.abort(group)
        else:
            if group in self.queue:
                self.dispatcher.withdraw(group)
            group.end()

    # Placement -----------------------------------------------------------------------------------

    def place(self, group: SequenceGroup, now_s: float) -> ExecutorPlanner | Obstacle:
        """Return the planner that the group would be dispatched to if it stood first in line, or why it would wait.

        The obstacle is the most hopeful one: skipped before in line before never.
        """
        if (capped := self.dispatcher.why_capped(group)) is not None:
            return capped
        planner = self.dispatcher.place(group, self._policy.level(group), now_s)
        if planner is not None:
            return planner
        obstacles = [obstacle for _, obstacle in self.obstacles(group, now_s) if obstacle is not None]
        if not obstacles:
            return FULL
        obstacle = min(obstacles, key=lambda obstacle: _MOST_HOPEFUL_FIRST.index(obstacle.wait))
        if obstacle.wait is Wait.NEVER and not self.dispatcher.has_no_hope(group):
            return Obstacle(Wait.SKIPPED, f"{obstacle.reason}; waiting for an executor that can hold it")
        return obstacle

    def obstacles(self, group: SequenceGroup, now_s: float) -> list[tuple[ExecutorPlanner, Obstacle | None]]:
        """Return what keeps a group from each planner, for people; None: only groups ahead and the token budget."""
        leaving = Obstacle(Wait.IN_LINE, "the executor is leaving the fleet")
        judged_at_s, capped = self.dispatcher.judged_at_s(now_s), self.dispatcher.why_capped(group)
        takers, preferred = self._takers, self.dispatcher.preferred(group, self._policy.level(group), now_s)
        return [
            (
                planner,
                capped or (self._obstacle(planner, group, judged_at_s, preferred) if planner in takers else leaving),
            )
            for planner in self.planners
        ]

    def _obstacle(
        self, planner: ExecutorPlanner, group: SequenceGroup, judged_at_s: float, preferred: list[ExecutorPlanner]
    ) -> Obstacle | None:
        if (transfer := self.dispatcher.transfers.of_group.get(group)) is not None:
            where = f"from {transfer.sender.name} to {transfer.receiver.name}"
            return Obstacle(Wait.SKIPPED, f"{transfer.num_tokens} tokens of its prefix are on their way {where}")
        staying = [other for other in self._takers if not other.is_draining]
        if planner.is_draining and not (group.has_run and not any(is_open_to(other, group) for other in staying)):
            return Obstacle(Wait.IN_LINE, "the executor is draining")
        if preferred and planner not in preferred:
            return Obstacle(Wait.SKIPPED, "another executor with the same numerics id will take it soon")
        if avoids(planner, group, staying):
            why = "could not load its adapter" if lacks_adapter(planner, group) else "was lost with it last time"
            return Obstacle(Wait.SKIPPED, f"this executor {why}, and another one can take it")
        return planner.obstacle(group, judged_at_s)


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


_MOST_HOPEFUL_FIRST = (Wait.SKIPPED, Wait.IN_LINE, Wait.NEVER)
