"""The host pool of a cache group: blocks of preempted groups, and copies of prefixes.

A name is a place. A named block is copied to the host when its last user has left it, ahead of its eviction, so that an
eviction moves nothing; a prefix that is found here later comes back by a swap-in. Names of host blocks live in the
scheduler alone: a new attachment begins without any.

    device: used ──last user leaves──> cached ──evicted──> gone
                                          │ copied by a step that swaps nothing in
    host:                                 └──> on its way ──answered──> cached ──evicted──> gone

Copies count as free: a preempted group takes its blocks from the oldest of them. A copy has its name when the step that
made it was answered.

Pure. Read next: `block_manager.py`, which finds prefixes here; `core/step/swapping.py`, which moves preempted groups.
"""

from dataclasses import dataclass
from itertools import islice

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.prefix_cache import PrefixCache

# Most blocks that a step looks at for copies: those that need none are passed over.
_MAX_LOOKED_AT = 256


@dataclass(slots=True, eq=False)
class Copy:
    """A named block on its way to `host_block`; a step in flight copies it."""

    host: "HostBlocks"
    host_block: int
    name: bytes


class HostBlocks:
    """Owns a host pool.

    Args:
        num_blocks: Of the host pool.
        first_id: The id of its first block on the wire.
        device: The pool whose blocks come here.
        first_device_id: The id of that pool's first block on the wire.
        block_bytes: Size of a block, in the unit of `StepCost`.
        keeps_prefixes: Whether named blocks are copied here.

    Attributes:
        allocator: The host pool; blocks of preempted groups have references.
        names: The copies by name; None: there are none.
    """

    names: PrefixCache | None = None

    def __init__(
        self,
        num_blocks: int,
        first_id: int,
        device: BlockAllocator,
        first_device_id: int,
        block_bytes: int,
        *,
        keeps_prefixes: bool,
    ) -> None:
        self.first_id, self.block_bytes = first_id, block_bytes
        self._device, self._first_device_id = device, first_device_id
        if keeps_prefixes and num_blocks and device.prefix_cache is not None:
            self.names = PrefixCache(num_blocks, beside=device.prefix_cache)
            device.left = self
        self.allocator = BlockAllocator(num_blocks, self.names)
        self._wanted: dict[int, None] = {}  # device blocks whose last user has left, the first one first
        self._coming: set[bytes] = set()

    def want(self, block_ids: IndexArray) -> None:
        """Note named blocks of the device that their last user has left: steps copy them as they have time."""
        if self.names is not None:
            self._wanted |= dict.fromkeys(block_ids.tolist())

    def unwant(self, block_id: int) -> None:
        """Copy a block only when it is noted again."""
        self._wanted.pop(block_id, None)

    def copy(self, max_blocks: int) -> tuple[list[Copy], list[tuple[int, int]]]:
        """Begin to copy at most so many blocks; return the copies, and the pairs of blocks as on the wire."""
        cache, host = self._device.prefix_cache, self.names
        if not self._wanted or cache is None or host is None:
            return [], []
        sources, found, held = list[int](), list[bytes](), list[bytes]()
        max_blocks = min(max_blocks, self.allocator.num_free_blocks)
        for block in list(islice(self._wanted, _MAX_LOOKED_AT)):
            if len(found) == max_blocks:
                break
            del self._wanted[block]
            name = cache.hash_of(block)
            if name is None or name in self._coming:
                continue
            if host.holds(name):
                held.append(name)
                continue
            sources.append(block)
            found.append(name)
        if held:
            self.touch(held)
        targets = self.allocator.allocate(len(found)).tolist() if found else []
        self._coming.update(found)
        copies = [Copy(self, target, name) for target, name in zip(targets, found, strict=True)]
        first, first_host = self._first_device_id, self.first_id
        return copies, [(first + block, first_host + to) for block, to in zip(sources, targets, strict=True)]

    def take(self, copy: Copy) -> None:
        """Take a block that a step has copied: from now on it is found."""
        self._coming.discard(copy.name)
        self.allocator.register([copy.name], [copy.host_block])
        self.allocator.free(np.array([copy.host_block], np.int32))

    def keep(self, names: list[bytes], blocks: list[int]) -> None:
        """Name host blocks that are in use; the lists are parallel, and a name may be there twice."""
        if self.names is not None:
            self.names.register(names, blocks)

    def bring(self, names: list[bytes], device_blocks: Int32Array) -> list[tuple[int, int]]:
        """Return the pairs, as on the wire, that swap copies in to blocks of the device; the names must be here."""
        blocks = self.touch(names)
        first, first_host = self._first_device_id, self.first_id
        pairs = zip(blocks.tolist(), device_blocks.tolist(), strict=True)
        return [(first_host + block, first + to) for block, to in pairs]

    def touch(self, names: list[bytes]) -> IndexArray:
        """Let copies be evicted after all others; return their blocks, [num_names]."""
        assert self.names is not None
        blocks = self.names.blocks_of(names)
        self.allocator.acquire(blocks)
        self.allocator.free(blocks[::-1].astype(np.int32))
        return blocks

    def check_integrity(self) -> None:
        """Assert that both directions of names agree, and that no block is used and free."""
        self.allocator.check_integrity()
        if self.names is not None:
            self.names.check_integrity()
