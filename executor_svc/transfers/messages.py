"""What travels: the header and the pieces of a transfer, each with a code that only its two executors can make.

Pure.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from octavo.execution.v1 import block_transfer_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError, PermissionDeniedError
from octavo_shared.step_wire.cache_group import CacheGroup, firsts_of
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import Int32Array

# Most content of a message.
PIECE_BYTES = 2 * 2**20
# Most bytes of a header: one for each block.
HEADER_BYTES = 2 * 2**20
CODE_BYTES = 32

# The metadata by which a receiver says that it has accepted a header.
ACCEPTED = ("octavo-transfer", "accepted")


def code_of(secret: bytes, transfer_id: int, index: int, content: bytes | memoryview) -> bytes:
    """Return the code of a message: what proves that who made it knows the secret, and that nothing was changed."""
    digest = hashlib.blake2b(struct.pack("<QI", transfer_id, index), key=secret, digest_size=CODE_BYTES)
    digest.update(content)
    return digest.digest()


def message_of(secret: bytes, transfer_id: int, index: int, content: bytes) -> pb.SendBlocksRequest:
    """Return a message with its code."""
    code = code_of(secret, transfer_id, index, content)
    return pb.SendBlocksRequest(transfer_id=transfer_id, index=index, content=content, code=code)


def check_code(secret: bytes, message: pb.SendBlocksRequest) -> None:
    """Raise PermissionDeniedError unless a message has its code."""
    code = code_of(secret, message.transfer_id, message.index, message.content)
    if not hmac.compare_digest(code, message.code):
        raise PermissionDeniedError(
            f"message {message.index} of transfer {message.transfer_id:016x} has a wrong code: the secrets differ, or "
            "it was changed on its way"
        )


def check_size(message: pb.SendBlocksRequest) -> None:
    """Raise InvalidFieldError if a header has more than any may have; before anything is computed from it."""
    if len(message.content) > HEADER_BYTES:
        raise InvalidFieldError("content", f"{len(message.content)} bytes", f"at most {HEADER_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What the blocks of an executor are, as laid out for its scheduler.

    Attributes:
        info: Of the executor.
        pools: Its cache groups, as their blocks are numbered.
        block_bytes: Of a block of each, as they travel.
    """

    info: ExecutorInfo
    pools: Sequence[CacheGroup]
    block_bytes: Sequence[int]

    @property
    def num_blocks(self) -> int:
        """Device blocks of all pools."""
        return int(firsts_of(self.pools)[-1])

    def words(self) -> str:
        """Return the format of all blocks in words."""
        groups = (
            f"{pool.kind.name} of {pool.block_size_tokens} tokens in {num_bytes} bytes"
            + (f", window {pool.window_tokens}" if pool.window_tokens else "")
            + (f", layers {','.join(map(str, pool.layers))}" if pool.layers else "")
            for pool, num_bytes in zip(self.pools, self.block_bytes, strict=True)
        )
        shares = f", in shares of {self.info.tp_size} ranks" if self.info.tp_size > 1 else ""
        return f"{self.info.kv_cache_dtype or self.info.dtype}{shares}: {'; '.join(groups)}"

    def groups_of(self, block_ids: Int32Array) -> bytes:
        """Return the number of the cache group of each block, one byte each."""
        return (np.searchsorted(firsts_of(self.pools), block_ids, side="right") - 1).astype(np.uint8).tobytes()

    def header(self, block_ids: Int32Array, instance_id: str) -> pb.BlockTransferHeader:
        """Return the header of a transfer of blocks to the executor of an instance id."""
        return pb.BlockTransferHeader(
            instance_id=instance_id,
            numerics_id=self.info.numerics_id,
            weights_digest=self.info.weights_digest,
            format=self.words(),
            groups=self.groups_of(block_ids),
        )

    def difference(self, header: pb.BlockTransferHeader, block_ids: Int32Array) -> str:
        """Say in one sentence what of a header does not fit blocks of this executor; empty: all does."""
        own = self.header(block_ids, self.info.instance_id)
        if header.instance_id != own.instance_id:
            return f"the blocks are for instance {header.instance_id!r}; this is {own.instance_id!r}"
        if len(header.groups) != len(own.groups):
            return f"{len(header.groups)} blocks come; {len(own.groups)} wait for their content"
        for name in ("numerics_id", "weights_digest", "format"):
            theirs, ours = getattr(header, name), getattr(own, name)
            if not theirs or theirs != ours:
                return f"the sender's {name} is {theirs!r}; the receiver's is {ours!r}"
        if header.groups != own.groups:
            return "a block comes for a block of another cache group"
        return ""

    def parts(self, block_ids: Int32Array) -> "Iterator[Part]":
        """Cut blocks into the parts in which they are read and written."""
        runs = groupby(zip(block_ids.tolist(), self.groups_of(block_ids), strict=True), key=lambda each: each[1])
        for group, run in runs:
            ids = np.array([block_id for block_id, _ in run], np.int32)
            num_bytes = self.block_bytes[group]
            most = max(1, PIECE_BYTES // max(1, num_bytes))
            for begin in range(0, len(ids), most):
                part = ids[begin : begin + most]
                yield Part(part, len(part) * num_bytes)


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of one cache group that are read, and written, at once."""

    block_ids: Int32Array  # [n]
    num_bytes: int

    def piece_sizes(self) -> list[int]:
        """Return the sizes of the messages that it travels in: one, or those of a single large block."""
        return [min(PIECE_BYTES, self.num_bytes - begin) for begin in range(0, self.num_bytes, PIECE_BYTES)]
