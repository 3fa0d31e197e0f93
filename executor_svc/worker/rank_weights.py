"""New weights in a group: each rank loads its share from its own disk, and none before all have checked theirs.

Rank 0 names the folder, and each other rank answers with the model_hash that it finds there, or why it refuses the
weights. Rank 0 compares, and has all load or all keep what they have. Only rank 0 makes the digest of all bytes: that
other ranks read the same files is seen by the model_hash, which has names, shapes and first rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from executor_svc.parallel.connection import Connection, Frame, FrameKind
from executor_svc.worker.interface import Agree, Worker
from octavo_shared.errors import ModelLoadError


class RankWorker(Worker, Protocol):
    """The worker of a rank: it asks before it overwrites weights."""

    def update_weights(self, folder: Path, weights_digest: str, agree: Agree = lambda _: None) -> None:
        """See `Worker.update_weights`, and `Agree`."""


class _NotAgreedError(ModelLoadError):
    """Another rank refuses the weights."""


def update_all(worker: RankWorker, connections: Sequence[Connection], folder: Path, weights_digest: str) -> None:
    """Update the weights of all ranks; see `Worker.update_weights`.

    Args:
        worker: Of rank 0.
        connections: To ranks 1, 2 and so on, for steps.
        folder: As all ranks see it.
        weights_digest: That the weights must have; empty: any.
    """
    for connection in connections:
        connection.send(FrameKind.UPDATE_WEIGHTS, str(folder).encode())
    answers: list[Frame] = []
    are_loading = False

    def agree(model_hash: str) -> None:
        nonlocal are_loading
        answers.extend(awaited(connection) for connection in connections)
        for connection, (kind, payload) in zip(connections, answers, strict=True):
            if kind is not FrameKind.WEIGHTS_CHECKED:
                raise ModelLoadError(f"{connection.peer}: {payload.decode(errors='replace')}")
            if payload.decode() != model_hash:
                raise ModelLoadError(f"{connection.peer} has other files in {folder} than rank 0")
        are_loading = True
        for connection in connections:
            connection.send(FrameKind.LOAD_WEIGHTS)

    try:
        worker.update_weights(folder, weights_digest, agree)
    except Exception:
        for connection in () if are_loading else connections:
            if not answers:  # not asked for yet
                awaited(connection)
            connection.send(FrameKind.KEEP_WEIGHTS)
        raise
    for connection in connections:  # one may load for longer than a collective may take
        awaited(connection)


def update_share(worker: RankWorker, connection: Connection, folder: Path) -> None:
    """Update the weights of a rank above 0 as rank 0 wants it. Raises: DeviceLostError: it failed half way."""

    def agree(model_hash: str) -> None:
        connection.send(FrameKind.WEIGHTS_CHECKED, model_hash.encode())
        if awaited(connection)[0] is not FrameKind.LOAD_WEIGHTS:
            raise _NotAgreedError

    try:
        worker.update_weights(folder, "", agree)
    except _NotAgreedError:
        return
    except ModelLoadError as error:
        connection.send(FrameKind.WEIGHTS_REFUSED, str(error).encode())
        awaited(connection)
    else:
        connection.send(FrameKind.WEIGHTS_LOADED)


def awaited(connection: Connection) -> Frame:
    """Return the next frame; if the peer is lost, this process ends."""
    while (frame := connection.frames.get()) is None:
        pass  # a nudge of steps that are done already
    return frame
