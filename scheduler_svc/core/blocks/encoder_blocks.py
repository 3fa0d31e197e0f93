"""The output of a model's encoder: which blocks hold that of which input.

Each token of an input is read together with all others, so a prefix of one means nothing: block i of an input is named
by its salt, the hash of the whole input, and i; the last, partial one too. An input is found with all its blocks, or
it is encoded anew, as one unit of work in the step of the admission. That step's answer gives its blocks their names,
never earlier: the step may fail. Until then others with the same input name the same blocks, since steps run in order.

Blocks are only read, and never copied: each sequence of a group holds a reference to each block of its input, from its
admission or fork until it ends or is preempted. Preempted groups find the input again, or have it encoded again; so
nothing moves to the host.

Pure. Read next: `block_manager.py`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import EncoderInput, Int32Array
from octavo_shared.step_wire.table_columns import BlockTables
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.host_blocks import HostBlocks
from scheduler_svc.core.blocks.prefix_cache import BlockHasher, PrefixCache
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup


@dataclass(slots=True, eq=False)
class Encoding:
    """An input of `num_tokens` that a step in flight encodes; the step holds a reference to each of its `blocks`.

    `names`: what the blocks are called then; empty: nothing.
    """

    num_tokens: int
    names: list[bytes]
    blocks: Int32Array


@dataclass(slots=True, eq=False)
class EncoderPlan:
    """How a group would get the blocks of its input; nothing is taken yet.

    `found` are the blocks that hold it, or will; None: it is encoded anew. It takes `num_needed` free blocks.
    """

    token_ids: Int32Array
    names: list[bytes]
    found: IndexArray | None
    num_needed: int

    @property
    def num_tokens_to_encode(self) -> int:
        """What it takes of the token budget of a step."""
        return len(self.token_ids) if self.found is None else 0


def names_of_input(group: SequenceGroup, hasher: BlockHasher, era: int, salt: int) -> list[bytes]:
    """Return the names of the blocks of a group's input, by the hasher of an era."""
    assert group.encoder_token_ids is not None
    if group.encoder_named_by != (hasher.block_size, era, salt):  # at another executor, or before
        group.encoder_named_by = hasher.block_size, era, salt
        group.encoder_names = hasher.name_whole(group.encoder_token_ids, salt)
    return group.encoder_names


class EncoderBlocks:
    """Owns the pool of the encoder's output.

    Args:
        limits: Sizes.
        first_id: The id of its first block on the wire.
        first_host_id: The same of the host pool, which stays empty.

    Attributes:
        tables: The block tables of the batch; set by `Batch`.
        num_watermark_blocks: None: inputs do not grow.
        words: Name the pool, to put behind "blocks".
    """

    tables: BlockTables
    num_watermark_blocks = 0
    words = " of the encoder"

    def __init__(self, limits: CoreLimits, first_id: int, first_host_id: int) -> None:
        self.first_id, self.block_size = first_id, limits.block_size
        cached = limits.prefix_caching
        self.prefix_cache = PrefixCache(limits.num_encoder_blocks, sends_names=limits.names_blocks) if cached else None
        self.allocator = BlockAllocator(limits.num_encoder_blocks, self.prefix_cache)
        sizes = limits.num_encoder_host_blocks, first_host_id
        self.host = HostBlocks(*sizes, self.allocator, first_id, limits.encoder_bytes, keeps_prefixes=False)
        self._on_their_way: dict[bytes, Encoding] = {}  # by the name of the first block

    @property
    def num_free(self) -> int:
        """Blocks that an admission can take."""
        return self.allocator.num_free_blocks

    def num_free_beside(self, num_taken: int) -> int:
        """Return the blocks that an admission can take beside others that take so many."""
        return self.num_free - num_taken

    def num_blocks_of(self, group: SequenceGroup) -> int:
        """Return the blocks that the input of a group fills."""
        return 0 if group.encoder_token_ids is None else -(-len(group.encoder_token_ids) // self.block_size)

    def plan(self, group: SequenceGroup, hasher: BlockHasher, era: int) -> EncoderPlan:
        """Return how a group would get the blocks of its input now, which are named by the hasher of an era."""
        assert group.encoder_token_ids is not None
        names, num_blocks = list[bytes](), self.num_blocks_of(group)
        if self.prefix_cache is not None:
            names = names_of_input(group, hasher, era, group.shared_salt)
        found = self._find(names)
        num_needed = num_blocks if found is None else num_blocks - np.count_nonzero(self.allocator.ref_counts[found])
        return EncoderPlan(group.encoder_token_ids, names, found, int(num_needed))

    def _find(self, names: list[bytes]) -> IndexArray | None:
        if self.prefix_cache is None:
            return None
        if (encoding := self._on_their_way.get(names[0])) is not None:
            return encoding.blocks.astype(np.intp)
        return self.prefix_cache.blocks_of(names) if all(map(self.prefix_cache.holds, names)) else None

    def allocate(self, plan: EncoderPlan, num_sequences: int) -> tuple[EncoderInput, Encoding | None]:
        """Take the blocks of a plan, which must be free, for so many sequences.

        Returns what the first one is admitted with, and the encoding that the step does; None: it does none.
        """
        num_tokens = len(plan.token_ids)
        if plan.found is not None:
            self.allocator.acquire(plan.found, num_sequences)
            return EncoderInput(num_tokens, plan.found.astype(np.int32) + np.int32(self.first_id)), None
        blocks = self.allocator.allocate(-(-num_tokens // self.block_size))
        self.allocator.acquire(blocks, num_sequences)
        encoding = Encoding(num_tokens, plan.names, blocks)
        if plan.names:
            self._on_their_way[plan.names[0]] = encoding
        return EncoderInput(num_tokens, blocks + np.int32(self.first_id), plan.token_ids), encoding

    def take(self, encoding: Encoding) -> None:
        """Take an input that a step has encoded: from now on it is found after its last sequence has left, too."""
        if encoding.names:
            del self._on_their_way[encoding.names[0]]
            self.allocator.register(encoding.names, encoding.blocks.tolist())
        self.allocator.free(encoding.blocks)

    def name_anew(self) -> None:
        """Let what is on its way get no name: it would be that of another era."""
        for encoding in self._on_their_way.values():
            encoding.names = []
        self._on_their_way.clear()

    def share(self, slot: int, num_references: int = 1) -> None:
        """Add references to the blocks that a slot holds."""
        self.allocator.acquire(self.tables.of_slot(slot), num_references)

    def free(self, slot: int) -> None:
        """Let go of the blocks that a slot holds."""
        self.allocator.free(self.tables.of_slot(slot))

    def check_integrity(self, slots: Iterable[int], encodings: Iterable[Encoding]) -> None:
        """Assert that reference counts are those of live slots, each once, and of steps in flight."""
        self.allocator.check_integrity()
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        named, to_be_named = Counter[int](), list[Encoding]()
        for slot in slots:
            named.update(self.tables.of_slot(slot).tolist())
        for encoding in encodings:
            named.update(encoding.blocks.tolist())
            to_be_named += [encoding] * bool(encoding.names)
        counted = {block: int(count) for block, count in enumerate(self.allocator.ref_counts.tolist()) if count}
        assert dict(named) == counted, f"encoder blocks are in {dict(named)}, reference counts are {counted}"
        assert to_be_named == [*self._on_their_way.values()], "an input is on its way in no step"
