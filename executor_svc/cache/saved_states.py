"""Saved states: what a sequence that begins alike, or returns, goes on from."""

import numpy as np
import torch

from executor_svc.cache.cache_engine import MAX_STAGED_BLOCKS, BlockPools
from executor_svc.device.transfer import index_to_device
from executor_svc.states.live_states import LiveStates
from octavo_shared.step_wire.step import Int32Array, Step

# Of a swap, gathered on the device at once: a state has the size of many blocks.
_STAGED_BYTES = 64 * 2**20
# On a CPU rows of this size are copied one by one: to gather them first would touch memory twice.
_LARGE_ROW_BYTES = 2**16


class SavedStates(BlockPools):
    """Pools of saved states, on the device and on the host; a block is the state of a sequence over all layers.

    Args:
        live: Where states come from and go to.
        num_blocks: Of the device pool.
        num_host_blocks: Of the host pool.
        first_block: Id of the first block of the device pool in a step.
        device: Where the model runs.
    """

    def __init__(
        self, live: LiveStates, num_blocks: int, num_host_blocks: int, first_block: int, device: torch.device
    ) -> None:
        tensors = [tensor for layer in live.layers for tensor in (layer.conv, layer.recurrent) if tensor.numel()]
        self._live = [tensor.flatten(1) for tensor in tensors]  # views: [max_num_seqs, numbers of a slot]
        sizes = [rows.shape[1] for rows in self._live]
        # A saved state is one piece of memory over all layers: a swap moves it at once.
        pool = torch.empty(num_blocks, sum(sizes), device=device)
        super().__init__([pool], num_host_blocks, num_staged_states(4 * sum(sizes)), device)
        self._saved = torch.split(pool, sizes, dim=1)
        self._first_block = first_block

    def move(self, step: Step) -> None:
        """Save the states of slots, swap out, swap in, copy, load the states of admissions: in this order.

        Of the moves of blocks only those of saved states, numbered as in their pools. Slots and blocks exist; see
        `executor_svc.worker.interface.check_states`.
        """
        if len(step.states_to_save):
            slots, _, blocks = step.states_to_save.T
            for live, saved in zip(self._live, self._saved, strict=True):
                _copy_rows(live, slots, saved, blocks - self._first_block)
        super().move(step)
        begins = [(each.slot, each.state_block) for each in step.delta.admissions if each.state_block is not None]
        if begins:
            slots, blocks = np.array(begins, np.int32).T
            for live, saved in zip(self._live, self._saved, strict=True):
                _copy_rows(saved, blocks - self._first_block, live, slots)


def num_staged_states(state_bytes: int) -> int:
    """Return how many states of a swap are gathered on the device at once."""
    return max(1, min(MAX_STAGED_BLOCKS, _STAGED_BYTES // state_bytes))


def _copy_rows(source: torch.Tensor, sources: Int32Array, destination: torch.Tensor, destinations: Int32Array) -> None:
    """Copy rows of one matrix into rows of another; no destination is there twice."""
    if source.is_cpu and source.shape[1] * source.itemsize >= _LARGE_ROW_BYTES:
        for from_row, to_row in zip(sources.tolist(), destinations.tolist(), strict=True):
            destination[to_row] = source[from_row]
        return
    rows = source.index_select(0, index_to_device(sources, source.device))
    destination.index_copy_(0, index_to_device(destinations, source.device), rows)
