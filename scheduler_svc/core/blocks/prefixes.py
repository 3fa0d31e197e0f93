"""The longest prefix that is there: on the device, on the host, and for another executor.

A prefix is found up to the last block behind which the next token finds all blocks that it sees, in all cache groups,
and a saved state if the model has states. What only the host has is found where bringing it back costs less than
computing it (`StepCost.pays`).

Pure. Read next: `block_manager.py`, which gives out what is found.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import BoolArray
from scheduler_svc.core.blocks.group_blocks import Found, GroupBlocks
from scheduler_svc.core.blocks.saved_states import SavedStates
from scheduler_svc.core.step.step_cost import StepCost

# A prefix on the host is not worth a move for fewer blocks more than the device has.
LEAST_BROUGHT_BLOCKS = 2


@dataclass(slots=True)
class Prefix:
    """The longest prefix of a sequence, in blocks.

    Attributes:
        num_cached: Blocks.
        num_in_chain: The same, with a saved state behind them or not.
        found: What each cache group has of it that the token behind it sees.
        num_brought: Blocks that come from the host.
    """

    num_cached: int
    num_in_chain: int
    found: Seq[Found]
    num_brought: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Named blocks of a pool, a number of `BlockManager.pools`, that go to another executor or come from one."""

    pool: int
    names: list[bytes]
    blocks: IndexArray


class Prefixes:
    """Finds prefixes; there must be a prefix cache.

    Args:
        groups: The cache groups.
        states: The saved states; None: none is saved.
        states_pool: The number of their pool.
    """

    def __init__(self, groups: Seq[GroupBlocks], states: SavedStates | None, states_pool: int) -> None:
        self._groups, self._states, self._states_pool = groups, states, states_pool
        self._pools: dict[int, GroupBlocks | SavedStates] = dict(enumerate(groups))
        if states is not None:
            self._pools[states_pool] = states

    def find(self, names: list[bytes], step_cost: StepCost) -> Prefix:
        """Return the longest prefix with these names on the device, or on both places if the longer one pays."""
        prefix = self.longest(names)
        if prefix.num_cached == len(names):
            return prefix
        longer = self.longest(names, with_host=True)
        num_more = longer.num_cached - prefix.num_cached
        size = self._groups[0].block_size
        pays = num_more >= LEAST_BROUGHT_BLOCKS and step_cost.pays(self._bytes_to_bring(names, longer), num_more * size)
        return longer if pays else prefix

    def longest(self, names: list[bytes], *, with_host: bool = False) -> Prefix:
        """Return the longest prefix with these names, on the device alone or on both places."""
        first, states = self._groups[0], self._states
        if len(self._groups) == 1 and not first.window:
            assert first.prefix_cache is not None
            blocks, copies = first.prefix_cache.match(names, len(names)), first.host.names
            if not with_host or copies is None or not (states or copies.holds(names[len(blocks)])):
                num_cached = len(blocks) if states is None else states.longest(names[: len(blocks)])
                return Prefix(num_cached, len(blocks), [Found(blocks[:num_cached], [])])
        ends: BoolArray = np.logical_and.reduce([group.ends(names, with_host=with_host) for group in self._groups])
        num_in_chain = num_cached = int(ends.nonzero()[0][-1])
        if states is not None:
            ends[1:] &= states.are_behind(names, with_host=with_host)
            num_cached = int(ends.nonzero()[0][-1])
        found = [group.found(names[:num_cached], with_host=with_host) for group in self._groups]
        return Prefix(num_cached, num_in_chain, found, max(len(of_group.names_on_host) for of_group in found))

    def _bytes_to_bring(self, names: list[bytes], prefix: Prefix) -> int:
        pairs = zip(self._groups, prefix.found, strict=True)
        num_bytes = sum(len(found.names_on_host) * group.host.block_bytes for group, found in pairs)
        if self._states is not None and prefix.num_cached and self._states.block_of(names[prefix.num_cached - 1]) < 0:
            num_bytes += self._states.host.block_bytes
        return num_bytes

    # To and from other executors -------------------------------------------------------------------

    def exportable(self, names: list[bytes]) -> tuple[int, list[Part]]:
        """Return how many of the first blocks with these names the device has, and all that goes with them."""
        if not names:
            return 0, []
        prefix = self.longest(names)
        end, parts = prefix.num_cached, list[Part]()
        for pool, (group, found) in enumerate(zip(self._groups, prefix.found, strict=True)):
            parts.append(Part(pool, names[group.first_seen(end) : end], found.blocks))
        if self._states is not None and end:
            block: IndexArray = np.array([self._states.block_of(names[end - 1])], np.intp)
            parts.append(Part(self._states_pool, [names[end - 1]], block))
        return end, parts

    def num_held(self, names: list[bytes]) -> int:
        """Return how many of the first blocks with these names are here, on the device or the host."""
        num_cached = self.longest(names).num_cached if names else 0
        return num_cached if num_cached == len(names) else self.longest(names, with_host=True).num_cached

    def reserve(self, parts: list[Part], *, least: int) -> tuple[list[Part], list[Part]] | None:
        """Take blocks for the content of another executor's, as far as it is not here and not on its way.

        Returns what the other one sends, and its place here; None: there is no room, or fewer blocks than `least` of
        the first cache group are to come.
        """
        sent, received = list[Part](), list[Part]()
        for part in parts:
            cache = self._pools[part.pool].prefix_cache
            assert cache is not None
            wanted = [not (cache.is_anywhere(name) or cache.is_being_written(name)) for name in part.names]
            if any(wanted):
                names = [name for name, is_wanted in zip(part.names, wanted, strict=True) if is_wanted]
                sent.append(Part(part.pool, names, part.blocks[np.array(wanted, np.bool_)]))
        if not sent or sent[0].pool or len(sent[0].names) < least:
            return None
        if any(len(part.names) > self._pools[part.pool].num_free for part in sent):
            return None
        for part in sent:
            blocks = self._pools[part.pool].allocator.allocate(len(part.names)).astype(np.intp)
            received.append(Part(part.pool, part.names, blocks))
        return sent, received
