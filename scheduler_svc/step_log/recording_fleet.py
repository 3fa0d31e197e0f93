"""A fleet that records every call which changes it: what `octavo replay` feeds to another one.

Records are put into a queue, and become bytes in another thread, which also makes those whose making costs. Looking at
the fleet is not recorded.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar, TypeVarTuple

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import Int32Array, StepResult
from scheduler_svc.core.blocks.prefix_cache import BlockHasher
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_cost import StepCost
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.core.waiting.policy import Policy
from scheduler_svc.core.waiting.tenant_shares import TenantShares
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.provenance import UNKNOWN, Numerics
from scheduler_svc.step_log import records
from scheduler_svc.step_log.block_names import NamedBlocks, NotingHasher
from scheduler_svc.step_log.masking import TokenMask
from scheduler_svc.step_log.snapshot import Snapshot, dump
from scheduler_svc.step_log.state import all_classes
from scheduler_svc.step_log.writer import Record, StepLogWriter

Arguments = TypeVarTuple("Arguments")
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
        all_classes()  # they are found now, not while the first snapshot keeps a step waiting

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
        self._num_cores += 1
        number = self._number_of[planner] = self._num_cores
        self._note(lambda mask: pb.LogRecord(core_joined=records.encode_planner(mask, number, planner)))
        return planner

    def _hasher(self, block_size: int) -> BlockHasher:
        return NotingHasher(self.naming.key(self._prefix_key), block_size, self._named, self.naming.key_number)

    def change_weights(self, weights_digest: str, *, keeps_live: bool) -> list[SequenceGroup]:
        """See `Fleet`."""
        changed = pb.WeightsChanged(weights_digest=weights_digest, keeps_live=keeps_live)
        call = partial(super().change_weights, keeps_live=keeps_live)
        return self._recorded(pb.LogRecord(weights_changed=changed), call, weights_digest)

    def reset_prefixes(self) -> None:
        """See `Fleet`."""
        self._recorded(pb.LogRecord(prefixes_reset=pb.PrefixesReset()), super().reset_prefixes)

    def lose_blocks(self) -> None:
        """See `Fleet`."""
        self._recorded(pb.LogRecord(prefixes_reset=pb.PrefixesReset(loses_blocks=True)), super().lose_blocks)

    def adopt_blocks(self, planner: ExecutorPlanner, block_ids: Int32Array, names: bytes) -> None:
        """See `Fleet`."""
        kept = pb.BlocksKept(core=self._number_of[planner], block_ids=block_ids.tolist(), names=names)
        self._recorded(pb.LogRecord(blocks_kept=kept), super().adopt_blocks, planner, block_ids, names)

    def leave(self, planner: ExecutorPlanner) -> list[SequenceGroup]:
        """See `Fleet`."""
        groups = self._recorded(pb.LogRecord(core_left=self._core(planner)), super().leave, planner)
        del self._number_of[planner]
        self._outside.update((group.arrival, group) for group in groups)
        return groups

    def forget(self, planner: ExecutorPlanner) -> None:
        """See `Fleet`."""
        self._recorded(pb.LogRecord(core_forgotten=self._core(planner)), super().forget, planner)
        del self._number_of[planner]

    def set_takes_groups(self, planner: ExecutorPlanner, takes_groups: bool) -> None:
        """See `Fleet`."""
        record = pb.LogRecord(takes_groups=self._flag(planner, takes_groups))
        self._recorded(record, super().set_takes_groups, planner, takes_groups)

    def set_draining(self, planner: ExecutorPlanner, is_draining: bool) -> None:
        """See `Fleet`."""
        record = pb.LogRecord(draining=self._flag(planner, is_draining))
        self._recorded(record, super().set_draining, planner, is_draining)

    def set_probing(self, planner: ExecutorPlanner, is_probing: bool) -> None:
        """See `Fleet`."""
        record = pb.LogRecord(probing=self._flag(planner, is_probing))
        self._recorded(record, super().set_probing, planner, is_probing)

    def set_step_cost(self, planner: ExecutorPlanner, step_cost: StepCost) -> None:
        """See `Fleet`."""
        record = pb.LogRecord(step_cost=records.encode_step_cost(self._number_of[planner], step_cost))
        self._recorded(record, super().set_step_cost, planner, step_cost)

    def note_hang(self, planner: ExecutorPlanner) -> None:
        """See `Fleet`."""
        self._recorded(pb.LogRecord(hang_noted=self._core(planner)), super().note_hang, planner)

    def set_tenant_shares(self, shares: TenantShares) -> None:
        """See `Fleet`."""
        record = pb.LogRecord(tenants_changed=records.encode_shares(shares))
        self._recorded(record, super().set_tenant_shares, shares)

    # Decisions -----------------------------------------------------------------------------------

    def schedule(self, planner: ExecutorPlanner, now_s: float) -> tuple[Decision, set[ExecutorPlanner]]:
        """See `Fleet`."""
        self._begin_file_if_wanted()
        number, is_complete = self._number_of[planner], self.is_complete()
        try:
            decided = super().schedule(planner, now_s)
        except Exception as error:
            record = pb.LogRecord(step_decided=pb.StepDecided(core=number, now_s=now_s, is_complete=is_complete))
            self._note(record, raised=type(error).__name__)
            raise
        step, failed = decided[0].step, [failure.group.arrival for failure in decided[0].failures]
        self._note(
            lambda mask: pb.LogRecord(
                step_decided=records.encode_decision(mask, number, now_s, is_complete, step, failed)
            )
        )
        return decided

    def dispatch(self, now_s: float) -> set[ExecutorPlanner]:
        """See `Fleet`."""
        dispatched = pb.GroupsDispatched(now_s=now_s, is_complete=self.is_complete())
        return self._recorded(pb.LogRecord(groups_dispatched=dispatched), super().dispatch, now_s)

    def process(self, planner: ExecutorPlanner, result: StepResult) -> StepUpdates:
        """See `Fleet`."""
        number = self._number_of[planner]
        return self._recorded(
            lambda mask: pb.LogRecord(result_taken=records.encode_taken(mask, number, result)),
            super().process,
            planner,
            result,
        )

    # Groups --------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """See `Fleet`."""
        if group.arrival in self._outside:
            self._recorded(pb.LogRecord(group_added_again=_number(group)), super().add, group)
            del self._outside[group.arrival]
            return
        matcher_id = group.matcher_id
        self._recorded(
            lambda mask: pb.LogRecord(group_added=records.encode_group(mask, group, matcher_id)), super().add, group
        )

    def withdraw(self, group: SequenceGroup) -> None:
        """See `Fleet`."""
        self._recorded(pb.LogRecord(group_withdrawn=_number(group)), super().withdraw, group)
        self._outside[group.arrival] = group

    def abort(self, group: SequenceGroup) -> None:
        """See `Fleet`."""
        self._recorded(pb.LogRecord(group_aborted=_number(group)), super().abort, group)
        self._outside.pop(group.arrival, None)

    def finish(self, planner: ExecutorPlanner, sequence: Sequence) -> None:
        """See `Fleet`."""
        finished = pb.SequenceFinished(
            core=self._number_of[planner], arrival=sequence.group.arrival, output_index=sequence.index
        )
        self._recorded(pb.LogRecord(sequence_finished=finished), super().finish, planner, sequence)

    def note_loss(self, group: SequenceGroup, executor: str) -> None:
        """See `Fleet`."""
        record = pb.LogRecord(loss_noted=pb.LossNoted(arrival=group.arrival, executor=executor))
        self._recorded(record, super().note_loss, group, executor)

    def forgive_loss(self, group: SequenceGroup) -> None:
        """See `Fleet`."""
        self._recorded(pb.LogRecord(loss_forgiven=_number(group)), super().forgive_loss, group)

    def set_runs_alone(self, group: SequenceGroup, runs_alone: bool) -> None:
        """See `Fleet`."""
        record = pb.LogRecord(runs_alone=pb.GroupFlag(arrival=group.arrival, value=runs_alone))
        self._recorded(record, super().set_runs_alone, group, runs_alone)

    # Records -------------------------------------------------------------------------------------

    def _core(self, planner: ExecutorPlanner) -> pb.CoreNumber:
        return pb.CoreNumber(core=self._number_of[planner])

    def _flag(self, planner: ExecutorPlanner, value: bool) -> pb.CoreFlag:
        return pb.CoreFlag(core=self._number_of[planner], value=value)

    def _recorded(self, record: Record, call: Callable[[*Arguments], Returned], *arguments: *Arguments) -> Returned:
        """Make a call and record it; what it raises is recorded and raised."""
        self._begin_file_if_wanted()
        try:
            returned = call(*arguments)
        except Exception as error:
            self._note(record, raised=type(error).__name__)
            raise
        self._note(record)
        return returned

    def _note(self, record: Record, raised: str = "") -> None:
        self._num_calls += 1
        self._writer.put(record, self._mask, raised, tuple(self._named))
        self._named.clear()

    def _begin_file_if_wanted(self) -> None:
        """Let a file end that is full: the next one begins with the fleet as it is."""
        if self._writer.wants_snapshot:
            self._begin_file()

    def _begin_file(self) -> None:
        numbers = tuple(self._number_of[planner] for planner in self.planners)
        header = self._writer.header(monotonic_s(), self.queue.shares)
        header.num_earlier_calls = self._num_calls
        header.cores.extend(map(partial(records.encode_planner, self._mask), numbers, self.planners))
        try:
            snapshot = dump(Snapshot(self, numbers, self._outside), self._mask)
        except Exception as error:  # such as an attribute of the core that is no data
            self._writer.fail(error)
        else:
            self._writer.begin_file(header, snapshot)


def _number(group: SequenceGroup) -> pb.GroupNumber:
    return pb.GroupNumber(arrival=group.arrival)
