"""Logs that are broken, foreign or old: one sentence with the place, and what is whole is replayed."""

import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.steplog.v1 import step_log_pb2 as pb
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.waiting.policy import FcfsPolicy, PriorityPolicy
from scheduler_svc.replay.run import NoLogError, ReplayRun
from scheduler_svc.step_log.log_files import FRAME, MAGIC, files_in, frame, read_records
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench
from tests.support.step_logs import edit_header, recording, replayed, rewrite


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of a small fleet in three files or more."""
    with recording(tmp_path / "log", calls_per_file=15) as make:
        bench = FleetBench(small_limits(prefix_caching=True), make_fleet=make, policy=PriorityPolicy())
        for arrival in range(6):
            bench.add(group(arrival, 6 + arrival, max_tokens(5), priority=arrival % 2))
        bench.run()
    assert len(files_in(tmp_path / "log")) >= 3
    return tmp_path / "log"


def place_of(path: Path, number: int) -> int:
    return list(read_records(path))[number].offset


def cut(path: Path) -> str:
    offset = place_of(path, 7)
    path.write_bytes(path.read_bytes()[: offset + FRAME.size + 1])
    return rf"{path.name} at record 7, byte {offset}: the file was truncated or modified here; no whole record follows$"


def cut_in_a_frame(path: Path) -> str:
    offset = place_of(path, 7)
    path.write_bytes(path.read_bytes()[: offset + 3])
    return rf"{path.name} at record 7, byte {offset}: the file was truncated or modified here; 3 bytes follow"


def flip_a_bit(path: Path) -> str:
    offset, content = place_of(path, 7), bytearray(path.read_bytes())
    content[offset + FRAME.size + 2] ^= 4
    path.write_bytes(content)
    return rf"{path.name} at record 7, byte {offset}: the record is corrupt: wrong checksum"


def flip_a_length(path: Path) -> str:
    offset, content = place_of(path, 7), bytearray(path.read_bytes())
    content[offset + 3] ^= 0x80
    path.write_bytes(content)
    return rf"{path.name} at record 7, byte {offset}: the file was truncated or modified here; no whole record"


def another_version(path: Path) -> str:
    edit_header(path, lambda header: setattr(header, "format_version", 2))
    return rf"{path.name} has version 2 of the format, written by release \S+; this release reads version 3: use"


def empty(path: Path) -> str:
    path.write_bytes(b"")
    return rf"{path.name} is empty$"


def foreign(path: Path) -> str:
    path.write_bytes(b"PK" + path.read_bytes()[2:])
    return rf"{path.name} is not a step log, or its header is corrupt$"


def end_in_zeros(path: Path) -> str:
    offset = place_of(path, 7)
    path.write_bytes(path.read_bytes()[:offset] + bytes(64))
    return rf"{path.name} at record 7, byte {offset}: the file was truncated or modified here; no whole record"


def an_unknown_call(path: Path) -> str:
    framed = list(read_records(path))
    contents = [one.content if one.number != 7 else b"\xf8\x7f\x01" for one in framed]
    path.write_bytes(MAGIC + b"".join(map(frame, contents)))
    return rf"{path.name} at record 7, byte {framed[7].offset}: this release does not know this call; replay it with"


def an_unknown_attachment(path: Path) -> str:
    place = place_of(path, 7)
    numbers = iter(range(1, 100))

    def edit(record: pb.LogRecord) -> None:
        if next(numbers) == 7:
            record.core_left.core = 77

    rewrite(path, edit)
    return rf"{path.name} at record 7, byte {place}: its call core_left is about attachment 77, which does not exist$"


def cut_behind_the_magic(path: Path) -> str:
    path.write_bytes(MAGIC)
    return rf"{path.name} at record 0, byte 16: the file was truncated here"


def another_core(path: Path) -> str:
    edit_header(path, lambda header: setattr(header, "core_digest", "0" * 64))
    return rf"{path.name} begins with a snapshot of release \S+ whose core has different code"


BREAKS = [
    cut,
    cut_in_a_frame,
    flip_a_bit,
    flip_a_length,
    another_version,
    empty,
    foreign,
    end_in_zeros,
    an_unknown_call,
    an_unknown_attachment,
    cut_behind_the_magic,
]


@pytest.mark.parametrize("damage", BREAKS)
@pytest.mark.parametrize("index", [0, 1])
def test_what_is_broken_is_named_and_what_is_whole_is_replayed(
    log: Path, damage: Callable[[Path], str], index: int
) -> None:
    whole = replayed(log).counts
    sentence = damage(files_in(log)[index])
    run = replayed(log)
    assert run.difference is None
    named = [trouble for trouble in run.counts.troubles if re.search(sentence, trouble)]
    assert len(named) == 1, run.counts.troubles
    assert 0 < whole.num_calls - run.counts.num_calls <= 15 + 1, "only what is behind it in its file is lost"


def test_a_snapshot_of_another_core_is_not_taken_up(log: Path) -> None:
    paths = files_in(log)
    sentence = another_core(paths[1])
    assert replayed(log).counts.troubles == [], "from the first file on no snapshot is needed"
    paths[0].unlink()
    [trouble] = replayed(log).counts.troubles
    assert re.search(sentence, trouble)


def test_a_pickle_is_no_snapshot(log: Path) -> None:
    """What earlier releases read: here one that gives a class of the core another attribute."""
    content = b"\x80\x05cscheduler_svc.core.step.batch\nBatch\n(N}X\x07\x00\x00\x00plantedK\x01stb."
    paths = files_in(log)
    edit_header(paths[1], lambda header: setattr(header, "snapshot", zlib.compress(content)))
    paths[0].unlink()
    [trouble] = replayed(log).counts.troubles
    assert re.search("the snapshot cannot be read: DecodeError", trouble)
    assert not hasattr(Batch, "planted")


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    what = "give the directory of the scheduler's --step-log"
    with pytest.raises(NoLogError, match=rf"has no file of a step log \(scheduler-\*\.steps\); {what}"):
        ReplayRun(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NoLogError, match=rf"is a file; give its directory, {tmp_path}$"):
        ReplayRun(tmp_path / "file")
    with pytest.raises(NoLogError, match=rf"is not a directory; {what}"):
        ReplayRun(tmp_path / "missing")


def test_a_planted_change_of_the_policy_is_named_with_step_and_field(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PriorityPolicy, "level", FcfsPolicy.level)
    difference = replayed(log).difference
    assert difference is not None
    assert re.fullmatch(r"step \d+ of the executor, attachment 1, epoch 1", difference.where)
    assert re.fullmatch(r"admissions\[\d\]\.token_ids\[0\]: recorded \d00, now \d00", str(difference.places[0]))


def test_a_recorded_step_that_differs_is_named(log: Path) -> None:
    def edit(record: pb.LogRecord) -> None:
        step = record.step_decided.step
        if record.WhichOneof("call") == "step_decided" and step.step_id == 2:
            step.released_slots.append(3)

    rewrite(files_in(log)[0], edit)
    difference = replayed(log).difference
    assert difference is not None
    assert difference.where == "step 2 of the executor, attachment 1, epoch 1"
    assert [str(place) for place in difference.places] == ["released_slots[0]: recorded 3, now nothing"]
