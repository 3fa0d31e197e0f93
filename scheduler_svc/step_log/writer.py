"""Writes a step log: what the event loop puts into a queue, a thread makes records of and writes to files.

Nothing here stops the service. Should the thread fall behind, or a file not take what is written, the log ends with one
warning; what was written is whole.
"""

import logging
import os
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import octavo
from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event
from scheduler_svc.core.waiting.tenant_shares import EQUAL_SHARES, TenantShares
from scheduler_svc.step_log.block_names import LogNames, NamedBlocks
from scheduler_svc.step_log.log_files import FORMAT_VERSION, MAGIC, FileName, files_in, frame
from scheduler_svc.step_log.masking import TokenMask
from scheduler_svc.step_log.records import encode_shares
from scheduler_svc.step_log.snapshot import core_digest

log = logging.getLogger(__name__)

# How long calls are gathered before they are written, in seconds: a scheduler that is killed loses so much of its log.
FLUSH_INTERVAL_S = 0.1
# Calls that wait to be written, at most; some minutes of steps.
MAX_PENDING_CALLS = 20_000
# Into how many files the allowed size is divided: so much of the oldest part is lost at once.
NUM_FILES = 8

# Of a call; or what makes it in the writer's thread, called with the mask.
Record: TypeAlias = pb.LogRecord | Callable[[TokenMask | None], pb.LogRecord]


class StepLogError(OctavoServiceError):
    """The log cannot be begun."""


@dataclass(frozen=True, slots=True)
class StepLogSettings:
    """What the configuration says of the log.

    Attributes:
        directory: Where the files are.
        max_bytes: Size of all files together, about.
        masks_tokens: Whether token ids are written under other names.
        policy: Name of the queue's policy.
        tenants: What tenants may have at the start.
    """

    directory: Path
    max_bytes: int
    masks_tokens: bool = False
    policy: str = "fcfs"
    tenants: TenantShares = EQUAL_SHARES


# A file is to begin with a snapshot.
_FileStart: TypeAlias = tuple[pb.LogHeader, pb.Snapshot]
_Call: TypeAlias = tuple[Record, TokenMask | None, str, tuple[NamedBlocks, ...], float]


