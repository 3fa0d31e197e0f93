"""The prefix cache: which block of which place holds which content.

Full blocks never change, so a block is named by its content: the hash of its tokens, chained to the
hash of the block before it, so that equal tokens behind different prefixes differ,

    h(i) = blake2b(h(i - 1), tokens of block i)        h(-1) = blake2b(key; salt)        each cut to 128 bits

and a prefix of i blocks is found by h(i - 1) alone. The key is the scheduler's secret: a client that could
make two prompts collide could read the answers to another client's prompt. It is hashed at the root only, which
makes every hash behind it as secret, at two thirds of the time. The salt keeps tenants and adapters apart.

A block is registered when the step that computed it is acknowledged, never before: a step that was sent
may fail. Until then it counts as being written, and a request that needs it waits for that
step instead of computing it again. A block that comes back from the host pool is registered at once: its content
was acknowledged before, and a step moves blocks before it reads any.

A name is a place: the blocks of the device have one `PrefixCache`, and their copies on the host another one beside it
(`host_blocks.py`). The fleet's index has a name as long as either place holds it.

Pure. Read next: `block_allocator.py`, which keeps registered blocks while they are unused.
"""

from collections.abc import Callable, Container
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from struct import Struct

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import BLOCK_NAME_BYTES, BoolArray, Int32Array, no_slots
from scheduler_svc.core.blocks.block_holders import BlockHolders

HASH_BYTES = BLOCK_NAME_BYTES
TOKEN = np.dtype("<i4")
NO_BLOCKS: IndexArray = np.empty(0, np.intp)
MAX_ROOTS = 1024  # one a salt
# Stands for a block that another slot writes already.
_WRITTEN_BY_ANOTHER = b""


