"""A fleet that takes the names of blocks from a log: it has no key, and computes none.

What it names before the log does, as a look at it may, or another release, gets a name of its own; later rows that
call it otherwise are translated.
"""

from hashlib import blake2b
from struct import Struct

from octavo_shared.step_wire.executor_info import ExecutorInfo
from scheduler_svc.core.blocks.prefix_cache import HASH_BYTES, BlockHasher
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import Policy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.provenance import UNKNOWN, Numerics
from scheduler_svc.step_log.block_names import (
    MAX_WRITTEN_NAMES,
    PADDING,
    ROW_NAME_BYTES,
    digests,
    first_parent,
)

# Rows that are remembered: those that the log does not repeat, and as many names of our own.
MAX_KNOWN_NAMES = 2 * MAX_WRITTEN_NAMES
_ROW = Struct(f"{ROW_NAME_BYTES}s" * 3)


class KnownNames:
    """The last rows of a log."""

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

    def __init__(self, known: KnownNames, block_size: int) -> None:
        super().__init__(b"", block_size)
        self._known = known
        self._block_bytes = self._block.size

    def name(self, parent: bytes | None, cache_salt: int, content: bytes) -> list[bytes]:
        """See `BlockHasher`."""
        before = first_parent(cache_salt) if parent is None else parent[:ROW_NAME_BYTES]
        names: list[bytes] = []
        for digest in digests(content, self._block_bytes):
            before = self._known.name(before, digest)
            names.append(before + PADDING)
        return names


class ReplayedFleet(Fleet):
    """A fleet whose names of blocks are those of a log.

    Attributes:
        names: What is known of them.
    """

    def __init__(self, queue: WaitingQueue, policy: Policy) -> None:
        super().__init__(queue, policy)
        self.names = KnownNames()

    def join(
        self,
        limits: CoreLimits,
        epoch: int,
        name: str = "",
        numerics: Numerics = UNKNOWN,
        info: ExecutorInfo | None = None,
    ) -> ExecutorPlanner:
        """See `Fleet`."""
        planner = super().join(limits, epoch, name, numerics, info)
        planner.blocks.hasher = LookUpHasher(self.names, limits.block_size)
        return planner