def _make_private(directory: Path) -> None:
    """Make a folder that its owner alone can look into; one that is there becomes so if it is ours and no other's.

    Raises: OSError: it cannot be made.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid == os.geteuid() and all(map(FileName.of, directory.iterdir())):
        directory.chmod(0o700)


class StepLogWriter:
    """One log, from the start of a scheduler to its end.

    Args:
        settings: Where to, and how much.

    Attributes:
        is_recording: Whether calls are still written.
        trouble: Why they are not any more; empty: they are.
        wants_snapshot: Whether the file is full: the next one is to begin, before the next call.

    Raises: StepLogError: the folder cannot be written to.
    """

    def __init__(self, settings: StepLogSettings) -> None:
        self.is_recording = True
        self.trouble = ""
        self.wants_snapshot = False
        self._settings = settings
        self._pending: deque[_Call | _FileStart] = deque()
        self._names = LogNames()
        self._log_id = secrets.token_hex(16)
        self._name = FileName(time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()), self._log_id[:8], 0)
        self._file_bytes = max(1, settings.max_bytes // NUM_FILES)
        self._num_bytes = 0
        self._descriptor = -1
        self._is_closing = threading.Event()
        try:
            _make_private(settings.directory)
            self._begin_file(self.header(monotonic_s(), settings.tenants))
        except FileExistsError as error:
            raise StepLogError(f"--step-log {settings.directory} is a file; give a directory") from error
        except OSError as error:
            raise StepLogError(
                f"--step-log {settings.directory} cannot be made or written to: {error.strerror}; give another "
                "directory"
            ) from error
        self._thread = threading.Thread(target=self._run, name="step-log", daemon=True)
        self._thread.start()

    @property
    def masks_tokens(self) -> bool:
        """Whether token ids are written under other names."""
        return self._settings.masks_tokens

    # On the event loop ---------------------------------------------------------------------------

    def put(
        self, record: Record, mask: TokenMask | None, raised: str = "", named: tuple[NamedBlocks, ...] = ()
    ) -> None:
        """Take the record of a call.

        Args:
            record: The record, which belongs to the writer now.
            mask: Gives tokens other names; None: they stay.
            raised: The class of its exception; empty: none.
            named: Blocks that were named since the call before it.
        """
        if not self.is_recording:
            return
        self._pending.append((record, mask, raised, named, monotonic_s()))
        if len(self._pending) > MAX_PENDING_CALLS:
            self._stop(f"the disk is too slow: {MAX_PENDING_CALLS} records are waiting to be written")

    def begin_file(self, header: pb.LogHeader, snapshot: pb.Snapshot) -> None:
        """Begin the next file before the next call, with a snapshot of the fleet as it is now."""
        self.wants_snapshot = False
        if self.is_recording:
            self._pending.append((header, snapshot))

    def header(self, now_s: float, tenants: TenantShares) -> pb.LogHeader:
        """Return the header of a file that begins now, without a snapshot."""
        return pb.LogHeader(
            format_version=FORMAT_VERSION,
            release=octavo.__version__,
            log_id=self._log_id,
            started_at_unix_us=round(time.time() * 1e6),
            started_at_s=now_s,
            has_masked_tokens=self._settings.masks_tokens,
            core_digest=core_digest(),
            policy=self._settings.policy,
            tenants=encode_shares(tenants),
        )

    def fail(self, error: Exception) -> None:
        """End the log, where an error of ours was caught: it must not end the service."""
        log.exception(Event("step_log_failed"))
        self.wants_snapshot = False
        self._stop(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Write what is left, and end."""
        self._is_closing.set()
        self._thread.join()

    def _stop(self, cause: str) -> None:
        if self.is_recording:
            self.is_recording = False
            self.trouble = cause
            log.warning(Event("step_log_stopped", directory=str(self._settings.directory), cause=cause))

    # In the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing.wait(FLUSH_INTERVAL_S):
            self._write_pending()
        self._write_pending()
        self._close_file()

    def _write_pending(self) -> None:
        """Write what is there now."""
        try:
            frames: list[bytes] = []
            for _ in range(len(self._pending)):
                pending = self._pending.popleft()
                if len(pending) == 2:
                    self._write(frames)
                    frames = []
                    header, snapshot = pending
                    snapshot.names = self._names.others(snapshot.names)
                    header.snapshot = zlib.compress(snapshot.SerializeToString(), 1)
                    self._begin_file(header)
                    continue
                made, mask, raised, named, at_s = pending
                record = made if isinstance(made, pb.LogRecord) else made(mask)
                record.at_s, record.raised = at_s, raised
                self._names.rename(record)
                record.named_blocks = self._names.rows(named, mask)
                frames.append(frame(record.SerializeToString()))
            self._write(frames)
        except OSError as error:
            self._stop(error.strerror or str(error))
        except Exception as error:
            self.fail(error)
        if not self.is_recording:
            self._pending.clear()

    def _write(self, frames: list[bytes]) -> None:
        if not frames or not self.is_recording:
            return
        content = memoryview(b"".join(frames))
        while content:
            written = os.write(self._descriptor, content)
            self._num_bytes += written
            content = content[written:]
        if self._num_bytes >= self._file_bytes:
            self.wants_snapshot = True

    def _begin_file(self, header: pb.LogHeader) -> None:
        """Begin the next file; the oldest ones go that would be too much with it."""
        self._close_file()
        self._name = self._name._replace(number=self._name.number + 1)
        self._names.begin_file()
        path = self._settings.directory / str(self._name)
        self._make_room(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._num_bytes = 0
        self._write([MAGIC, frame(header.SerializeToString())])
        self.wants_snapshot = False

    def _make_room(self, newest: Path) -> None:
        """Remove the oldest files: those that stay have room for one more, of this log or of earlier ones."""
        files = [path for path in files_in(self._settings.directory) if path != newest]
        sizes = [path.stat().st_size for path in files]
        total = sum(sizes)
        for path, size in zip(files, sizes, strict=True):
            if total + self._file_bytes <= self._settings.max_bytes:
                break
            path.unlink()
            total -= size

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
