"""Saved states: how a prefix is found again in a model whose layers keep a state of each sequence.

The state of a sequence lies at its slot of the batch, and says nothing of earlier positions. So a prefix is found up to
the last block whose keys and values are cached *and* behind which a state is saved. A saved state has the name of that
block, which stands for all tokens before. One of delta nets takes as much memory as the blocks of a thousand tokens or
more, so states are saved where they will be used (after Pan et al. 2024, "Marconi: Prefix Caching for the Era of
Hybrid LLMs"):

- where a request leaves a prefix whose blocks are cached: others will leave it there too;
- behind the last full block of a prompt;
- behind every `INTERVAL_BLOCKS` of an output, in place of the one before: the last one serves the next turn;
- where a chunk of a long prompt ends, behind every `PASSING_BLOCKS`; these are evicted before all others.

A step saves before it computes. Its answer gives the saved state its name, never earlier: the step may fail. From then
on it is cached, and evicted by age, or with the last place of the block that has its name. Copies of states on the host
(`host_blocks.py`) come back like those of blocks.

Pure. Read next: `block_manager.py`, which finds prefixes; `core/step/prefills.py`, which ends chunks where a state is
to be saved.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from octavo_shared.step_wire.step import BoolArray, Int32Array
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.host_blocks import HostBlocks
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.limits import CoreLimits

# No state is saved so near behind another one: computing the blocks between them costs little.
INTERVAL_BLOCKS = 4
PASSING_BLOCKS = 64


@dataclass(slots=True, eq=False)
class Save:
    """A state on its way from `slot`, behind `num_tokens`, to `block`.

    Attributes:
        name: Of its last block; empty: not all of its tokens are known yet.
        is_rolling: Whether it takes the place of the state that was saved before it in the same output.
        goes_first: Whether it is evicted before others.
    """

    slot: int
    num_tokens: int
    block: int
    name: bytes
    is_rolling: bool = False
    goes_first: bool = False


class SavedStates:
    """Owns the pool of saved states.

    Args:
        limits: Sizes of the pool and of blocks.
        first_id: The id of its first block on the wire.
        first_host_id: The same of the host pool.

    Attributes:
        host: The host pool.
        finds_prefixes: Whether prefixes are found again; if not, states are only swapped.
        interval: Tokens of an output between two states that are saved.
        saves: The states on their way, by slot; without those whose sequence has left its slot.
    """

    def __init__(self, limits: CoreLimits, first_id: int, first_host_id: int) -> None:
        self.first_id = first_id
        self.block_size = limits.block_size
        self.finds_prefixes = limits.prefix_caching
        self.interval = INTERVAL_BLOCKS * limits.block_size
        self.prefix_cache = PrefixCache(limits.num_state_blocks, sends_names=limits.names_blocks)
        self.allocator = BlockAllocator(limits.num_state_blocks, self.prefix_cache)
        self.host = HostBlocks(
            limits.num_host_state_blocks,
            first_host_id,
            self.allocator,
            first_id,
            limits.state_bytes,
            keeps_prefixes=limits.host_prefixes,
        )
        self.saves: dict[int, list[Save]] = {}
        self._expected: dict[int, list[bytes]] = {}  # by slot: what its prefill is still to save
        self._num_expecting: Counter[bytes] = Counter()
        self._last_of_output: dict[int, tuple[int, bytes]] = {}  # by slot: the last rolling one and its name

    @property
    def num_free(self) -> int:
        """States that can be saved, or received, now."""
        return self.allocator.num_free_blocks

    # Prefixes ------------------------------------------------------------------------------------

    def longest(self, names: Seq[bytes]) -> int:
        """Return how many of the first blocks with these names a saved state stands behind; 0: no state does."""
        if len(self.prefix_cache):
            for num_blocks in range(len(names), 0, -1):
                if self.prefix_cache.holds(names[num_blocks - 1]):
                    return num_blocks
        return 0

    def are_behind(self, names: Seq[bytes], *, with_host: bool) -> BoolArray:
        """Return whether a saved state stands behind each block, [num_names] bool."""
        holds, copies = self.prefix_cache.holds, self.host.names if with_host and self._has_room else None
        if copies is None:
            return np.array([holds(name) for name in names], np.bool_)
        return np.array([holds(name) or copies.holds(name) for name in names], np.bool_)

    @property
    def _has_room(self) -> bool:
        return self.num_free > 0

    def block_of(self, name: bytes) -> int:
        """Return the block of the saved state with this name; -1: only the host has it, or nobody."""
        return int(self.prefix_cache.blocks_of([name])[0])

    def is_on_device(self, name: bytes) -> bool:
        """Return whether nothing need come from the host for a sequence that begins with a state; b"": with none."""
        return not name or self.prefix_cache.holds(name)

    def is_expected(self, names: Iterable[bytes]) -> bool:
        """Return whether a running prefill is to save a state with one of these names, or it is on its way."""
        return bool(self._num_expecting) and any(name in self._num_expecting for name in names)

    def places(self, num_tokens: int, num_cached: int, num_in_chain: int) -> list[int]:
        """Return behind how many tokens an admission of `num_tokens` saves its state.

        Args:
            num_tokens: To be computed, and found.
            num_cached: Blocks of its prefix, which ends at a saved state.
            num_in_chain: Blocks of its prefix that are cached, with or without a state behind them.
        """
        before, places = num_cached, []
        for place in (num_in_chain, (num_tokens - 1) // self.block_size) if self.finds_prefixes else ():
            if place - before >= INTERVAL_BLOCKS:
                places.append(place * self.block_size)
                before = place
        return places

    def follows(self, num_outputs: int) -> bool:
        """Return whether states of so many outputs are saved on their way: the pool has room for others beside them."""
        return self.finds_prefixes and 2 * num_outputs <= self.allocator.num_blocks

    def num_left(self, positions: Int32Array) -> Int32Array:
        """Return how many tokens are left to the next place where the state of an output is saved, 1 to `interval`."""
        num_left: Int32Array = self.interval - positions % self.interval
        return num_left

    def drop(self, names: Seq[bytes]) -> None:
        """Forget the saved states behind blocks that are evicted: no prefix ends there any more."""
        for pool, cache in ((self.allocator, self.prefix_cache), (self.host.allocator, self.host.names)):
            if cache is not None:
                held = cache.blocks_of([name for name in names if cache.holds(name)])
                pool.drop(held[pool.ref_counts[held] == 0].tolist())

    # Saves ---------------------------------------------------------------------------------------

    def expect(self, slot: int, names: Seq[bytes]) -> None:
        """Note the names of the states that the prefill of a slot will save."""
        if names:
            self._expected[slot] = [*names]
            self._num_expecting.update(names)

    def save(
        self, slot: int, num_tokens: int, name: bytes = b"", *, is_rolling: bool = False, goes_first: bool = False
    ) -> Save | None:
        """Begin to save the state of a slot; None: there is no block for it."""
        if not self.allocator.num_free_blocks:
            self._meet(slot, name)
            return None
        block = int(self.allocator.allocate(1)[0])
        save = Save(slot, num_tokens, block, name, is_rolling, goes_first)
        self.saves.setdefault(slot, []).append(save)
        return save

    def take(self, save: Save, name_of: Callable[[int, int], bytes]) -> None:
        """Take a state that a step has saved: from now on it is found.

        Args:
            save: The state.
            name_of: Returns the name of the last block of so many tokens of a slot.
        """
        is_here = save in self.saves.get(save.slot, ())
        if is_here:
            save.name = save.name or name_of(save.slot, save.num_tokens)
            self._remove(save)
        if save.name and not (save.goes_first and self.prefix_cache.holds(save.name)):
            self.allocator.register([save.name], [save.block])
        self.allocator.free(np.array([save.block], np.int32), goes_first=save.goes_first)
        if is_here:
            self._meet(save.slot, save.name)
            if save.is_rolling:
                self.host.unwant(save.block)  # the next one will take its place
                self._replace_last(save)

    def leave(self, slot: int, name_of: Callable[[int, int], bytes]) -> None:
        """Name the states of a slot that are on their way, as far as their tokens are known: its sequence leaves."""
        for save in self.saves.pop(slot, ()):
            save.name = save.name or name_of(slot, save.num_tokens)
        for name in self._expected.pop(slot, ()):
            self._count_down(name)
        if (last := self._last_of_output.pop(slot, None)) is not None and self.prefix_cache.hash_of(last[0]) == last[1]:
            self.host.want(np.array(last[:1], np.intp))

    def _remove(self, save: Save) -> None:
        self.saves[save.slot].remove(save)
        if not self.saves[save.slot]:
            del self.saves[save.slot]

    def _meet(self, slot: int, name: bytes) -> None:
        """Note that a state which a prefill was to save is saved, or will never be."""
        names = self._expected.get(slot, [])
        if name in names:
            names.remove(name)
            self._count_down(name)
            if not names:
                del self._expected[slot]

    def _count_down(self, name: bytes) -> None:
        self._num_expecting[name] -= 1
        if not self._num_expecting[name]:
            del self._num_expecting[name]

    def _replace_last(self, save: Save) -> None:
        """Drop the state that the output had saved before, unless an admission uses it."""
        former = self._last_of_output.pop(save.slot, None)
        if former is not None:
            block, name = former
            if not self.allocator.ref_counts[block] and self.prefix_cache.hash_of(block) == name:
                self.allocator.drop([block])
        if self.prefix_cache.hash_of(save.block) == save.name:
            self._last_of_output[save.slot] = save.block, save.name

    # Loads, and moves to the host ----------------------------------------------------------------

    def hold(self, block: int) -> None:
        """Keep a saved state until the step that loads it is made."""
        self.allocator.acquire(np.array([block]))

    def hold_named(self, name: bytes) -> tuple[int, list[tuple[int, int]]]:
        """Keep the saved state with a name until the step that loads it is made.

        Returns its block, and the pair of a swap-in as on the wire if only the host had it; there must be room.
        """
        block = self.block_of(name)
        if block >= 0:
            self.hold(block)
            return block, []
        brought = self.allocator.allocate(1)
        self.allocator.register([name], brought.tolist())
        return int(brought[0]), self.host.bring([name], brought)

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of states that were held, once for each time."""
        for block in blocks:
            self.allocator.free(np.array([block], np.int32))

    def check_integrity(self, on_their_way: Iterable[Save], held: Iterable[int] = ()) -> None:
        """Assert that exactly states on their way, here or elsewhere, have references; what is expected is counted."""
        self.allocator.check_integrity()
        self.prefix_cache.check_integrity()
        named = Counter(save.block for save in on_their_way)
        named.update(held)
        ours = [save.block for saves in self.saves.values() for save in saves]
        assert set(ours) <= set(named), "a state is on its way in no step"
        counted = {block: int(count) for block, count in enumerate(self.allocator.ref_counts.tolist()) if count}
        assert dict(named) == counted, f"states on their way are in {dict(named)}, reference counts are {counted}"
        expected = Counter(name for names in self._expected.values() for name in names)
        assert expected == self._num_expecting, "what prefills are to save is miscounted"
