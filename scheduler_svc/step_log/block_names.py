"""Names of blocks in a log, which are not those of the fleet: with these, and the key, prompts could be guessed.

A log has another name for each one, made with a secret that is drawn at the start and written nowhere. So a replay can
compute none: it looks them up. Each record has the blocks that were named since the one before, a row for each:

    the block before it, or the salt of a first block; a digest of its tokens, as the log has them; its name

A row is left out if its name stands in one of the last rows of the file.
"""

import secrets
from collections.abc import Iterable
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

import numpy as np

from octavo.steplog.v1 import step_log_pb2 as pb
from scheduler_svc.core.blocks.prefix_cache import HASH_BYTES, TOKEN, BlockHasher
from scheduler_svc.step_log.masking import TokenMask

# Of a name in a row, where it stands alone; elsewhere zeros follow, up to the length that names have.
ROW_NAME_BYTES = 8
PADDING = bytes(HASH_BYTES - ROW_NAME_BYTES)
# A name that stands in so many last rows is not written again.
MAX_WRITTEN_NAMES = 2**17
# Rows that a replay remembers: those that the log does not repeat, and as many names of its own.
MAX_KNOWN_NAMES = 2 * MAX_WRITTEN_NAMES
_ROW = Struct(f"{ROW_NAME_BYTES}s" * 3)
_NO_NAME = bytes(HASH_BYTES)


# Writing ---------------------------------------------------------------------------------------------


class NamedBlocks(NamedTuple):
    """Blocks that were named: those of `content`, behind the block `parent`; None: they are the first with a salt."""

    parent: bytes | None
    cache_salt: int
    content: bytes
    names: list[bytes]


class NotingHasher(BlockHasher):
    """A hasher that notes what it names.

    Args:
        key, block_size: See `BlockHasher`.
        noted: Gets it.
        key_number: Stands for the key; see `BlockNaming`.
    """

    def __init__(self, key: bytes, block_size: int, noted: list[NamedBlocks], key_number: int = 0) -> None:
        super().__init__(key, block_size)
        self._key_number = key_number
        self._noted = noted

    def name(self, parent: bytes | None, cache_salt: int, content: bytes) -> list[bytes]:
        """See `BlockHasher`."""
        names = super().name(parent, cache_salt, content)
        self._noted.append(NamedBlocks(parent, _salt_with(self._key_number, cache_salt), content, names))
        return names


class LogNames:
    """The names of blocks in one log. Only its writer's thread uses it."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._written: set[bytes] = set()
        self._mask: TokenMask | None = None

    def begin_file(self) -> None:
        """A file begins: what is in others is not known there."""
        self._written.clear()

    def rename(self, record: pb.LogRecord) -> None:
        """Give blocks in a record their names in the log."""
        for blocks in (record.blocks_kept, record.step_decided.step.registered_blocks):
            if blocks.names:
                blocks.names = self.others(blocks.names)

    def others(self, names: bytes) -> bytes:
        """Return the names in the log of names that stand one after the other; zeros are none, and stay."""
        single = [names[start : start + HASH_BYTES] for start in range(0, len(names), HASH_BYTES)]
        other_of = {name: self._other(name) + PADDING for name in set(single)}
        other_of[_NO_NAME] = _NO_NAME
        return b"".join([other_of[name] for name in single])

    def rows(self, noted: Iterable[NamedBlocks], mask: TokenMask | None) -> bytes:
        """Return the rows of blocks that were named."""
        if mask is not self._mask:  # their contents have other digests
            self._mask = mask
            self._written.clear()
        rows: list[bytes] = []
        for parent, cache_salt, content, names in noted:
            if self._written.issuperset(names):
                continue
            if mask is not None:
                content = mask.ids(np.frombuffer(content, TOKEN)).astype(TOKEN, copy=False).tobytes()
            before = first_parent(cache_salt) if parent is None else self._other(parent)
            for name, digest in zip(names, digests(content, len(content) // len(names)), strict=True):
                other = self._other(name)
                if name not in self._written:
                    rows += before, digest, other
                    if len(self._written) >= MAX_WRITTEN_NAMES:
                        self._written.clear()
                    self._written.add(name)
                before = other
        return b"".join(rows)

    def _other(self, name: bytes) -> bytes:
        return blake2b(self._secret + name).digest()[:ROW_NAME_BYTES]


# Reading ---------------------------------------------------------------------------------------------


class KnownNames:
    """The last rows of a log, for a replay.

    What is named here before the log does, as a look at it may, or another release, gets a name of its own; later rows
    that call it otherwise are translated.
    """

    def __init__(self) -> None:
        # By the block before and the digest, as in a row; the last one is the newest.
        self._name_of: dict[bytes, bytes] = {}
        # What the log calls otherwise than it is called here.
        self._own_name_of: dict[bytes, bytes] = {}

    def learn(self, rows: bytes) -> None:
        """Take the rows of a record. Raises ValueError: they were cut."""
        if len(rows) % _ROW.size:
            raise ValueError(f"rows of {_ROW.size} bytes that name blocks have {len(rows)} bytes")
        for before, digest, name in _ROW.iter_unpack(rows):
            place = self._own_name_of.get(before, before) + digest
            known = self._name_of.pop(place, name)
            _put(self._name_of, place, known)
            if known != name:
                _put(self._own_name_of, name, known)

    def name(self, before: bytes, digest: bytes) -> bytes:
        """Return the name of a block; one that is not known gets one."""
        place = before + digest
        name = self._name_of.get(place)
        if name is None:
            name = blake2b(place).digest()[:ROW_NAME_BYTES]
            _put(self._name_of, place, name)
        return name

    def own(self, names: bytes) -> bytes:
        """Return names of the log, one after the other, as blocks are called here."""
        if not self._own_name_of:
            return names
        single = [names[start : start + ROW_NAME_BYTES] for start in range(0, len(names), HASH_BYTES)]
        return b"".join([self._own_name_of.get(name, name) + PADDING for name in single])


def _put(names: dict[bytes, bytes], key: bytes, name: bytes) -> None:
    if len(names) >= MAX_KNOWN_NAMES:
        del names[next(iter(names))]
    names[key] = name


class LookUpHasher(BlockHasher):
    """Finds names instead of making them."""

    def __init__(self, known: KnownNames, block_size: int, key_number: int = 0) -> None:
        super().__init__(b"", block_size)
        self._known = known
        self._key_number = key_number
        self._block_bytes = self._block.size

    def name(self, parent: bytes | None, cache_salt: int, content: bytes) -> list[bytes]:
        """See `BlockHasher`."""
        before = first_parent(_salt_with(self._key_number, cache_salt)) if parent is None else parent[:ROW_NAME_BYTES]
        names: list[bytes] = []
        for digest in digests(content, self._block_bytes):
            before = self._known.name(before, digest)
            names.append(before + PADDING)
        return names


# Both ------------------------------------------------------------------------------------------------


def digests(content: bytes, block_bytes: int) -> list[bytes]:
    """Return what stands for the content of each block in a row."""
    blocks = [content[start : start + block_bytes] for start in range(0, len(content), block_bytes)]
    return [blake2b(block).digest()[:ROW_NAME_BYTES] for block in blocks]


def _salt_with(key_number: int, cache_salt: int) -> int:
    """Return what stands for a salt with a key: by another one the same blocks have other names."""
    return cache_salt ^ key_number


def first_parent(cache_salt: int) -> bytes:
    """Return what stands in a row for the block before a first one."""
    return cache_salt.to_bytes(ROW_NAME_BYTES, "little")
