"""One executor's end of transfers: blocks that it sends to others, and blocks whose content comes to it.

    sender:    cached or used ──named in a step──> held too ──told as sent or cancelled──> as before
    receiver:  free ──allocated, named in a step──> held ──told as arrived──> cached, with its name
                                                      └──told as cancelled──> free

A block that is sent has a reference more, so that nobody writes it. A block that comes has one reference and no name,
and counts as being written, so that whoever needs its prefix waits for it. Pure.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import BlockReceive, BlockSend, Int32Array, Step, StepResult
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.blocks.prefixes import Part
from scheduler_svc.core.step.step_size import CANCEL_BYTES, transfer_bytes


class Ended(NamedTuple):
    """Transfers that a result has told as ended, by their numbers; those given up are no fault."""

    arrived: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    cancelled: tuple[int, ...] = ()
    given_up: frozenset[int] = frozenset()


NOTHING_ENDED = Ended()


class BlockTransfers:
    """The transfers of one executor that have begun and were not told as ended.

    Args:
        blocks: Of the executor.

    Attributes:
        sending, receiving: What each transfer moves, by its number.
        given_up: Those that are cancelled because their blocks are wanted here.
        has_news: Whether a step has to tell the executor something.
    """

    has_news = False  # an attribute, because every step looks

    def __init__(self, blocks: BlockManager) -> None:
        self.sending: dict[int, list[Part]] = {}
        self.receiving: dict[int, list[Part]] = {}
        self.given_up: set[int] = set()
        self._blocks = blocks
        # For the next step.
        self._to_send: dict[int, BlockSend] = {}
        self._to_receive: dict[int, BlockReceive] = {}
        self._to_cancel: list[int] = []

    def __len__(self) -> int:
        return len(self.sending) + len(self.receiving)

    def send(self, number: int, receiver: str, parts: list[Part]) -> None:
        """Let the next step send cached or used blocks to the executor at an address."""
        for part in parts:
            self._blocks.pools[part.pool].allocator.acquire(part.blocks)
        self.sending[number] = parts
        self.has_news = True
        self._to_send[number] = BlockSend(number, receiver, "", self._wire_ids(parts), b"")

    def receive(self, number: int, parts: list[Part]) -> None:
        """Let the next step wait for the content of blocks that were allocated for it."""
        self.receiving[number] = parts
        self.has_news = True
        self._to_receive[number] = BlockReceive(number, self._wire_ids(parts), b"")
        for part in parts:
            if part.pool == 0:
                self._of_first_pool.start_writing(_writer(number), part.names)

    def cancel(self, number: int) -> bool:
        """Let the next step cancel a transfer, if it is pending here; return whether it has ended at once."""
        if self._to_send.pop(number, None) is not None or self._to_receive.pop(number, None) is not None:
            self._end(number, has_arrived=False)
            return True
        if number in self.sending or number in self.receiving:
            self.has_news = True
            self._to_cancel.append(number)
        return False

    def cancel_all(self) -> None:
        """Let the next step cancel all transfers that the executor was told of."""
        told = (self.sending.keys() | self.receiving.keys()) - self._to_send.keys() - self._to_receive.keys()
        self.has_news = True
        self._to_cancel += sorted(told - self.given_up)
        self.given_up |= told

    def put_into(self, step: Step, num_bytes: int) -> int:
        """Let a step tell what is new, as far as its message has room; return the bytes that are left.

        Blocks are sent as they are before a step: those that this one swaps in wait for the next one.
        """
        swapped_in = set(step.blocks_to_swap_in[:, 1].tolist())
        sends, receives = list[BlockSend](), list[BlockReceive]()
        num_bytes -= CANCEL_BYTES * len(self._to_cancel)
        begun_here: list[BlockSend | BlockReceive] = [*self._to_send.values(), *self._to_receive.values()]
        for begun in begun_here:
            if swapped_in and isinstance(begun, BlockSend) and not swapped_in.isdisjoint(begun.block_ids.tolist()):
                continue
            num_bytes -= transfer_bytes(len(begun.block_ids))
            if num_bytes < 0:
                break
            if isinstance(begun, BlockSend):
                sends.append(self._to_send.pop(begun.transfer_id))
            else:
                receives.append(self._to_receive.pop(begun.transfer_id))
        step.blocks_to_send, step.blocks_to_receive = tuple(sends), tuple(receives)
        step.transfers_to_cancel, self._to_cancel = tuple(self._to_cancel), []
        self.has_news = bool(self._to_send or self._to_receive)
        return max(0, num_bytes)

    def check(self, result: StepResult) -> None:
        """Raise ExecutorFaultError if a result tells of transfers that are not pending here, or of one twice."""
        told = [*result.arrived_transfers, *result.sent_transfers, *result.cancelled_transfers]
        sent = self.sending.keys() - self._to_send.keys()
        received = self.receiving.keys() - self._to_receive.keys()
        is_known = received.issuperset(result.arrived_transfers) and sent.issuperset(result.sent_transfers)
        if len(set(told)) < len(told) or not (is_known and (sent | received).issuperset(result.cancelled_transfers)):
            raise ExecutorFaultError(f"step {result.step_id} tells of transfers that are not pending")

    def take(self, result: StepResult) -> Ended:
        """Take the ends of transfers from a checked result."""
        if not (result.arrived_transfers or result.sent_transfers or result.cancelled_transfers):
            return NOTHING_ENDED
        given_up = frozenset(self.given_up)
        for number in result.arrived_transfers:
            self._end(number, has_arrived=True)
        for number in (*result.sent_transfers, *result.cancelled_transfers):
            self._end(number, has_arrived=False)
        return Ended(result.arrived_transfers, result.sent_transfers, result.cancelled_transfers, given_up)

    def held(self, pool: int) -> Iterator[int]:
        """Yield the blocks of a pool that transfers hold, once for each."""
        for parts in (*self.sending.values(), *self.receiving.values()):
            for part in parts:
                if part.pool == pool:
                    yield from part.blocks.tolist()

    def _end(self, number: int, *, has_arrived: bool) -> None:
        received = self.receiving.pop(number, None)
        if received is not None:
            self._of_first_pool.stop_writing(_writer(number))
        if number in self._to_cancel:
            self._to_cancel.remove(number)
        self.given_up.discard(number)
        for part in received or self.sending.pop(number):
            allocator = self._blocks.pools[part.pool].allocator
            if has_arrived:
                allocator.register(part.names, part.blocks.tolist())
            allocator.free(part.blocks.astype(np.int32))

    @property
    def _of_first_pool(self) -> PrefixCache:
        cache = self._blocks.prefix_cache
        assert cache is not None
        return cache

    def _wire_ids(self, parts: list[Part]) -> Int32Array:
        ids: list[IndexArray] = [part.blocks + self._blocks.pools[part.pool].first_id for part in parts]
        return np.concatenate(ids).astype(np.int32)


def _writer(number: int) -> int:
    """Return what stands for a transfer among the slots that write blocks."""
    return -number
