"""The sender's end of a transfer: dial the receiver, show the header, send the blocks piece by piece.

Blocks are read and hashed on threads; one part of them is held at a time. Next: `servicer.py`, the other end.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np

from executor_svc.transfers.messages import ACCEPTED, BlockFormat, Part, message_of
from executor_svc.transfers.pending import Outcome, PendingTransfers, Reason, Transfer, TransferEndedError
from executor_svc.worker.interface import Worker
from octavo.execution.v1 import block_transfer_service_pb2 as pb
from octavo.execution.v1.block_transfer_service_pb2_grpc import BlockTransferServiceStub
from octavo_shared.grpc.grpc_status import failure_text

# A transfer in which nothing comes for so long is cancelled, in seconds.
SILENCE_S = 30.0
# How long a receiver may not have been told of a transfer yet, in seconds.
UNKNOWN_S = 10.0
# The first wait of a sender until it asks such a receiver again, in seconds; each is twice the one before, up to:
FIRST_WAIT_S, LONGEST_WAIT_S = 0.01, 0.32

# Opens a channel to an address; used as an async context manager.
Dial = Callable[[str], Any]


@asynccontextmanager
async def patience(transfer: Transfer) -> AsyncIterator[None]:
    """Wait for the peer in the block, as long as the transfer lives; on its event loop.

    Raises: TransferEndedError: it has ended, or nothing came for SILENCE_S.
    """
    if transfer.ending is not None:
        raise transfer.ending
    try:
        async with asyncio.timeout(SILENCE_S) as transfer.limit:
            yield
    except TimeoutError:
        silence = TransferEndedError(Reason.SILENCE, f"nothing came from the other executor for {SILENCE_S:g} s")
        raise transfer.ending or silence from None
    finally:
        transfer.limit = None


def hurry(transfer: Transfer) -> None:
    """Let what waits in the name of a transfer that has ended wait no more; on its event loop."""
    if transfer.limit is not None and not transfer.limit.expired():
        transfer.limit.reschedule(asyncio.get_running_loop().time())


async def send(
    transfer: Transfer, pending: PendingTransfers, worker: Worker, block_format: BlockFormat, dial: Dial
) -> None:
    """Send the blocks of a transfer, and end it: as sent, or as cancelled."""
    try:
        async with dial(transfer.address) as channel:
            stub = BlockTransferServiceStub(channel)
            await _until_known(transfer, lambda: _try(transfer, pending, worker, block_format, stub.SendBlocks()))
        pending.finish(transfer, Outcome.SENT)
    except TransferEndedError as error:
        pending.cancel(transfer, error.reason, error.words)
    except grpc.aio.AioRpcError as error:
        pending.cancel(transfer, Reason.PEER, f"the receiver at {transfer.address} ended it: {failure_text(error)}")
    except asyncio.CancelledError:
        pending.cancel(transfer, Reason.DRAIN, "this executor ends")
        raise
    except Exception as error:  # whatever it was, the transfer must end
        pending.cancel(transfer, Reason.FAULT, f"{type(error).__name__}: {error}")


async def _until_known(transfer: Transfer, attempt: Callable[[], Awaitable[None]]) -> None:
    """Try again while the receiver was not told of the transfer yet. Raises AioRpcError: what else it says."""
    loop, wait_s = asyncio.get_running_loop(), FIRST_WAIT_S
    give_up_at_s = loop.time() + UNKNOWN_S
    while True:
        try:
            return await attempt()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND or loop.time() >= give_up_at_s:
                raise
        async with patience(transfer):
            await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


async def _try(
    transfer: Transfer, pending: PendingTransfers, worker: Worker, block_format: BlockFormat, call: Any
) -> None:
    """Send all blocks in a call. Raises AioRpcError: the receiver has ended it; TransferEndedError: it must end."""
    header = block_format.header(transfer.block_ids, transfer.instance_id).SerializeToString()
    try:
        message = await asyncio.to_thread(message_of, transfer.secret, transfer.transfer_id, 0, header)
        async with patience(transfer):
            await call.write(message)
            if ACCEPTED[0] not in await call.initial_metadata():
                await call  # it has been refused, and no block need be read
        index = 1
        for part in block_format.parts(transfer.block_ids):
            messages = await asyncio.to_thread(_read, transfer, pending, worker, part, index)
            index += len(messages)
            for message in messages:
                async with patience(transfer):
                    await call.write(message)
        async with patience(transfer):
            await call.done_writing()
            await call
    except asyncio.InvalidStateError:  # it has ended while this end was busy: it says why
        async with patience(transfer):
            await call
    finally:
        call.cancel()


def _read(
    transfer: Transfer, pending: PendingTransfers, worker: Worker, part: Part, index: int
) -> list[pb.SendBlocksRequest]:
    """Return the messages with the content of a part, from an index on; on a thread."""
    with pending.copying(transfer):
        content = np.frombuffer(worker.read_blocks(part.block_ids), np.uint8)
    assert len(content) == part.num_bytes, "the worker reads what it says of its blocks"
    messages, begin = [], 0
    for place, size in enumerate(part.piece_sizes()):
        piece = content[begin : begin + size].tobytes()
        messages.append(message_of(transfer.secret, transfer.transfer_id, index + place, piece))
        begin += size
    return messages
