"""New weights as they come in: from a folder that the configuration allows, or piece by piece from the scheduler.

Pieces are written to a folder of their own, and nothing in use is touched before the last one is there: a call that is
cut leaves the old weights as they are. Memory is bounded by one message.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO

from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.values.wording import shown
from octavo_shared.errors import CallerError, FencedError, InvalidFieldError

MAX_CHUNK_BYTES = 2 * 2**20
MAX_FILES = 10_000


class WeightUpdates:
    """Finds the folder of an update; one update at a time.

    Args:
        folders: Where sources may lie; what comes in pieces is written below the first one. Empty: no update is taken.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._is_busy = False

    @asynccontextmanager
    async def receiving(
        self, begin: pb.UpdateWeightsBegin, messages: AsyncIterator[pb.UpdateWeightsRequest]
    ) -> AsyncIterator[Path]:
        """Give the folder with the weights of an update, all of them there, for the length of a block.

        Raises:
            FencedError: another update is being received.
            InvalidFieldError: a source that may not be read, or is not there.
            CallerError: the messages are no files one after the other.
        """
        if self._is_busy:
            raise FencedError("another update of the weights is under way; wait for its end")
        self._is_busy = True
        try:
            if begin.source:
                yield self.find(begin.source)
                return
            with self._scratch() as folder:
                await _write(folder, messages)
                yield folder
        finally:
            self._is_busy = False

    def find(self, source: str) -> Path:
        """Return the folder of a source, without symbolic links. Raises InvalidFieldError: it may not be read."""
        try:
            for folder in self._folders:
                path = (folder / source).resolve()
                if path.is_relative_to(folder) and path.is_dir():
                    return path
        except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have, or links in a circle
            raise InvalidFieldError("source", source, f"a folder ({error})") from error
        raise InvalidFieldError("source", source, "a folder in one of the folders of --weights-dir")

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        if not self._folders:
            raise CallerError("the executor takes no weights; start it with --weights-dir")
        try:
            folder = tempfile.mkdtemp(prefix=".incoming-", dir=self._folders[0])
        except OSError as error:
            raise CallerError(
                f"weights in pieces need a folder that can be written: {shown(str(self._folders[0]))}: {error.strerror}"
            ) from error
        try:
            yield Path(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


async def _write(folder: Path, messages: AsyncIterator[pb.UpdateWeightsRequest]) -> None:
    """Write files as they come, each message before the next one is read."""
    num_files, file, is_whole = 0, None, False
    try:
        async for message in messages:
            if message.WhichOneof("message") != "chunk":
                raise CallerError("behind the beginning of an update come its chunks")
            chunk = message.chunk
            if len(chunk.content) > MAX_CHUNK_BYTES:
                raise CallerError(f"a chunk has {len(chunk.content)} bytes; the limit is {MAX_CHUNK_BYTES}")
            if chunk.begins_file:
                num_files += 1
                if num_files > MAX_FILES:
                    raise CallerError(f"an update has more than {MAX_FILES} files")
                if file is not None:
                    file.close()
                file = (folder / f"{num_files:05}.safetensors").open("wb")
            if file is None:
                raise CallerError("the first chunk of an update must begin a file")
            await asyncio.to_thread(_append, file, chunk.content)
            is_whole |= chunk.is_last
    finally:
        if file is not None:
            file.close()
    if not is_whole:
        raise CallerError("an update without a source needs chunks, up to one with is_last")


def _append(file: BinaryIO, content: bytes) -> None:
    try:
        file.write(content)
    except OSError as error:
        raise CallerError(f"the new weights cannot be written: {os.strerror(error.errno or 0)}") from error
