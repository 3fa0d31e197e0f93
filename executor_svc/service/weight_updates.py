"""New weights as they come in: from a folder that the configuration allows, or piece by piece from the scheduler.

Pieces are written to a folder of their own, and nothing in use is touched before the last one is there: a call that is
cut leaves the old weights as they are. Memory is bounded by one message, the disk by the size of the model.
Such a folder is locked while its process lives: what a killed one leaves is removed at the next start.
"""

import asyncio
import fcntl
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.values.wording import shown
from octavo_shared.errors import CallerError, FencedError, InvalidFieldError
from octavo_shared.step_wire.model_file import find_link_out

T = TypeVar("T")

MAX_CHUNK_BYTES = 2 * 2**20
MAX_FILES = 10_000
# What an update may have at least, however small the model is.
SMALLEST_LIMIT_BYTES = 2**30

_PREFIX = ".incoming-"
_LOCK = "lock"


class WeightUpdates:
    """Finds the folder of an update; one update at a time.

    Args:
        folders: Where sources may lie; what comes in pieces is written below the first one. Empty: no update is taken.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._is_busy = False

    def remove_left_over(self) -> None:
        """Remove what executors that are gone have received; others may write to the same folder."""
        for path in self._folders[0].glob(f"{_PREFIX}*") if self._folders else ():
            try:
                with _locked(path):
                    shutil.rmtree(path, ignore_errors=True)
            except OSError:  # it is in use, or another one removes it
                continue

    @asynccontextmanager
    async def receiving(
        self, begin: pb.UpdateWeightsBegin, messages: AsyncIterator[pb.UpdateWeightsRequest], weights_bytes: int
    ) -> AsyncIterator[Path]:
        """Give the folder with the weights of an update, all of them there, for the length of a block.

        Args:
            begin: The beginning of the update.
            messages: The others.
            weights_bytes: Size of the model's own weight files; see `Worker.weights_bytes`.

        Raises:
            FencedError: another update is being received.
            InvalidFieldError: a source that may not be read, or is not there.
            CallerError: the messages are no files one after the other, are too many, or cannot be written.
        """
        if self._is_busy:
            raise FencedError("another update of the weights is under way; wait for its end")
        self._is_busy = True
        scratch: tuple[Path, BinaryIO] | None = None
        try:
            if begin.source:
                yield self.find(begin.source)
                return
            scratch = self._make_scratch()
            await _write(scratch[0], messages, max(2 * weights_bytes, SMALLEST_LIMIT_BYTES))
            yield scratch[0]
        finally:
            self._is_busy = False
            if scratch is not None:
                await to_its_end(_in_thread(_remove, *scratch))  # a call that is cut may be cancelled here

    def find(self, source: str) -> Path:
        """Return the folder of a source, without symbolic links. Raises InvalidFieldError: it may not be read."""
        try:
            for folder in self._folders:
                path = (folder / source).resolve()
                if not path.is_relative_to(folder) or not path.is_dir():
                    continue
                if any(part.startswith(".") for part in path.relative_to(folder).parts):
                    raise InvalidFieldError("source", source, "a folder whose name does not begin with a dot")
                if (link := find_link_out(path, self._folders)) is not None:
                    raise InvalidFieldError(
                        "source", source, f"a folder without links out of --weights-dir; put {shown(link.name)} there"
                    )
                return path
        except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have, or links in a circle
            raise InvalidFieldError("source", source, f"a folder ({error})") from error
        raise InvalidFieldError("source", source, "a folder in one of the folders of --weights-dir")

    def _make_scratch(self) -> tuple[Path, BinaryIO]:
        """Return a new folder for an update, and its lock."""
        if not self._folders:
            raise CallerError("the executor takes no weights; start it with --weights-dir")
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._folders[0]))
            return folder, _locked(folder)
        except OSError as error:
            raise CallerError(
                f"weights in pieces need a folder that can be written: {shown(str(self._folders[0]))}: {error.strerror}"
            ) from error


async def to_its_end(change: Awaitable[T]) -> T:
    """Make a change to its end, however often the call is cancelled meanwhile: its thread still uses the files."""
    made = asyncio.ensure_future(change)
    cancelled: asyncio.CancelledError | None = None
    while not made.done():
        try:
            await asyncio.wait({made})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None or made.cancelled():
        return made.result()
    made.exception()  # nobody waits for it
    raise cancelled


def _in_thread(function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
    """Call it on a thread, also if everything on the loop is cancelled before a thread is free."""
    return asyncio.get_running_loop().run_in_executor(None, function, *args)


def _locked(folder: Path) -> BinaryIO:
    """Lock a folder of an update while the file is open. Raises: OSError: another process has it."""
    file = (folder / _LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _remove(folder: Path, lock: BinaryIO) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


async def _write(folder: Path, messages: AsyncIterator[pb.UpdateWeightsRequest], max_bytes: int) -> None:
    """Write files as they come, each message before the next one is read."""
    num_files, num_bytes, is_whole = 0, 0, False
    async for message in messages:
        if message.WhichOneof("message") != "chunk":
            raise CallerError("behind the beginning of an update come its chunks")
        chunk = message.chunk
        if len(chunk.content) > MAX_CHUNK_BYTES:
            raise CallerError(f"a chunk has {len(chunk.content)} bytes; the limit is {MAX_CHUNK_BYTES}")
        num_bytes += len(chunk.content)
        if num_bytes > max_bytes:
            raise CallerError(
                f"the update has more than {max_bytes} bytes, twice the weight files of the model or "
                f"{SMALLEST_LIMIT_BYTES}: send the weights of this model, once"
            )
        num_files += chunk.begins_file
        if num_files > MAX_FILES:
            raise CallerError(f"an update has more than {MAX_FILES} files")
        if not num_files:
            raise CallerError("the first chunk of an update must begin a file")
        await to_its_end(_in_thread(_append, folder / f"{num_files:05}.safetensors", chunk.content))
        is_whole |= chunk.is_last
    if not is_whole:
        raise CallerError("an update without a source needs chunks, up to one with is_last")


def _append(path: Path, content: bytes) -> None:
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError as error:
        raise CallerError(
            f"the new weights cannot be written to {shown(str(path.parent.parent))}: {error.strerror}; make room "
            "there, or start the executor with another folder as the first one of --weights-dir"
        ) from error
