"""Feeds the calls of a step log to a fleet, and sees that it decides what is recorded, to the byte."""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from octavo.execution.v1 import step_pb2
from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.step_wire.wire import decode_result, encode_step
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.replay.difference import Difference, DifferenceError, differences
from scheduler_svc.step_log import records
from scheduler_svc.step_log.snapshot import ReplayedFleet, Snapshot, empty_fleet

# Ended groups are forgotten when so many are known.
_MIN_KNOWN_GROUPS = 4096
# Some hundred megabytes; a record of a few bytes can ask for many.
_MAX_KNOWN_OUTPUTS = 2**20

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StepName:
    """A step of a log: the number of its planner, the executor's address and epoch, and its id there."""

    planner: int
    executor: str
    epoch: int
    step_id: int

    def __str__(self) -> str:
        return (
            f"step {self.step_id} of {self.executor or 'the executor'}, attachment {self.planner}, epoch {self.epoch}"
        )


class NoSenseError(Exception):
    """A call is about something that is not there; the message says what."""


class _Known(dict[int, _T]):
    """What calls name by number.

    Args:
        kind: What it is, in a sentence.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __missing__(self, number: int) -> _T:
        raise NoSenseError(f"{self._kind} {number}, which does not exist")

    def take(self, number: int) -> _T:
        """Return one, which is no longer known. Raises NoSenseError."""
        taken = self[number]
        del self[number]
        return taken


@dataclass(slots=True)
class Applied:
    """What became of one call.

    Attributes:
        step: The step that it decided; None: it decided none.
        decision: What else was decided; None: it was no decision.
        updates: What a result brought; None: it was none, or was refused.
        planner: Number of the planner that it was about; 0: about none.
        evacuated: Groups of a planner that left.
    """

    step: StepName | None = None
    decision: Decision | None = None
    updates: StepUpdates | None = None
    planner: int = 0
    evacuated: list[SequenceGroup] = field(default_factory=list)


class CoreReplay:
    """A fleet that is fed with the calls of another one.

    Args:
        header: Of the file with the first call.
        snapshot: The fleet before that call; None: it is empty.

    Attributes:
        fleet: As it is after the last call.
        planners: Those that are there, by number.
        joined: What is known of each planner that joined, those of the snapshot included.
        groups: By arrival; some that have ended are forgotten.
        now_s: Time of the last decision.
    """

    def __init__(self, header: pb.LogHeader, snapshot: Snapshot[ReplayedFleet] | None) -> None:
        self.now_s = header.started_at_s
        self.planners = _Known[ExecutorPlanner]("attachment")
        self.groups = _Known[SequenceGroup]("request")
        self.joined = {planner.core: planner for planner in header.cores}
        self._is_complete = True
        self._is_masked = header.has_masked_tokens
        if snapshot is None:
            self.fleet = empty_fleet(header)
        else:
            self.fleet = snapshot.fleet
            self.planners.update(zip(snapshot.planner_numbers, self.fleet.planners, strict=True))
            self._learn_groups(snapshot)
        self.fleet.is_complete = lambda: self._is_complete
        self._max_known_groups = _MIN_KNOWN_GROUPS
        self._num_known_outputs = sum(group.num_sequences for group in self.groups.values())

    def _learn_groups(self, snapshot: Snapshot[ReplayedFleet]) -> None:
        self.groups |= snapshot.outside
        held = [(*planner.batch.running, *planner.groups.returning) for planner in self.fleet.planners]
        self.groups |= {group.arrival: group for group in (*self.fleet.queue, *chain(*held))}

    def apply(self, record: pb.LogRecord) -> Applied:
        """Make the next call.

        Raises:
            DifferenceError: it decided something else than is recorded, or failed where it did not.
            NoSenseError: what it is about is not there.
        """
        kind = record.WhichOneof("call")
        assert kind is not None
        failed = "none"
        try:
            self.fleet.names.learn(record.named_blocks)
            applied = self._make(kind, getattr(record, kind))
            if not record.raised:
                return applied
        except NoSenseError:
            raise
        except DifferenceError:
            if not record.raised:
                raise
        except Exception as error:
            if type(error).__name__ == record.raised:
                return Applied(planner=getattr(getattr(record, kind), "core", 0))
            failed = f"{type(error).__name__}: {error}"
        raise DifferenceError(f"the call {kind}", [Difference("error", record.raised or "none", failed)])

    # Calls ---------------------------------------------------------------------------------------

    def _make(self, kind: str, call: Any) -> Applied:
        fleet = self.fleet
        match kind:
            case "core_joined":
                self.planners[call.core] = records.join(fleet, call)
                self.joined[call.core] = call
            case "core_left":
                return Applied(planner=call.core, evacuated=fleet.leave(self.planners.take(call.core)))
            case "core_forgotten":
                fleet.forget(self.planners.take(call.core))
            case "blocks_kept":
                names = fleet.names.own(call.names)
                fleet.adopt_blocks(self.planners[call.core], np.array(call.block_ids, np.int32), names)
            case "takes_groups":
                fleet.set_takes_groups(self.planners[call.core], call.value)
            case "draining":
                fleet.set_draining(self.planners[call.core], call.value)
            case "probing":
                fleet.set_probing(self.planners[call.core], call.value)
            case "step_cost":
                fleet.set_step_cost(self.planners[call.core], records.decode_step_cost(call))
            case "hang_noted":
                fleet.note_hang(self.planners[call.core])
            case "tenants_changed":
                fleet.set_tenant_shares(records.decode_shares(call))
            case "weights_changed":
                fleet.change_weights(call.weights_digest, keeps_live=call.keeps_live)
            case "prefixes_reset":
                (fleet.lose_blocks if call.loses_blocks else fleet.reset_prefixes)()
            case "group_added":
                self._add_group(records.decode_group(call))
            case "group_added_again":
                fleet.add(self.groups[call.arrival])
            case "group_withdrawn":
                fleet.withdraw(self.groups[call.arrival])
            case "group_aborted":
                fleet.abort(self.groups[call.arrival])
            case "sequence_finished":
                sequences = self.groups[call.arrival].sequences
                fleet.finish(self.planners[call.core], sequences[call.output_index])
            case "loss_noted":
                fleet.note_loss(self.groups[call.arrival], call.executor)
            case "loss_forgiven":
                fleet.forgive_loss(self.groups[call.arrival])
            case "runs_alone":
                fleet.set_runs_alone(self.groups[call.arrival], call.value)
            case "groups_dispatched":
                self._is_complete = call.is_complete
                fleet.dispatch(call.now_s)
            case "step_decided":
                return self._decide(call)
            case "result_taken":
                updates = fleet.process(self.planners[call.core], decode_result(call.result))
                return Applied(updates=updates, planner=call.core)
            case _:
                raise AssertionError(kind)
        return Applied(planner=getattr(call, "core", 0))

    def _add_group(self, group: SequenceGroup) -> None:
        self.groups[group.arrival] = group
        self.fleet.add(group)
        self._num_known_outputs += group.num_sequences
        if len(self.groups) > self._max_known_groups or self._num_known_outputs > _MAX_KNOWN_OUTPUTS:
            for arrival in [arrival for arrival, known in self.groups.items() if not known.live_sequences]:
                del self.groups[arrival]
            self._max_known_groups = max(_MIN_KNOWN_GROUPS, 2 * len(self.groups))
            self._num_known_outputs = sum(known.num_sequences for known in self.groups.values())
            if self._num_known_outputs > _MAX_KNOWN_OUTPUTS:
                raise ValueError(f"more than the {_MAX_KNOWN_OUTPUTS} outputs that are replayed are alive")

    def _decide(self, call: pb.StepDecided) -> Applied:
        self.now_s, self._is_complete = call.now_s, call.is_complete
        planner = self.planners[call.core]
        decision, _ = self.fleet.schedule(planner, call.now_s)
        step = decision.step
        decided = None if step is None else encode_step(step)
        recorded = call.step if call.HasField("step") else None
        if recorded is not None and recorded.registered_blocks.names:
            recorded.registered_blocks.names = self.fleet.names.own(recorded.registered_blocks.names)
        step_id = recorded.step_id if recorded is not None else planner.last_scheduled_step_id + (step is None)
        name = StepName(call.core, planner.name, planner.epoch, step_id)
        if _content(decided) != _content(recorded):
            raise DifferenceError(str(name), differences(recorded, decided), self._hint(planner))
        failed = [failure.group.arrival for failure in decision.failures]
        if failed != list(call.failed_arrivals):
            place = Difference("failed requests", str(list(call.failed_arrivals)), str(failed))
            raise DifferenceError(str(name), [place])
        return Applied(name if step is not None else None, decision, planner=call.core)

    def _hint(self, planner: ExecutorPlanner) -> str:
        if self._is_masked and any(group.beam_search is not None for group in planner.batch.running):
            return (
                "the tokens of this log are masked, and a beam search was running: beams with equal scores are "
                "ordered by token id and may be ordered differently"
            )
        return ""


def _content(message: step_pb2.ExecuteModelRequest | None) -> bytes | None:
    return None if message is None else message.SerializeToString(deterministic=True)
