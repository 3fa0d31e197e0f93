"""Decodes in plain torch operations that look at nothing on the host: what a CUDA graph could capture, on a CPU.

Every row reads as many blocks as its block table is wide, which is what the longest sequence may need. A model that is
served with plain torch has no graphs for that reason: its backend reads what the lengths ask for.
"""

import torch

from executor_svc.attention.explicit_attention import attend_explicitly, slopes_on
from executor_svc.attention.interface import AttentionLayer, DecodeBatch, LayerCache, Rotation
from executor_svc.attention.key_value_write import read_in_torch, write_in_torch
from executor_svc.attention.step_reads import score_dtype
from executor_svc.attention.torch_backend import TorchAttentionBackend


class TorchDecodePlanner(TorchAttentionBackend):
    """The torch backend with decodes that a CUDA graph could hold; see `DecodePlanner`."""

    def decode_plan(self, batch: DecodeBatch, cache: LayerCache) -> "TorchDecodePlan":
        """Prepare decodes that depend on nothing on the host."""
        return TorchDecodePlan(batch, cache)


class TorchDecodePlan:
    """See `executor_svc.attention.interface.DecodePlanner`."""

    def __init__(self, batch: DecodeBatch, cache: LayerCache) -> None:
        self._batch = batch
        self._block_size = cache.block_size
        num_blocks = batch.block_tables.shape[1]
        positions = torch.arange(num_blocks * self._block_size, device=batch.block_tables.device)
        # Key position - query position, [num_rows, num_keys].
        self._distances = positions - (batch.num_visible_tokens[:, None] - 1)

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Rotate, write, attend; see `AttentionPlan`."""
        take = read_in_torch if layer.reads_only else write_in_torch
        query, _, _ = take(qkv, rotation, self._batch.slot_mapping, cache)
        hidden = self._distances > 0
        if layer.window_tokens is not None:
            hidden = hidden | (self._distances <= -layer.window_tokens)
        num_rows, num_blocks = self._batch.block_tables.shape
        is_read = ~hidden.view(num_rows, num_blocks, self._block_size).all(-1)
        block_ids = torch.where(is_read, self._batch.block_tables, 0).flatten()
        # Hidden keys have weight 0, but 0 * NaN is NaN.
        keys, values = (
            pool.index_select(0, block_ids)
            .view(num_rows, -1, *pool.shape[2:])
            .masked_fill(hidden[:, :, None, None], 0.0)
            for pool in (cache.keys, cache.values)
        )
        slopes = layer.alibi_slopes
        output = attend_explicitly(
            query[:, None],
            keys,
            values,
            distances=self._distances[:, None].to(score_dtype(query.dtype)),
            hidden=hidden[:, None],
            scale=layer.scale,
            soft_cap=layer.soft_cap,
            slopes=None if slopes is None else slopes_on(query.device, query.dtype, slopes),
            sinks=layer.sinks,
        )
        return output.flatten(1)
