"""Attention by the xformers library: float16 and bfloat16 on a CUDA device, blocks of a multiple of 64 tokens.

Its Triton kernel (split-K) reads the paged cache in place, but under a causal mask it takes only rows of equally few
query tokens: the decodes of a step. Keys and values of rows with several tokens (prefill chunks) are gathered, and
attended to under an unpaged mask with the kernel that xformers picks. Masks are made from Python lists, once a step,
and shared by all layers; because of those lists no call can be captured in a CUDA graph.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from executor_svc.attention.block_tables import own_blocks_only
from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, LayerCache, Rotation
from executor_svc.attention.key_value_write import WriteKeysAndValues, write_in_torch
from executor_svc.device.transfer import index_to_device, to_device
from octavo_shared.step_wire.step import Int32Array


class XformersBackend:
    """Plans for the module `xformers`.

    Raises: ImportError: the library is missing, or does not fit the installed torch.
    """

    def __init__(self, write: WriteKeysAndValues = write_in_torch) -> None:
        self._fmha = import_module("xformers.ops.fmha")
        self._write = write

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> "XformersPlan":
        """Prepare a step."""
        return XformersPlan(self._fmha, self._write, metadata, cache)


@dataclass(frozen=True, slots=True)
class _Part:
    mask: Any  # of xformers, which is imported where it is used
    tokens: torch.Tensor | None  # which of the step's tokens, int64; None: all
    slots: torch.Tensor | None  # of the keys in the cache, row by row, int64; None: the mask has block tables


class XformersPlan:
    """One step, prepared; see `AttentionPlan`."""

    def __init__(
        self, fmha: ModuleType, write: WriteKeysAndValues, metadata: AttentionMetadata, cache: LayerCache
    ) -> None:
        self._fmha = fmha
        self._write = write
        self._metadata = metadata
        self._device = cache.keys.device
        rows = np.arange(len(metadata.lengths), dtype=np.int32)
        decodes, chunks = rows[metadata.lengths == 1], rows[metadata.lengths > 1]
        tables = own_blocks_only(metadata, cache.block_size, window=None)
        self._parts: list[_Part] = []
        if len(decodes):
            self._parts.append(self._decodes(decodes, tables, cache.block_size))
        if len(chunks):
            self._parts.append(self._chunks(chunks, tables, cache.block_size))

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Rotate, write the keys and values of all tokens into the cache, then attend."""
        assert layer.window_tokens is None, "there is no paged mask with a window; the rules say so"
        assert layer.soft_cap is None, "it has no soft cap; the rules say so"
        assert layer.alibi_slopes is None, "it has no paged mask with ALiBi; the rules say so"
        assert layer.sinks is None, "it has no sinks; the rules say so"
        assert layer.distance_biases is None, "it has no distance biases; the rules say so"
        query = self._write(qkv, rotation, self._metadata.slot_mapping, cache).query
        if len(self._parts) == 1:
            return self._attend_part(self._parts[0], query, cache, layer)
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for part in self._parts:
            output[part.tokens] = self._attend_part(part, query[part.tokens], cache, layer)
        return output

    def _attend_part(self, part: _Part, query: torch.Tensor, cache: LayerCache, layer: AttentionLayer) -> torch.Tensor:
        """Attend with the queries of a part, [n, num_heads, head_dim]; return [n, num_heads * head_dim]."""
        keys, values = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
        if part.slots is not None:
            keys, values = keys.index_select(0, part.slots), values.index_select(0, part.slots)
        num_kv_heads = keys.shape[1]
        group = query.shape[1] // num_kv_heads
        output: torch.Tensor = self._fmha.memory_efficient_attention_forward(
            # Five dimensions tell the library which query heads share a KV head: [1, n, num_kv_heads, group, head_dim].
            query.reshape(1, -1, num_kv_heads, group, query.shape[2]),
            keys[None, :, :, None].expand(-1, -1, -1, group, -1),
            values[None, :, :, None].expand(-1, -1, -1, group, -1),
            attn_bias=part.mask,
            scale=layer.scale,
            op=self._fmha.triton_splitk.FwOp if part.slots is None else None,
        )
        return output.squeeze(0).flatten(1)

    def _decodes(self, rows: Int32Array, tables: Int32Array, block_size: int) -> _Part:
        """Plan rows of one token."""
        mask = self._fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * len(rows),
            kv_seqlen=(self._metadata.starts[rows] + 1).tolist(),
            block_tables=to_device(tables[rows], self._device),
            page_size=block_size,
            device=self._device,
        )
        return _Part(mask, self._tokens_of(rows), slots=None)

    def _chunks(self, rows: Int32Array, tables: Int32Array, block_size: int) -> _Part:
        """Plan rows of several tokens."""
        lengths = self._metadata.lengths[rows]
        num_keys = self._metadata.starts[rows] + lengths
        mask = self._fmha.attn_bias.BlockDiagonalCausalFromBottomRightMask.from_seqlens(
            q_seqlen=lengths.tolist(), kv_seqlen=num_keys.tolist(), device=self._device
        )
        positions = _ranges(np.zeros_like(num_keys), num_keys)
        block_ids = tables[np.repeat(rows, num_keys), positions // block_size].astype(np.int64)
        slots = index_to_device(block_ids * block_size + positions % block_size, self._device)
        return _Part(mask, self._tokens_of(rows), slots)

    def _tokens_of(self, rows: Int32Array) -> torch.Tensor | None:
        """Return the indices of the rows' tokens in the step; None: all of them."""
        lengths = self._metadata.lengths
        if len(rows) == len(lengths):
            return None
        begins = np.cumsum(lengths) - lengths
        return index_to_device(_ranges(begins[rows], lengths[rows]), self._device)


def _ranges(begins: Int32Array, lengths: Int32Array) -> Int32Array:
    """Return begin, begin + 1, ... of each range, one range after the other."""
    ends = np.cumsum(lengths)
    ranges: Int32Array = np.arange(ends[-1]) + np.repeat(begins - (ends - lengths), lengths)
    return ranges
