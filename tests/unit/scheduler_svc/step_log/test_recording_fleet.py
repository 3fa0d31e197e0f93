"""The seam of the fleet: what changes it is recorded, what looks at it changes nothing."""

import inspect
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import Adapter
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.step_cost import StepCost
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.step_log import records
from scheduler_svc.step_log.log_files import files_in, read_records
from scheduler_svc.step_log.recording_fleet import RecordingFleet
from scheduler_svc.step_log.snapshot import Snapshot, dump
from scheduler_svc.step_log.writer import StepLogWriter
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench, two_planners
from tests.support.step_logs import check_replay, recording

REPOSITORY = Path(__file__).parents[4]

# Methods that only look, and how they are called.
LOOKS: dict[str, Callable[[Fleet, SequenceGroup], object]] = {
    "can_ever_take": lambda fleet, waiting: fleet.can_ever_take(waiting),
    "can_take": lambda fleet, waiting: fleet.can_take(waiting),
    "planner_of": lambda fleet, waiting: fleet.planner_of(waiting),
    "expects_no_executor": lambda fleet, waiting: fleet.expects_no_executor(),
    "must_not_go_on": lambda fleet, waiting: fleet.must_not_go_on(waiting),
    "offers": lambda fleet, waiting: fleet.offers(waiting),
    "num_cached_tokens": lambda fleet, waiting: fleet.num_cached_tokens(waiting),
    "lacks_blocks_only": lambda fleet, waiting: fleet.lacks_blocks_only(waiting),
    "num_preemptions": lambda fleet, waiting: fleet.num_preemptions,
    "obstacles": lambda fleet, waiting: fleet.obstacles(waiting, 1.0),
    "place": lambda fleet, waiting: fleet.place(waiting, 1.0),
    "why_never": lambda fleet, waiting: fleet.why_never(too_long()),
}


def too_long() -> SequenceGroup:
    return group(9, 40)


def test_every_public_method_is_recorded_or_only_looks() -> None:
    public = {name for name, _ in inspect.getmembers(Fleet) if not name.startswith("_")}
    recorded = {name for name in vars(RecordingFleet) if not name.startswith("_")}
    assert recorded.isdisjoint(LOOKS)
    assert public == recorded | LOOKS.keys()
    for name in recorded:
        ours, theirs = inspect.signature(getattr(RecordingFleet, name)), inspect.signature(getattr(Fleet, name))
        assert ours.parameters.keys() == theirs.parameters.keys(), f"{name} takes something that is not recorded"


def test_a_look_changes_nothing() -> None:
    bench, first, second = two_planners(prefix_caching=True)
    for arrival in range(4):
        bench.add(group(arrival, 9, max_tokens(6)))
    bench.step(first)
    bench.fleet.set_takes_groups(
        second.planner, False
    )  # what waits for it is looked at again by the next decision only
    [waiting] = [bench.add(group(5, 22, max_tokens(2)))]
    bench.add(too_long())
    for name, look in LOOKS.items():
        before = dump(Snapshot(bench.fleet, (1, 2), {})).SerializeToString()
        look(bench.fleet, waiting)
        after = dump(Snapshot(bench.fleet, (1, 2), {})).SerializeToString()
        assert len(after) >= len(before), name
        # The hashes of a prompt are remembered, which is all the same.
        if name not in ("num_cached_tokens", "obstacles", "place"):
            assert after == before, name
    assert bench.fleet.dispatcher.unplaceable == set()


def test_nobody_changes_a_core_or_the_queue_but_by_the_fleet() -> None:
    """Calls that would not be in the log, as text: the engine and the drivers have no other way."""
    forbidden = (
        *("core.process(", "core.finish(", "core.abort(", "core.schedule(", "core.evacuate(", "note_hang()"),
        *(
            "queue.add(",
            "queue.remove(",
            "queue.set_shares(",
            "dispatcher.dispatch(",
            "dispatcher.withdraw(",
            ".lost_on =",
        ),
        *("core.takes_groups =", "core.is_draining =", "core.is_probing =", "core.step_cost ="),
    )
    for folder in ("engine", "executors", "admin", "front", "telemetry"):
        for path in (REPOSITORY / "scheduler_svc" / folder).rglob("*.py"):
            if path.name == "probe.py":  # has a core of its own, which is in no fleet
                continue
            text = path.read_text(encoding="utf-8")
            assert [call for call in forbidden if call in text] == [], path


def test_limits_of_a_fleet_that_is_looked_at() -> None:
    assert small_limits().max_model_len < 40, "too_long() does not fit"


