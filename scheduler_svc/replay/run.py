"""Goes through the logs of a folder: what is wrong with a file, which one continues which, what came of each call.

What is whole is replayed.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from google.protobuf.message import DecodeError

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.errors import OctavoServiceError
from scheduler_svc.replay.core_replay import Applied, CoreReplay, NoSenseError
from scheduler_svc.replay.difference import DifferenceError
from scheduler_svc.step_log.log_files import FORMAT_VERSION, BrokenFileError, FileName, Framed, files_in, read_records
from scheduler_svc.step_log.snapshot import ReplayedFleet, Snapshot, SnapshotError, core_digest, load

# A snapshot of a fleet with sixty million tokens that are alive.
MAX_SNAPSHOT_BYTES = 2**28

# The year 9999.
_END_OF_TIME_US = 253_370_764_800_000_000
_WHAT_TO_NAME = "give the directory of the scheduler's --step-log"


class NoLogError(OctavoServiceError):
    """There is no log to read; the message says why."""


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

    file: "LogFile"
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

    def _play_log(self, log: "Log") -> Iterator[Moment]:
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

    def _begin(self, file: "LogFile", *, is_gap: bool) -> CoreReplay | None:
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


# Files -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LogFile:
    """One file that begins as it should.

    Attributes:
        path: Where it is.
        header: Its first record.
        trouble: What is wrong with it, known when its records were read; empty: nothing.
        num_bytes: Its size.
        place: File, number and byte of the record that was read last.
    """

    path: Path
    header: pb.LogHeader
    trouble: str = ""
    num_bytes: int = 0
    place: str = ""

    def records(self) -> Iterator[pb.LogRecord]:
        """Yield its calls, up to the first that cannot be read, which `trouble` then names."""
        self.trouble = ""
        try:
            for framed in read_records(self.path):
                if framed.number:
                    self.place = f"{self.path.name} at record {framed.number}, byte {framed.offset}"
                    yield self._decode(framed)
        except BrokenFileError as error:
            self.trouble = str(error)

    def _decode(self, framed: Framed) -> pb.LogRecord:
        try:
            record = pb.LogRecord.FromString(framed.content)
        except DecodeError as error:
            raise BrokenFileError(f"{self.place}: it is not a valid record") from error
        if record.WhichOneof("call") is None:
            raise BrokenFileError(
                f"{self.place}: this release does not know this call; replay it with release {self.header.release}, "
                "which wrote it"
            )
        return record

    def snapshot(self) -> Snapshot[ReplayedFleet] | None:
        """Return the fleet with which it begins; None: an empty one.

        Raises: SnapshotError: it was written by another planner, or cannot be read.
        """
        header = self.header
        if not header.HasField("snapshot"):
            return None
        if header.core_digest != core_digest():
            raise SnapshotError(
                f"{self.path.name} begins with a snapshot of release {header.release} whose core has different code "
                f"({header.core_digest[:12]}, here {core_digest()[:12]}): another release can replay a log only from "
                "its first file on"
            )
        try:
            return load(_decompressed(header.snapshot), header)
        except SnapshotError as error:
            raise SnapshotError(f"{self.path.name}: {error}") from error


def _decompressed(content: bytes) -> bytes:
    """Return what zlib has compressed. Raises SnapshotError: it has not, or it is too much."""
    try:
        decompressor = zlib.decompressobj()
        found = decompressor.decompress(content, MAX_SNAPSHOT_BYTES)
    except zlib.error as error:
        raise SnapshotError(f"the snapshot cannot be read: {error}") from error
    if not decompressor.eof:
        raise SnapshotError(
            f"the snapshot was truncated, or has more than the {MAX_SNAPSHOT_BYTES} bytes that are read"
        )
    return found


@dataclass(slots=True)
class Log:
    """The files of one run of a scheduler, in order; `troubles` are those of files that do not even begin."""

    files: list[LogFile] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


def read_logs(directory: Path) -> list[Log]:
    """Return the logs of a folder, oldest first.

    Raises: NoLogError: there is none.
    """
    if directory.is_file():
        raise NoLogError(f"{directory} is a file; give its directory, {directory.absolute().parent}")
    if not directory.is_dir():
        raise NoLogError(f"{directory} is not a directory; {_WHAT_TO_NAME}")
    paths = files_in(directory)
    if not paths:
        raise NoLogError(f"{directory} has no file of a step log (scheduler-*.steps); {_WHAT_TO_NAME}")
    return [_read_log(list(of_log)) for _, of_log in groupby(paths, lambda path: (FileName.of(path) or ())[:2])]


def _read_log(paths: list[Path]) -> Log:
    log = Log()
    for path in paths:
        try:
            log.files.append(LogFile(path, _header(path), num_bytes=path.stat().st_size))
        except BrokenFileError as error:
            log.troubles.append(str(error))
    return log


def _header(path: Path) -> pb.LogHeader:
    """Return the header of a file. Raises BrokenFileError: it has none that this release can read."""
    framed = next(read_records(path), None)
    if framed is None:
        raise BrokenFileError(f"{path.name} at record 0, byte 16: the file was truncated here")
    try:
        header = pb.LogHeader.FromString(framed.content)
    except DecodeError as error:
        raise BrokenFileError(f"{path.name} at record 0, byte {framed.offset}: it is not a valid header") from error
    if header.format_version != FORMAT_VERSION:
        raise BrokenFileError(
            f"{path.name} has version {header.format_version} of the format, written by release {header.release}; "
            f"this release reads version {FORMAT_VERSION}: use the release that wrote it"
        )
    if not (0 <= header.started_at_unix_us < _END_OF_TIME_US and math.isfinite(header.started_at_s)):
        raise BrokenFileError(f"{path.name} at record 0, byte {framed.offset}: its start time is missing")
    return header
