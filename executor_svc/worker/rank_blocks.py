"""Blocks of transfers in a group: a block travels as the shares of all ranks, one after the other.

The share of a rank is its KV heads, and its part of a state; all are of one size. Rank 0 reads and writes its own and
asks the other ranks for theirs, over sockets of their own: no step waits for blocks, and blocks wait only for the steps
that rank 0 had launched when their transfer began. One part of a transfer is on its way at a time.
"""

import struct
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from executor_svc.parallel.connection import Connection, Frame, FrameKind
from executor_svc.worker.interface import Buffer, Worker
from octavo_shared.step_wire.step import Int32Array

# Before the ids of blocks, int32, and content: the number of `begin` calls that come before, the number of blocks.
_REQUEST = struct.Struct("<QI")

Result = TypeVar("Result")


class ShareError(Exception):
    """Another rank could not read or write its share; the message says why."""


class GroupBlocks:
    """Rank 0's end. Any thread may call `read` and `write`.

    Args:
        worker: Has this rank's share.
        connections: To ranks 1, 2 and so on.
    """

    def __init__(self, worker: Worker, connections: Sequence[Connection]) -> None:
        self._worker = worker
        self._connections = connections
        self._exchanging = threading.Lock()
        self._num_begun = 0

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of a block in each of the pools, over all ranks."""
        return tuple((1 + len(self._connections)) * num_bytes for num_bytes in self._worker.block_bytes)

    def begin(self) -> None:
        """Transfers begin behind the steps launched so far; the other ranks are told among their steps."""
        self._num_begun += 1
        self._worker.begin_transfers()

    def read(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the content of blocks of one pool, [n, ranks * bytes of a share]. Raises: ShareError."""
        requests = [b""] * len(self._connections)
        own, others = self._exchange(
            FrameKind.READ_BLOCKS, block_ids, requests, lambda: self._worker.read_blocks(block_ids)
        )
        shares = (np.frombuffer(share, np.uint8).reshape(len(block_ids), -1) for share in (own, *others))
        return np.concatenate(list(shares), axis=1)

    def write(self, block_ids: Int32Array, content: Buffer) -> None:
        """Make `content`, as of `read`, that of blocks. Raises: ShareError."""
        num_ranks = 1 + len(self._connections)
        own, *others = np.frombuffer(content, np.uint8).reshape(len(block_ids), num_ranks, -1).swapaxes(0, 1)
        self._exchange(
            FrameKind.WRITE_BLOCKS,
            block_ids,
            [share.tobytes() for share in others],
            lambda: self._worker.write_blocks(block_ids, own.tobytes()),
        )

    def _exchange(
        self, kind: FrameKind, block_ids: Int32Array, contents: Sequence[bytes], run: Callable[[], Result]
    ) -> tuple[Result, list[bytes]]:
        """Ask all other ranks, and meanwhile run our part; return its result and the answers."""
        with self._exchanging:
            request = _REQUEST.pack(self._num_begun, len(block_ids)) + block_ids.astype("<i4").tobytes()
            for connection, content in zip(self._connections, contents, strict=True):
                connection.send(kind, request + content)
            try:
                own = run()
            finally:  # the next request is not to get the answers to this one
                answers = [_awaited(connection) for connection in self._connections]
        for connection, (how, payload) in zip(self._connections, answers, strict=True):
            if how is not FrameKind.BLOCKS:
                raise ShareError(f"{connection.peer}: {payload.decode(errors='replace')}")
        return own, [payload for _, payload in answers]


def _awaited(connection: Connection) -> Frame:
    """Return the answer of a rank; if the rank is lost, this process ends."""
    frame = connection.frames.get()
    assert frame is not None, "nobody nudges it"
    return frame


class RankShare:
    """Any other rank's end: reads and writes its share as rank 0 asks, on a thread of its own.

    Args:
        worker: Has the share.
        connection: To rank 0, for blocks alone.
    """

    def __init__(self, worker: Worker, connection: Connection) -> None:
        self._worker = worker
        self._connection = connection
        self._begun = threading.Condition()
        self._num_begun = 0
        threading.Thread(target=self._serve, name="blocks", daemon=True).start()

    def begin(self) -> None:
        """Transfers begin behind the steps launched so far; called by the thread that launches."""
        self._worker.begin_transfers()
        with self._begun:
            self._num_begun += 1
            self._begun.notify()

    def _serve(self) -> None:
        while (frame := _awaited(self._connection))[0] is not FrameKind.STOP:
            try:
                answer = FrameKind.BLOCKS, self._answer(*frame)
            except Exception as error:  # whatever it was, rank 0 waits for an answer
                answer = FrameKind.UNDONE, f"{type(error).__name__}: {error}".encode()
            self._connection.send(*answer)

    def _answer(self, kind: FrameKind, payload: bytes) -> bytes:
        num_begun, num_blocks = _REQUEST.unpack_from(payload)
        begin = _REQUEST.size + 4 * num_blocks
        block_ids = np.frombuffer(payload[_REQUEST.size : begin], "<i4")
        with self._begun:
            self._begun.wait_for(lambda: self._num_begun >= num_begun)
        if kind is FrameKind.READ_BLOCKS:
            return np.frombuffer(self._worker.read_blocks(block_ids), np.uint8).tobytes()
        self._worker.write_blocks(block_ids, payload[begin:])
        return b""