def test_a_request_is_recorded_as_it_was_though_it_is_written_later(tmp_path: Path) -> None:
    """Its admission says which matcher it goes on with; before, any executor would do."""
    with recording(tmp_path) as make:
        policy = FcfsPolicy()
        fleet = make(WaitingQueue(policy), policy, b"key", lambda: True)
        guided = group(0, 4, grammar=Grammar(b"one"), adapter=Adapter("a", bytes(32), 3), speculate=False)
        put: list[Callable[[None], pb.LogRecord]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepLogWriter, "put", lambda _, record, *rest: put.append(record))
            fleet.add(guided)
        guided.matcher_id = "of the executor"
        [record] = put
        assert record(None).group_added.matcher_id == ""
        decoded = records.decode_group(record(None).group_added)
        assert (decoded.speculate, decoded.adapter) == (False, guided.adapter)
        assert decoded.block_salt == guided.block_salt


def test_a_decision_is_recorded_with_its_time_and_whether_executors_are_expected(tmp_path: Path) -> None:
    answers = iter([True, False, False, True])
    with recording(tmp_path) as make:
        policy = FcfsPolicy()
        fleet = make(WaitingQueue(policy), policy, b"key", lambda: next(answers))
        planner = fleet.join(small_limits(), 1)
        fleet.schedule(planner, 1.5)
        fleet.dispatch(2.5)
        fleet.schedule(planner, 3.5)
        fleet.dispatch(4.5)
    [path] = files_in(tmp_path)
    records = [pb.LogRecord.FromString(framed.content) for framed in list(read_records(path))[2:]]
    decisions = [getattr(record, record.WhichOneof("call") or "") for record in records]
    recorded = [(call.now_s, call.is_complete) for call in decisions]
    assert recorded == [(1.5, True), (2.5, False), (3.5, False), (4.5, True)]


def last_file_alone(directory: Path) -> Path:
    """Return a folder with the last file of a log: its replay begins with a snapshot."""
    for path in files_in(directory)[:-1]:
        path.unlink()
    return directory


def begin_file(bench: FleetBench) -> None:
    assert isinstance(bench.fleet, RecordingFleet)
    bench.fleet._begin_file()


def test_a_snapshot_has_the_groups_that_left_a_core_and_do_not_wait_yet(tmp_path: Path) -> None:
    with recording(tmp_path) as make:
        bench = FleetBench(small_limits(), make_fleet=make)
        bench.add(group(0, 6, max_tokens(4)))
        bench.step(bench.members[0])
        [lost] = bench.fleet.leave(bench.members.pop().planner)
        begin_file(bench)
        bench.fleet.add(lost)
        bench.attach(small_limits())
        bench.run()
    assert check_replay(last_file_alone(tmp_path)).counts.num_steps


def test_masked_blocks_of_a_snapshot_are_found_by_their_names(tmp_path: Path) -> None:
    with recording(tmp_path, masks_tokens=True) as make:
        bench = FleetBench(small_limits(prefix_caching=True), make_fleet=make)
        bench.add(group(0, 9, max_tokens(2)))
        bench.run()
        begin_file(bench)
        again = bench.add(group(1, group(0, 9).prompt_token_ids.tolist(), max_tokens(2)))
        bench.run()
        assert again.num_cached_tokens == 8
    assert check_replay(last_file_alone(tmp_path)).counts.num_steps


def test_a_core_that_cannot_be_written_ends_its_log_and_goes_on(tmp_path: Path) -> None:
    with recording(tmp_path) as make:
        bench = FleetBench(small_limits(), make_fleet=make)
        fleet = bench.fleet
        assert isinstance(fleet, RecordingFleet)
        bench.add(group(0, 6, max_tokens(4)))
        bench.members[0].planner.lock = threading.Lock()  # type: ignore[attr-defined]
        fleet._writer.wants_snapshot = True
        bench.run()
        assert len(bench.tokens["a"]) == 4
        assert fleet._writer.trouble == "SnapshotError: a lock is no data"
        fleet._writer.is_recording = True  # as `recording` wants it at the end


def test_what_was_learned_of_an_executor_is_in_the_log_to_the_bit() -> None:
    cost = StepCost()
    for num_decodes in (1, 3, 7, 12, 5):
        cost.learn(decode_layout(num_decodes), 0.01 + 0.0007 * num_decodes**1.5)
    assert cost.row_sums[0] > 1.0
    cost.row_tokens = 0.7
    message = records.encode_step_cost(3, cost)
    read = records.decode_step_cost(pb.StepCostSet.FromString(message.SerializeToString()))
    for name, value in vars(cost).items():
        assert np.all(getattr(read, name) == value), name


def decode_layout(num_decodes: int) -> StepLayout:
    rows = np.arange(num_decodes, dtype=np.int32)
    ones = np.ones(num_decodes, np.int32)
    index = rows.astype(np.intp)
    return StepLayout(rows, rows, rows, ones, rows, rows, rows, rows, index, index, num_decodes, None)
