"""The writer: bounds, files of the owner alone, and what happens when it cannot write."""

import errno
import logging
import os
from pathlib import Path

import pytest

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.grammar.grammar import Grammar
from scheduler_svc.core.waiting.tenant_shares import EQUAL_SHARES
from scheduler_svc.step_log import writer
from scheduler_svc.step_log.log_files import files_in
from scheduler_svc.step_log.writer import StepLogError, StepLogSettings, StepLogWriter
from tests.support.driving import group, small_limits
from tests.support.fleet_driving import FleetBench
from tests.support.step_logs import AMPLE_BYTES, check_replay, recording, replayed

SECRET = b'{"grammars": [{"json_schema": {"title": "what nobody may know"}}]}'


def aborted(arrival: int) -> pb.LogRecord:
    return pb.LogRecord(group_aborted=pb.GroupNumber(arrival=arrival))


def record_some(directory: Path, *, masks_tokens: bool = False, calls_per_file: int | None = None) -> None:
    """Record a fleet that runs three requests."""
    with recording(directory, masks_tokens=masks_tokens, calls_per_file=calls_per_file) as make:
        bench = FleetBench(small_limits(prefix_caching=True, grammar_slots=1), make_fleet=make)
        for arrival in range(3):
            bench.add(group(arrival, 6, grammar=None if arrival == 0 else Grammar(SECRET + bytes([arrival]))))
        bench.run()


@pytest.mark.parametrize("is_there", [False, True])
def test_files_are_the_owners_alone(tmp_path: Path, is_there: bool) -> None:
    old = os.umask(0)
    try:
        if is_there:
            (tmp_path / "log").mkdir()
        record_some(tmp_path / "log")
    finally:
        os.umask(old)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files_in(tmp_path / "log")} == {0o600}


def test_a_folder_that_others_use_too_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "of-another").touch()
    record_some(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_the_oldest_files_go_and_the_rest_replays(tmp_path: Path) -> None:
    settings = StepLogSettings(tmp_path, max_bytes=8 * 4000)
    log = StepLogWriter(settings)
    for number in range(40):
        log.put(aborted(number), None)
        log.begin_file(log.header(0.0, EQUAL_SHARES), pb.Snapshot(arrays=os.urandom(2000)))
    log.close()
    total = sum(path.stat().st_size for path in files_in(tmp_path))
    assert 3 * 4000 < total <= settings.max_bytes
    assert files_in(tmp_path)[-1].name.endswith("-000041.steps")


def test_an_earlier_log_counts_and_goes_first(tmp_path: Path) -> None:
    (tmp_path / "scheduler-20200101T000000Z-00000000-000001.steps").write_bytes(bytes(40_000))
    (tmp_path / "mine.txt").write_bytes(bytes(40_000))
    StepLogWriter(StepLogSettings(tmp_path, max_bytes=32_000)).close()
    assert len(files_in(tmp_path)) == 1
    assert (tmp_path / "mine.txt").exists()


def test_a_full_disk_stops_the_log_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = StepLogWriter(StepLogSettings(tmp_path, AMPLE_BYTES))

    def write(descriptor: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("scheduler_svc.step_log.writer.os.write", write)
    for number in range(3):
        log.put(aborted(number), None)
        log._write_pending()
    log.close()
    assert not log.is_recording
    assert "No space left on device" in log.trouble
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "step_log_stopped" in warning.getMessage()
    assert "No space left on device" in warning.getMessage()


def test_a_writer_that_falls_behind_stops_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "FLUSH_INTERVAL_S", 60.0)
    monkeypatch.setattr(writer, "MAX_PENDING_CALLS", 10)
    log = StepLogWriter(StepLogSettings(tmp_path, AMPLE_BYTES))
    for number in range(30):
        log.put(aborted(number), None)
    assert not log.is_recording
    assert len(log._pending) == 11
    log.close()
    assert [record.getMessage().count("too slow") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "is a file; give a directory"),
        ("file/below", "cannot be made or written to: Not a directory; give another directory"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_refused(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StepLogError) as refused:
        StepLogWriter(StepLogSettings(tmp_path / name, AMPLE_BYTES))
    assert str(refused.value) == f"--step-log {tmp_path / name} {words}"


def test_a_masked_log_has_no_prompt_and_no_grammar_in_it_and_replays(tmp_path: Path) -> None:
    record_some(tmp_path / "plain", calls_per_file=20)
    record_some(tmp_path / "masked", masks_tokens=True, calls_per_file=20)
    prompt = group(0, 6).prompt_token_ids.astype("<i4").tobytes()
    for name, is_there in (("plain", True), ("masked", False)):
        content = b"".join(path.read_bytes() for path in files_in(tmp_path / name))
        assert (prompt in content) is is_there
        assert (SECRET in content) is is_there
        assert (Grammar(SECRET + bytes([1])).digest in content) is is_there
        assert len(files_in(tmp_path / name)) > 1
        check_replay(tmp_path / name)


def test_each_start_of_a_scheduler_is_a_log_of_its_own(tmp_path: Path) -> None:
    record_some(tmp_path)
    first = replayed(tmp_path).counts
    record_some(tmp_path)
    both = check_replay(tmp_path).counts
    assert (both.num_logs, both.num_steps) == (2, 2 * first.num_steps)