class BlockHasher:
    """Makes the hash chain of a token sequence.

    Args:
        key: At most 64 bytes; part of the scheduler's identity.
        block_size: Tokens in a block.
    """

    def __init__(self, key: bytes, block_size: int) -> None:
        self._key = key
        self.block_size = block_size
        self._block = Struct(f"{TOKEN.itemsize * block_size}s")
        self._root = lru_cache(MAX_ROOTS)(self._make_root)

    def extend(self, hashes: list[bytes], token_ids: Int32Array, cache_salt: int, before: bytes | None = None) -> None:
        """Append the hashes of the full blocks of `token_ids` that `hashes` does not have yet.

        `before`: the block, named with that salt, that the first one is behind; None: it is behind none.
        """
        num_full_blocks = len(token_ids) // self.block_size
        if len(hashes) >= num_full_blocks:
            return
        new = token_ids[len(hashes) * self.block_size : num_full_blocks * self.block_size]
        content = new.astype(TOKEN, copy=False).tobytes()
        hashes += self.name(hashes[-1] if hashes else before, cache_salt, content)

    def name(self, parent: bytes | None, cache_salt: int, content: bytes) -> list[bytes]:
        """Return the hashes of the blocks of `content` behind the block `parent`; None: they are the first."""
        before = self._root(cache_salt) if parent is None else parent
        # Cut by hand: setting up blake2b with a size, or a key, takes longer than hashing a block.
        return [
            before := blake2b(before + block).digest()[:HASH_BYTES] for (block,) in self._block.iter_unpack(content)
        ]

    def name_whole(self, token_ids: Int32Array, cache_salt: int) -> list[bytes]:
        """Return the names of the blocks of an input that is found as a whole: by number, behind all its tokens."""
        num_blocks = -(-len(token_ids) // self.block_size)
        tokens = np.full(num_blocks * self.block_size, -1, TOKEN)
        tokens[: len(token_ids)] = token_ids
        whole = self.name(None, cache_salt, tokens.tobytes())[-1]
        numbers = np.repeat(-2 - np.arange(num_blocks), self.block_size)  # which no tokens are
        return self.name(whole, cache_salt, numbers.astype(TOKEN).tobytes())

    def _make_root(self, cache_salt: int) -> bytes:
        return blake2b(cache_salt.to_bytes(8, "little"), key=self._key).digest()[:HASH_BYTES]


class PrefixCache:
    """Registered blocks by hash, and hashes by block; of blocks with equal content, one is registered.

    Args:
        num_blocks: Size of the pool.
        holders: The fleet's index, which is kept up to date; None: there is none.
        sends_names: Whether steps tell the executor new names.
        beside: The names of the device, if these are the names of copies of its blocks.

    Attributes:
        is_registered: Blocks that hold a prefix, [num_blocks].
        bit: Stands for this planner in the index.
    """

    def __init__(
        self,
        num_blocks: int,
        holders: BlockHolders | None = None,
        *,
        sends_names: bool = False,
        beside: "PrefixCache | None" = None,
    ) -> None:
        self._other = beside  # the names of the other place
        if beside is None:
            self._holders = holders or BlockHolders()
            self.bit = self._holders.join()
        else:
            self._holders, self.bit, beside._other = beside._holders, beside.bit, self
        self._flags = bytearray(num_blocks)
        self.is_registered: BoolArray = np.frombuffer(self._flags, np.bool_)  # a view: one byte is set faster there
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block = [b""] * num_blocks  # of a block that is not registered: garbage
        # Names that the executor has not been told, by block; None: it is told none.
        self._unsent: dict[int, bytes] | None = {} if sends_names else None
        # The blocks that each slot writes, in their order, and all of them together.
        self._written_by_slot: dict[int, list[bytes]] = {}
        self._being_written: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._block_of_hash)

    def holds(self, block_hash: bytes) -> bool:
        """Return whether a block is registered under this hash."""
        return block_hash in self._block_of_hash

    def is_anywhere(self, block_hash: bytes) -> bool:
        """Return whether a block of either place is registered under this hash."""
        return block_hash in self._block_of_hash or (self._other is not None and self._other.holds(block_hash))

    def hash_of(self, block_id: int) -> bytes | None:
        """Return the hash that the block is registered under; None: it is not registered."""
        return self._hash_of_block[block_id] if self.is_registered[block_id] else None

    def match(self, hashes: list[bytes], max_blocks: int) -> IndexArray:
        """Return the blocks of the longest registered prefix, [<= max_blocks]."""
        block_of_hash, found = self._block_of_hash, []
        for block_hash in hashes[:max_blocks]:
            block_id = block_of_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return np.array(found, np.intp) if found else NO_BLOCKS

    def ends(
        self, hashes: list[bytes], first_seen: Callable[[int], int], copies: "PrefixCache | None" = None
    ) -> BoolArray:
        """Return whether the token behind i blocks finds all blocks that it sees, for each i, [num_hashes + 1] bool.

        Args:
            hashes: Of a sequence's full blocks.
            first_seen: Returns the index of the first block that the token behind so many blocks sees.
            copies: Another place where blocks may be found; None: only here.
        """
        block_of_hash, num_in_a_row = self._block_of_hash, 0
        copy_of_hash = {} if copies is None else copies._block_of_hash
        found: BoolArray = np.ones(len(hashes) + 1, np.bool_)
        for end, block_hash in enumerate(hashes, 1):
            is_held = block_hash in block_of_hash or block_hash in copy_of_hash
            num_in_a_row = num_in_a_row + 1 if is_held else 0
            found[end] = num_in_a_row >= end - first_seen(end)
        return found

    def blocks_of(self, hashes: list[bytes]) -> IndexArray:
        """Return the block that is registered under each hash, -1 where none is, [num_hashes]."""
        block_of_hash = self._block_of_hash
        return np.array([block_of_hash.get(block_hash, -1) for block_hash in hashes], np.intp)

    def others_of(self, hashes: list[bytes], block_ids: list[int]) -> list[int]:
        """Return the other blocks that are registered under hashes of `block_ids`; the lists are parallel."""
        get = self._block_of_hash.get
        return [held for key, own in zip(hashes, block_ids, strict=True) if (held := get(key, own)) != own]

    def register(self, hashes: list[bytes], block_ids: list[int]) -> None:
        """Name blocks that were computed; the lists are parallel. Content of another block stays registered there."""
        block_of_hash, hash_of_block, flags = self._block_of_hash, self._hash_of_block, self._flags
        holders_of, bit, unsent = self._holders.holders_of, self.bit, self._unsent
        for block_hash, block_id in zip(hashes, block_ids, strict=True):
            if block_of_hash.setdefault(block_hash, block_id) == block_id:
                hash_of_block[block_id], flags[block_id] = block_hash, True
                holders_of[block_hash] = holders_of.get(block_hash, 0) | bit
                if unsent is not None:
                    unsent[block_id] = block_hash

    def forget(self, block_ids: IndexArray) -> None:
        """Remove registered blocks that are given out again."""
        block_of_hash, hash_of_block = self._block_of_hash, self._hash_of_block
        holders_of, bit, other = self._holders.holders_of, self.bit, self._other
        if self._unsent:
            for block_id in block_ids.tolist():
                self._unsent.pop(block_id, None)
        for block_id in block_ids.tolist():
            block_hash = hash_of_block[block_id]
            del block_of_hash[block_hash]
            if other is not None and block_hash in other._block_of_hash:
                continue
            if others := holders_of[block_hash] & ~bit:
                holders_of[block_hash] = others
            else:
                del holders_of[block_hash]
        self.is_registered[block_ids] = False

    def adopt(self, block_ids: Int32Array, names: bytes) -> IndexArray:
        """Name blocks that the executor has kept; return the blocks that are registered now: one for each name."""
        unsent, self._unsent = self._unsent, None
        self.register([names[i : i + HASH_BYTES] for i in range(0, len(names), HASH_BYTES)], block_ids.tolist())
        self._unsent = unsent
        index = block_ids.astype(np.intp)
        return index[self.is_registered[index]]

    def take_unsent_names(self, max_names: int, written: Container[int]) -> tuple[Int32Array, bytes]:
        """Return blocks whose names the executor has not been told, [<= max_names], and the names.

        Args:
            max_names: Most names; the others wait for the next step.
            written: Blocks that the step swaps in: their names are not true before it.
        """
        if not self._unsent:
            return no_slots(), b""
        block_ids = list(islice((block_id for block_id in self._unsent if block_id not in written), max_names))
        names = b"".join([self._unsent.pop(block_id) for block_id in block_ids])
        return np.array(block_ids, np.int32), names

    def drop_unsent_names(self) -> None:
        """Tell the executor no name of before: what its blocks hold may have changed."""
        if self._unsent:
            self._unsent.clear()

    def leave(self) -> None:
        """Leave the fleet's index with both places: the executor is gone."""
        self._holders.leave(self.bit, list(self._names_of_both))

    def names_here_only(self, block_ids: IndexArray) -> list[bytes]:
        """Return the names of registered blocks that no block of the other place has."""
        elsewhere = {} if self._other is None else self._other._block_of_hash
        names = [self._hash_of_block[block_id] for block_id in block_ids.tolist()]
        return [name for name in names if name not in elsewhere]

    @property
    def _names_of_both(self) -> dict[bytes, int]:
        return self._block_of_hash if self._other is None else self._block_of_hash | self._other._block_of_hash

    # Blocks on their way -------------------------------------------------------------------------

    def start_writing(self, slot: int, hashes: list[bytes]) -> None:
        """Note that a step is sent in which a slot computes the blocks with these hashes; a transfer is below 0."""
        if not self._being_written.isdisjoint(hashes):
            hashes = [_WRITTEN_BY_ANOTHER if self.is_being_written(written) else written for written in hashes]
        self._written_by_slot.setdefault(slot, []).extend(hashes)
        self._being_written.update(hashes)

    def stop_writing(self, slot: int, num_blocks: int | None = None) -> None:
        """Note that the first `num_blocks` of a slot are acknowledged; None: the slot is vacated, and all are void."""
        hashes = self._written_by_slot.pop(slot, None)
        if hashes is None:
            return
        self._being_written.difference_update(hashes[:num_blocks])
        if num_blocks is not None and num_blocks < len(hashes):
            self._written_by_slot[slot] = hashes[num_blocks:]

    @property
    def writers(self) -> set[int]:
        """Slots that write blocks in steps in flight."""
        return {slot for slot in self._written_by_slot if slot >= 0}

    def is_being_written(self, block_hash: bytes) -> bool:
        """Return whether a step in flight computes a block with this hash."""
        return block_hash in self._being_written

    def check_integrity(self) -> None:
        """Assert that both directions agree, and that a block counts as being written only while a slot writes it."""
        registered = self.is_registered.nonzero()[0].tolist()
        named = {block_id: block_hash for block_hash, block_id in self._block_of_hash.items()}
        assert named == {block_id: self._hash_of_block[block_id] for block_id in registered}
        assert len(self._block_of_hash) == len(registered), "a block has two hashes"
        told = {name for name, members in self._holders.holders_of.items() if members & self.bit}
        assert told == self._names_of_both.keys(), "the fleet knows of other blocks"
        written = [block_hash for hashes in self._written_by_slot.values() for block_hash in hashes]
        ours = [block_hash for block_hash in written if block_hash != _WRITTEN_BY_ANOTHER]
        assert len(set(ours)) == len(ours), "a block has two first writers"
        assert self._being_written - {_WRITTEN_BY_ANOTHER} == set(ours), "a writer got lost, or stays for ever"
