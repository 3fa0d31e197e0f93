"""Goes through the logs of a folder: which file continues which, where a snapshot is taken up, what came of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from octavo.steplog.v1 import step_log_pb2 as pb
from scheduler_svc.replay.core_replay import Applied, CoreReplay, DifferenceError, NoSenseError
from scheduler_svc.replay.log_reader import Log, LogFile, read_logs
from scheduler_svc.step_log.snapshot import SnapshotError


@dataclass(slots=True)
class Counts:
    """What was replayed so far, and what is wrong with the log.

    `span_s` is the time between the first and the last decision, over all logs.
    """

    num_files: int = 0
    num_bytes: int = 0
    num_calls: int = 0
    num_steps: int = 0
    num_logs: int = 0
    span_s: float = 0.0
    troubles: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Moment:
    """A call that was made: where it stands, the fleet after it, and what became of it."""

    file: LogFile
    record: pb.LogRecord
    replay: CoreReplay
    applied: Applied
    is_first: bool  # of this fleet: it begins empty, or with a snapshot


class ReplayRun:
    """One go through the logs of a folder.

    Args:
        directory: The folder.

    Attributes:
        counts: What was replayed so far.
        on_begin: Called with each fleet that is taken up, before its first call.
        difference: What is decided otherwise than recorded; the run ended there. None: nothing.

    Raises: NoLogError: there is no log.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._logs = read_logs(directory)
        self.counts = Counts()
        self.on_begin: Callable[[CoreReplay], None] = lambda replay: None
        self.difference: DifferenceError | None = None

    @property
    def first_header(self) -> pb.LogHeader | None:
        """The header of the first file that can be read."""
        return next((file.header for log in self._logs for file in log.files), None)

    def play(self) -> Iterator[Moment]:
        """Make the calls one by one, until the end or the first difference."""
        try:
            for log in self._logs:
                yield from self._play_log(log)
        except DifferenceError as difference:
            self.difference = difference

    def _play_log(self, log: Log) -> Iterator[Moment]:
        counts = self.counts
        counts.num_logs += 1
        counts.troubles += log.troubles
        replay: CoreReplay | None = None
        num_next = 0
        for file in log.files:
            is_first = replay is None or file.header.num_earlier_calls != num_next
            if is_first:
                replay = self._begin(file, is_gap=replay is not None)
                num_next = file.header.num_earlier_calls
            if replay is None:
                continue
            counts.num_files += 1
            counts.num_bytes += file.num_bytes
            begun_s = replay.now_s
            for record in file.records():
                try:
                    applied = replay.apply(record)
                except NoSenseError as error:
                    file.trouble = f"{file.place}: its call {record.WhichOneof('call')} is about {error}"
                    break
                except DifferenceError as difference:
                    difference.place = file.place
                    raise
                num_next += 1
                counts.num_calls += 1
                counts.num_steps += applied.step is not None
                yield Moment(file, record, replay, applied, is_first)
                is_first = False
            counts.span_s += replay.now_s - begun_s
            if file.trouble:
                counts.troubles.append(file.trouble)
                replay = None

    def _begin(self, file: LogFile, *, is_gap: bool) -> CoreReplay | None:
        """Take up the fleet with which a file begins; None: it cannot be."""
        if is_gap:
            self.counts.troubles.append(
                f"{file.path.name}: earlier calls are missing; replay continues from its snapshot"
            )
        try:
            replay = CoreReplay(file.header, file.snapshot())
        except SnapshotError as error:
            self.counts.troubles.append(str(error))
            return None
        self.on_begin(replay)
        return replay
