"""The content of blocks as bytes: moved to host blocks and back, and for other executors.

A block is its content in all pools, one after the other. For other executors any thread may read and write beside the
steps that compute, which do not touch these blocks.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.device.transfer import index_to_device
from octavo_shared.step_wire.step import Int32Array


class BlocksInMemory:
    """Blocks in host memory, where a launched step is done.

    NumPy copies them, each byte once: torch would gather them first, and start threads for each thread that calls it.

    Args:
        pools: Each [num_blocks, ...], equal in shape and dtype; the elements of a block lie side by side.

    Attributes:
        block_bytes: Of a block over all pools.
    """

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        # Of each piece of memory that a block has: [num_blocks, bytes].
        self._pieces = [piece.view(torch.uint8).numpy() for piece in (_whole(pools) or [p.flatten(1) for p in pools])]
        self._piece_bytes = self._pieces[0].shape[1]
        self.block_bytes = len(self._pieces) * self._piece_bytes

    def begin(self) -> None:
        """Nothing is to be waited for."""

    def move_out(self, pairs: Int32Array, host_blocks: npt.NDArray[np.uint8]) -> None:
        """Copy blocks to host blocks, [num_host_blocks, block_bytes]; `pairs` [n, 2]: block, host block."""
        for index, piece in enumerate(self._pieces):
            own = host_blocks[:, index * self._piece_bytes : (index + 1) * self._piece_bytes]
            for block, host_block in pairs.tolist():
                own[host_block] = piece[block]

    def move_in(self, pairs: Int32Array, host_blocks: npt.NDArray[np.uint8]) -> None:
        """Copy host blocks to blocks; `pairs` [n, 2]: host block, block."""
        for index, piece in enumerate(self._pieces):
            own = host_blocks[:, index * self._piece_bytes : (index + 1) * self._piece_bytes]
            for host_block, block in pairs.tolist():
                piece[block] = own[host_block]

    def read(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the content of blocks, [n, block_bytes]."""
        content = np.empty((len(block_ids), len(self._pieces), self._piece_bytes), np.uint8)
        for index, piece in enumerate(self._pieces):
            content[:, index] = piece[block_ids]
        return content.reshape(len(block_ids), -1)

    def write(self, block_ids: Int32Array, content: npt.NDArray[np.uint8]) -> None:
        """Make `content`, [n, block_bytes], that of blocks."""
        by_piece = content.reshape(len(block_ids), len(self._pieces), self._piece_bytes)
        for index, piece in enumerate(self._pieces):
            piece[block_ids] = by_piece[:, index]


def _whole(pools: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the one piece of memory that all pools are parts of, [num_blocks, elements]; none: they are apart."""
    first, size = pools[0].flatten(1), pools[0].shape[1:].numel()
    begins = [pool.data_ptr() for pool in pools]
    are_joined = begins == [begins[0] + index * size * first.itemsize for index in range(len(pools))]
    if len(pools) == 1 or not are_joined or first.stride(0) != size * len(pools):
        return []
    return [first.as_strided((len(first), size * len(pools)), (size * len(pools), 1))]


class CudaBlockTransfers:
    """Blocks on a GPU: copied in a stream of its own, gathered on the device first; see `BlocksInMemory`."""

    def __init__(self, pools: Sequence[torch.Tensor], device: torch.device) -> None:
        self._pools, self._device = pools, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.block_bytes = len(pools) * pools[0].shape[1:].numel() * pools[0].itemsize

    def begin(self) -> None:
        """Let what follows wait for what has been launched in the stream that computes."""
        self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def read(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the content of blocks, [n, block_bytes]; wait for it."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            sources = index_to_device(block_ids, self._device)
            gathered = torch.stack([pool.index_select(0, sources) for pool in self._pools], dim=1)
            content = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            content.copy_(gathered, non_blocking=True)
            self._stream.synchronize()
        return content.view(torch.uint8).numpy().reshape(len(block_ids), -1)

    def write(self, block_ids: Int32Array, content: npt.NDArray[np.uint8]) -> None:
        """Make `content`, [n, block_bytes], that of blocks; return when it is."""
        shape = (len(block_ids), len(self._pools), *self._pools[0].shape[1:])
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            pinned = torch.empty(shape, dtype=self._pools[0].dtype, pin_memory=True)
            pinned.view(torch.uint8).numpy().reshape(content.shape)[:] = content
            arrived = pinned.to(self._device, non_blocking=True)
            destinations = index_to_device(block_ids, self._device)
            for index, pool in enumerate(self._pools):
                pool.index_copy_(0, destinations, arrived[:, index])
            self._stream.synchronize()


def block_transfers(pools: Sequence[torch.Tensor], device: torch.device) -> BlocksInMemory | CudaBlockTransfers:
    """Return what reads and writes blocks of some pools."""
    return CudaBlockTransfers(pools, device) if device.type == "cuda" else BlocksInMemory(pools)
