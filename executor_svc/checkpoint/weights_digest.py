"""The digest of a model's weights: two models with one digest are the same model, bit for bit.

`Checkpoint.model_hash` looks at shapes and first rows alone, since it is to be quick. The digest looks at every byte.
Threads make it while the weights are loaded, from the same pages: loading is not longer for it.

What enters, each part with its length: config.json byte for byte, as it changes what is computed; then of every tensor,
by name, its name, its number format, its shape and its bytes. How the tensors are cut into files does not matter, nor
what else is in the directory: generation_config.json sets defaults of requests, and a request says what it used.
Quantization is not here: it is a number format of the executor (`executor_svc/numerics/identity.py`).
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo_shared.errors import ModelLoadError

# A tensor's digest is made of the digests of its pieces, so that several threads can work on one. Another piece size
# gives another digest.
PIECE_BYTES = 16 * 2**20

# Above the speed of most disks; each thread takes a core from the conversion of weights.
NUM_THREADS = 2

# What is read at once: it stays in the processor's cache until it is hashed.
_READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its file; `description` has its name, number format and shape."""

    description: bytes
    path: Path
    begin: int
    end: int

    def pieces(self) -> Iterable[tuple[int, int]]:
        """Return where each piece begins and ends."""
        return ((begin, min(begin + PIECE_BYTES, self.end)) for begin in range(self.begin, self.end, PIECE_BYTES))


class WeightsDigest:
    """Hashes files in the background; use it as `with WeightsDigest(...) as digest`, and load the weights inside.

    Leaving the block early gives up what is not hashed yet.
    """

    def __init__(self, config: bytes, tensors: Iterable[StoredTensor]) -> None:
        self._config = config
        self._pool = ThreadPoolExecutor(NUM_THREADS, "weights-digest")
        self._digests: list[tuple[bytes, list[Future[bytes]]]] = [
            (tensor.description, [self._pool.submit(_hash, tensor.path, *piece) for piece in tensor.pieces()])
            for tensor in tensors
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def result(self) -> str:
        """Wait for the digest, 64 hexadecimal digits. Raises: ModelLoadError: a file cannot be read."""
        hasher = hashlib.sha256()
        for part in (b"octavo weights 1", self._config):
            _add(hasher, part)
        for description, pieces in sorted(self._digests, key=lambda item: item[0]):
            _add(hasher, description)
            _add(hasher, b"".join(piece.result() for piece in pieces))
        return hasher.hexdigest()


def _add(hasher: "hashlib._Hash", part: bytes) -> None:
    hasher.update(len(part).to_bytes(8, "little") + part)


def tensors_in(file_of: Mapping[str, Path]) -> Iterator[StoredTensor]:
    """Yield tensors as safetensors files list them, in the order of the files.

    Args:
        file_of: The file of each tensor; they have been opened once: their headers are whole.

    Raises: ModelLoadError: a file cannot be read.
    """
    for path in sorted(set(file_of.values())):
        yield from (tensor for name, tensor in _tensors_of(path) if file_of.get(name) == path)


def _tensors_of(path: Path) -> list[tuple[str, StoredTensor]]:
    """Return what the header of a safetensors file lists, in the order of the file."""
    with _naming(path), path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_bytes))
    tensors = []
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + num_bytes + offset for offset in entry["data_offsets"])
            description = json.dumps([name, entry["dtype"], entry["shape"]]).encode()
            tensors.append((name, StoredTensor(description, path, begin, end)))
    return sorted(tensors, key=lambda item: item[1].begin)


def _hash(path: Path, begin: int, end: int) -> bytes:
    hasher, buffer = hashlib.sha256(), memoryview(bytearray(min(_READ_BYTES, end - begin)))
    with _naming(path), path.open("rb", buffering=0) as file:
        while begin < end:
            num_bytes = os.preadv(file.fileno(), [buffer[: end - begin]], begin)
            if not num_bytes:
                raise ModelLoadError(f"{path} was truncated while being read")
            hasher.update(buffer[:num_bytes])
            begin += num_bytes
    return hasher.digest()


def read_whole(path: Path) -> bytes:
    """Return a file. Raises: ModelLoadError: it cannot be read."""
    with _naming(path):
        return path.read_bytes()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
