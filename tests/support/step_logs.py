"""Step logs of fleets in this process: record one into a folder, replay the folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.steplog.v1 import step_log_pb2 as pb
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.waiting.policy import Policy, PriorityPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.replay.run import ReplayRun
from scheduler_svc.step_log.log_files import MAGIC, frame, read_records
from scheduler_svc.step_log.recording_fleet import RecordingFleet
from scheduler_svc.step_log.writer import StepLogSettings, StepLogWriter
from tests.support.fleet import MakeFleet

AMPLE_BYTES = 2**30


@contextmanager
def recording(
    directory: Path,
    *,
    masks_tokens: bool = False,
    calls_per_file: int | None = None,
) -> Iterator[MakeFleet]:
    """Give what makes a fleet that is recorded, into files of so many calls; None: into one."""
    writers: list[StepLogWriter] = []

    def make(queue: WaitingQueue, policy: Policy, prefix_key: bytes, is_complete: Callable[[], bool]) -> Fleet:
        name = "priority" if isinstance(policy, PriorityPolicy) else "fcfs"
        settings = StepLogSettings(directory, AMPLE_BYTES, masks_tokens, name, queue.shares)
        writer = StepLogWriter(settings)
        writers.append(writer)
        fleet = RecordingFleet(queue, policy, prefix_key, is_complete, writer)
        if calls_per_file is not None:
            _rotate(fleet, calls_per_file)
        return fleet

    yield make
    for writer in writers:
        writer.close()
        assert writer.is_recording, "the log was stopped"


def _rotate(fleet: RecordingFleet, calls_per_file: int) -> None:
    """Let a file be full after so many calls."""
    num_calls = 0

    def begin_file_if_wanted() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls % calls_per_file == 0:
            fleet._begin_file()

    fleet._begin_file_if_wanted = begin_file_if_wanted  # type: ignore[method-assign]


def replayed(directory: Path) -> ReplayRun:
    """Replay a folder; return the run."""
    run = ReplayRun(directory)
    for _ in run.play():
        pass
    return run


def check_replay(directory: Path) -> ReplayRun:
    """Replay a folder, which must be whole and decided again as it is recorded."""
    run = replayed(directory)
    if run.difference is not None:
        raise AssertionError(f"{run.difference.where}: {[str(place) for place in run.difference.places]}")
    assert run.counts.troubles == [], run.counts.troubles
    return run


def rewrite(path: Path, edit: Callable[[pb.LogRecord], None]) -> None:
    """Write a file again with its calls edited, as if they had been recorded so."""
    framed = list(read_records(path))
    contents = [framed[0].content]
    for record in map(pb.LogRecord.FromString, (one.content for one in framed[1:])):
        edit(record)
        contents.append(record.SerializeToString())
    path.write_bytes(MAGIC + b"".join(map(frame, contents)))


def edit_header(path: Path, edit: Callable[[pb.LogHeader], None]) -> None:
    """Write a file again with its header edited."""
    framed = list(read_records(path))
    header = pb.LogHeader.FromString(framed[0].content)
    edit(header)
    path.write_bytes(MAGIC + b"".join(map(frame, [header.SerializeToString(), *(one.content for one in framed[1:])])))
