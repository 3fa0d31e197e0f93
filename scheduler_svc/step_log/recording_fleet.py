"""A fleet that records every call which changes it: what `octavo replay` feeds to another one.

What is recorded is put into a queue, and becomes bytes in another thread. Looking at the fleet is not recorded.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import Int32Array, StepResult
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.results import StepUpdates
from scheduler_svc.core.step.step_cost import StepCost
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.core.waiting.policy import Policy
from scheduler_svc.core.waiting.tenant_shares import TenantShares
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.provenance import UNKNOWN, Numerics
from scheduler_svc.step_log import encoding
from scheduler_svc.step_log.block_names import NamedBlocks, NotingHasher
from scheduler_svc.step_log.masking import TokenMask
from scheduler_svc.step_log.snapshot import Snapshot, dump
from scheduler_svc.step_log.writer import Encoder, StepLogWriter

Returned = TypeVar("Returned")


class RecordingFleet(Fleet):
    """A fleet with a step log.

    Args:
        queue, policy, prefix_key, is_complete: See `Fleet`.
        writer: Takes the records.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        policy: Policy,
        prefix_key: bytes,
        is_complete: Callable[[], bool],
        writer: StepLogWriter,
    ) -> None:
        super().__init__(queue, policy, prefix_key, is_complete)
        self._writer = writer
        self._mask: TokenMask | None = None
        self._num_calls = 0
        self._num_cores = 0
        self._number_of: dict[ExecutorPlanner, int] = {}
        # Groups that were in the fleet and are in the engine's hands alone: parked, or of a planner that just left.
        self._outside: dict[int, SequenceGroup] = {}
        # Blocks that were named since the last call; looks name some too.
        self._named: list[NamedBlocks] = []

    # Executors -----------------------------------------------------------------------------------

    def join(
        self,
        limits: CoreLimits,
        epoch: int,
        name: str = "",
        numerics: Numerics = UNKNOWN,
        info: ExecutorInfo | None = None,
    ) -> ExecutorPlanner:
        """See `Fleet`; with the first planner of a vocabulary its tokens get their other names, if they are masked."""
        self._begin_file_if_wanted()
        if self._writer.masks_tokens and (self._mask is None or self._mask.vocab_size != limits.vocab_size):
            self._mask = TokenMask.make(limits.vocab_size)
        planner = super().join(limits, epoch, name, numerics, info)
        planner.blocks.hasher = NotingHasher(self._prefix_key, limits.block_size, self._named)
        self._num_cores += 1
        number = self._number_of[planner] = self._num_cores
        self._note(encoding.core_joined, number, epoch, name, limits, numerics, info)
        return planner

    def adopt_blocks(self, planner: ExecutorPlanner, block_ids: Int32Array, names: bytes) -> None:
        """See `Fleet`."""
        arguments = self._number_of[planner], block_ids, names
        self._recorded(super().adopt_blocks, (planner, block_ids, names), encoding.blocks_kept, *arguments)

    def leave(self, planner: ExecutorPlanner) -> list[SequenceGroup]:
        """See `Fleet`."""
        groups = self._recorded(super().leave, (planner,), encoding.core_left, self._number_of[planner])
        del self._number_of[planner]
        self._outside.update((group.arrival, group) for group in groups)
        return groups

    def forget(self, planner: ExecutorPlanner) -> None:
        """See `Fleet`."""
        self._recorded(super().forget, (planner,), encoding.core_forgotten, self._number_of[planner])
        del self._number_of[planner]

    def set_takes_groups(self, planner: ExecutorPlanner, takes_groups: bool) -> None:
        """See `Fleet`."""
        call = super().set_takes_groups
        self._recorded(call, (planner, takes_groups), encoding.takes_groups, self._number_of[planner], takes_groups)

    def set_draining(self, planner: ExecutorPlanner, is_draining: bool) -> None:
        """See `Fleet`."""
        call = super().set_draining
        self._recorded(call, (planner, is_draining), encoding.draining, self._number_of[planner], is_draining)

    def set_probing(self, planner: ExecutorPlanner, is_probing: bool) -> None:
        """See `Fleet`."""
        call = super().set_probing
        self._recorded(call, (planner, is_probing), encoding.probing, self._number_of[planner], is_probing)

    def set_step_cost(self, planner: ExecutorPlanner, step_cost: StepCost) -> None:
        """See `Fleet`."""
        call = super().set_step_cost
        self._recorded(call, (planner, step_cost), encoding.step_cost, self._number_of[planner], step_cost.copy())

    def note_hang(self, planner: ExecutorPlanner) -> None:
        """See `Fleet`."""
        self._recorded(super().note_hang, (planner,), encoding.hang_noted, self._number_of[planner])

    def set_tenant_shares(self, shares: TenantShares) -> None:
        """See `Fleet`."""
        self._recorded(super().set_tenant_shares, (shares,), encoding.tenants_changed, shares)

    # Decisions -----------------------------------------------------------------------------------

    def schedule(self, planner: ExecutorPlanner, now_s: float) -> tuple[Decision, set[ExecutorPlanner]]:
        """See `Fleet`."""
        self._begin_file_if_wanted()
        number, is_complete = self._number_of[planner], self.is_complete()
        try:
            decided = super().schedule(planner, now_s)
        except Exception as error:
            self._note(encoding.step_decided, number, now_s, is_complete, None, [], raised=type(error).__name__)
            raise
        decision = decided[0]
        failed = [failure.group.arrival for failure in decision.failures]
        self._note(encoding.step_decided, number, now_s, is_complete, decision.step, failed)
        return decided

    def dispatch(self, now_s: float) -> set[ExecutorPlanner]:
        """See `Fleet`."""
        is_complete = self.is_complete()
        return self._recorded(super().dispatch, (now_s,), encoding.groups_dispatched, now_s, is_complete)

    def process(self, planner: ExecutorPlanner, result: StepResult) -> StepUpdates:
        """See `Fleet`."""
        return self._recorded(
            super().process, (planner, result), encoding.result_taken, self._number_of[planner], result
        )

    # Groups --------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """See `Fleet`."""
        if group.arrival not in self._outside:
            self._recorded(super().add, (group,), encoding.group_added, group, group.matcher_id)
            return
        self._recorded(super().add, (group,), encoding.group_added_again, group.arrival)
        del self._outside[group.arrival]

    def withdraw(self, group: SequenceGroup) -> None:
        """See `Fleet`."""
        self._recorded(super().withdraw, (group,), encoding.group_withdrawn, group.arrival)
        self._outside[group.arrival] = group

    def abort(self, group: SequenceGroup) -> None:
        """See `Fleet`."""
        self._recorded(super().abort, (group,), encoding.group_aborted, group.arrival)
        self._outside.pop(group.arrival, None)

    def finish(self, planner: ExecutorPlanner, sequence: Sequence) -> None:
        """See `Fleet`."""
        arguments = self._number_of[planner], sequence.group.arrival, sequence.index
        self._recorded(super().finish, (planner, sequence), encoding.sequence_finished, *arguments)

    def note_loss(self, group: SequenceGroup, executor: str) -> None:
        """See `Fleet`."""
        self._recorded(super().note_loss, (group, executor), encoding.loss_noted, group.arrival, executor)

    def forgive_loss(self, group: SequenceGroup) -> None:
        """See `Fleet`."""
        self._recorded(super().forgive_loss, (group,), encoding.loss_forgiven, group.arrival)

    def set_runs_alone(self, group: SequenceGroup, runs_alone: bool) -> None:
        """See `Fleet`."""
        call = super().set_runs_alone
        self._recorded(call, (group, runs_alone), encoding.runs_alone, group.arrival, runs_alone)

    # Records -------------------------------------------------------------------------------------

    def _recorded(
        self, call: Callable[..., Returned], arguments: tuple[Any, ...], encode: Encoder, *recorded: Any
    ) -> Returned:
        """Make a call and record it; what it raises is recorded and raised."""
        self._begin_file_if_wanted()
        try:
            returned = call(*arguments)
        except Exception as error:
            self._note(encode, *recorded, raised=type(error).__name__)
            raise
        self._note(encode, *recorded)
        return returned

    def _note(self, encode: Encoder, *recorded: Any, raised: str = "") -> None:
        self._num_calls += 1
        self._writer.put(encode, recorded, self._mask, raised, tuple(self._named))
        self._named.clear()

    def _begin_file_if_wanted(self) -> None:
        """Let a file end that is full: the next one begins with the fleet as it is."""
        if self._writer.wants_snapshot:
            self._begin_file()

    def _begin_file(self) -> None:
        snapshot = Snapshot(self, tuple(self._number_of[planner] for planner in self.planners), self._outside)
        self._writer.begin_file(self._header(), dump(snapshot, self._mask))

    def _header(self) -> pb.LogHeader:
        header = self._writer.header(monotonic_s(), self.queue.shares)
        header.num_earlier_calls = self._num_calls
        for planner in self.planners:
            number = self._number_of[planner]
            described = encoding.core_message(
                self._mask, number, planner.epoch, planner.name, planner.limits, planner.numerics, planner.info
            )
            header.cores.append(described)
        return header
