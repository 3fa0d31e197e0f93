"""The receiver's end of a transfer: nothing is computed, kept or written for who cannot prove to know its secret.

One message is held at a time, or one block where a block is larger. Codes are checked, and blocks written, on threads.
Errors are raised; `octavo_shared/grpc/grpc_status.py` turns them into status.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from executor_svc.transfers.messages import ACCEPTED, BlockFormat, Part, check_code, check_size
from executor_svc.transfers.pending import Outcome, PendingTransfers, Reason, Transfer, TransferEndedError
from executor_svc.transfers.sender import SILENCE_S, patience
from executor_svc.worker.interface import Worker
from octavo.execution.v1 import block_transfer_service_pb2 as pb
from octavo.execution.v1.block_transfer_service_pb2_grpc import BlockTransferServiceServicer
from octavo_shared.errors import FencedError, InvalidFieldError, OctavoServiceError, UnknownNameError

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["BlockTransferService"].full_name

Requests = AsyncIterator[pb.SendBlocksRequest]


class BlockTransferServicer(BlockTransferServiceServicer):
    """Takes blocks for the transfers that wait for them.

    Args:
        pending: All transfers.
        place: Returns where blocks are written, and what they are, as it is now.
    """

    def __init__(self, pending: PendingTransfers, place: Callable[[], tuple[Worker, BlockFormat]]) -> None:
        self._pending = pending
        self._place = place

    async def SendBlocks(  # noqa: N802
        self, request_iterator: Requests, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SendBlocksResponse:
        """Receive the blocks of one transfer."""
        try:
            async with asyncio.timeout(SILENCE_S):
                first = await anext(request_iterator, None)
        except TimeoutError:
            raise InvalidFieldError("content", "absent", "the header, in the first message") from None
        transfer = await self._awaited(first)
        assert first is not None
        if not self._pending.claim(transfer):
            raise FencedError(f"{_named(transfer)} is being received already, or has ended")
        try:
            await self._receive(transfer, first, request_iterator, context)
            self._pending.finish(transfer, Outcome.ARRIVED)
        except TransferEndedError as error:
            self._pending.cancel(transfer, error.reason, error.words)
            raise FencedError(f"{_named(transfer)} was cancelled: {error.words}") from error
        except OctavoServiceError as error:
            self._pending.cancel(transfer, Reason.PEER, str(error))
            raise
        except asyncio.CancelledError:
            self._pending.cancel(transfer, Reason.PEER, "the sender has broken off")
            raise
        except Exception as error:
            self._pending.cancel(transfer, Reason.FAULT, f"{type(error).__name__}: {error}")
            raise
        return pb.SendBlocksResponse()

    async def _awaited(self, first: pb.SendBlocksRequest | None) -> Transfer:
        """Return the transfer that a first message proves to belong to. Raises: it does not."""
        transfer = None if first is None else self._pending.awaited(first.transfer_id)
        if first is None or transfer is None:
            raise UnknownNameError("no such transfer waits for its blocks here")
        if first.index:
            raise InvalidFieldError("index", first.index, "0, in the first message")
        check_size(first)
        await asyncio.to_thread(check_code, transfer.secret, first)
        return transfer

    async def _receive(
        self,
        transfer: Transfer,
        first: pb.SendBlocksRequest,
        requests: Requests,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Write all blocks. Raises OctavoServiceError, TransferEndedError: they did not all come as they should."""
        worker, block_format = self._place()
        try:
            header = pb.BlockTransferHeader.FromString(first.content)
        except DecodeError:
            raise InvalidFieldError("content", "no header", "a BlockTransferHeader, in the first message") from None
        if difference := block_format.difference(header, transfer.block_ids):
            raise TransferEndedError(Reason.DIFFERENCE, difference)
        await context.send_initial_metadata((ACCEPTED,))
        index = 0
        for part in block_format.parts(transfer.block_ids):
            taking = _Taking(transfer, self._pending, worker, part)
            for size in part.piece_sizes():
                index += 1
                message = await _next(transfer, requests)
                if message is None:
                    raise InvalidFieldError("index", index - 1, "that of the last message; blocks are missing")
                if (message.transfer_id, message.index) != (transfer.transfer_id, index):
                    raise InvalidFieldError("index", message.index, f"{index}, of the same transfer")
                if len(message.content) != size:
                    raise InvalidFieldError("content", f"{len(message.content)} bytes", f"{size} bytes here")
                await asyncio.to_thread(taking.take, message)
        if await _next(transfer, requests) is not None:
            raise InvalidFieldError("index", index + 1, f"at most {index}; all blocks have come")


class _Taking:
    """Checks the pieces of a part, and writes its blocks with the last one; on threads, one at a time."""

    def __init__(self, transfer: Transfer, pending: PendingTransfers, worker: Worker, part: Part) -> None:
        self._transfer, self._pending, self._worker, self._part = transfer, pending, worker, part
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def take(self, message: pb.SendBlocksRequest) -> None:
        """Take the next piece. Raises PermissionDeniedError: its code is wrong; TransferEndedError: too late."""
        check_code(self._transfer.secret, message)
        self._pieces.append(message.content)
        self._num_bytes += len(message.content)
        if self._num_bytes == self._part.num_bytes:
            content = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            with self._pending.copying(self._transfer):
                self._worker.write_blocks(self._part.block_ids, content)


async def _next(transfer: Transfer, requests: Requests) -> pb.SendBlocksRequest | None:
    """Return the sender's next message; None: there is none."""
    async with patience(transfer):
        return await anext(requests, None)


def _named(transfer: Transfer) -> str:
    return f"transfer {transfer.transfer_id:016x}"
