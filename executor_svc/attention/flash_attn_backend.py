"""Attention by the flash-attn library, version 2 and version 3: float16 and bfloat16 on a CUDA device.

Both read the paged cache in place. Decodes go through `flash_attn_with_kvcache`, whose arguments are tensors on the
device, so that a CUDA graph can have the call. Into how many parts it cuts the keys of a row we say, by the number of
rows: the library would go by the longest row that the host knows of. Version 3 takes rows of any length through the
same function; version 2 takes a step with prefill chunks through `flash_attn_varlen_func`. The causal mask of all of
them is aligned to the last query and the last key of a row, which is what positions mean here.

What a mask hides is multiplied by 0, so it must be no NaN. Version 2 reads tiles of keys from within one block, and
what lies behind the last key as zeros. Version 3 reads tiles of many blocks: its cache is to be zeroed at the start.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypedDict

import numpy as np
import torch

from executor_svc.attention.block_tables import TablesUnder, decode_block_tables, step_block_tables
from executor_svc.attention.explicit_attention import slopes_on
from executor_svc.attention.interface import (
    AttentionLayer,
    AttentionMetadata,
    AttentionPlan,
    DecodeBatch,
    LayerCache,
    Rotation,
)
from executor_svc.attention.key_value_write import WriteKeysAndValues, write_in_torch
from executor_svc.attention.splits import multiprocessors_of, number_of_splits
from executor_svc.device.transfer import to_device
from octavo_shared.step_wire.step import Int32Array


class FlashAttention2Backend:
    """Plans for the module `flash_attn`; blocks of a multiple of 256 tokens.

    Args:
        write: The first half of attention.
        num_multiprocessors: Of the device; None: ask it.

    Raises: ImportError: the library is missing, or does not fit the installed torch.
    """

    def __init__(self, write: WriteKeysAndValues = write_in_torch, num_multiprocessors: int | None = None) -> None:
        library = import_module("flash_attn")
        self._varlen = library.flash_attn_varlen_func
        self._with_kvcache = library.flash_attn_with_kvcache
        self._write = write
        self._num_multiprocessors = num_multiprocessors

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> AttentionPlan:
        """Prepare a step."""
        device, tables = cache.keys.device, step_block_tables(metadata, cache)
        num_visible_tokens = metadata.starts + metadata.lengths
        if int(metadata.lengths.max()) == 1:
            return self._decodes(metadata.slot_mapping, to_device(num_visible_tokens, device), tables)
        arguments = {
            "cu_seqlens_q": _running_sum(metadata.lengths, device),
            "cu_seqlens_k": _running_sum(num_visible_tokens, device),
            "max_seqlen_q": int(metadata.lengths.max()),
            "max_seqlen_k": int(num_visible_tokens.max()),
        }

        def call(query: torch.Tensor, cache: LayerCache, layer: AttentionLayer) -> torch.Tensor:
            output: torch.Tensor = self._varlen(
                query,
                cache.keys,
                cache.values,
                **arguments,
                block_table=tables(layer.window_tokens),
                alibi_slopes=_slopes_of(query, layer),
                **_scores(layer),
            )
            return output

        return FlashAttentionPlan(self._write, metadata.slot_mapping, call)

    def decode_plan(self, batch: DecodeBatch, cache: LayerCache) -> AttentionPlan:
        """Prepare decodes that depend on nothing on the host; see `DecodePlanner`."""
        tables = decode_block_tables(batch, cache.block_size)
        return self._decodes(batch.slot_mapping, batch.num_visible_tokens, tables)

    def _decodes(
        self, slot_mapping: torch.Tensor, num_visible_tokens: torch.Tensor, tables: TablesUnder
    ) -> AttentionPlan:
        """Prepare rows of one token each."""
        num_rows = len(num_visible_tokens)

        def call(query: torch.Tensor, cache: LayerCache, layer: AttentionLayer) -> torch.Tensor:
            output: torch.Tensor = self._with_kvcache(
                query.unsqueeze(1),  # [num_rows, 1, num_heads, head_dim]
                cache.keys,
                cache.values,
                cache_seqlens=num_visible_tokens,
                block_table=tables(layer.window_tokens),
                alibi_slopes=_slopes_of(query, layer),
                num_splits=self._num_splits(num_rows, query.shape[1], cache, layer),
                **_scores(layer),
            )
            return output.squeeze(1)

        return FlashAttentionPlan(self._write, slot_mapping, call)

    def _num_splits(self, num_rows: int, num_heads: int, cache: LayerCache, layer: AttentionLayer) -> int:
        """Return into how many parts decodes cut the keys of each row: version 2 has a program for each part.

        It takes the query heads of a KV head together, but not where a layer has a window or ALiBi, and counts on two
        programs of 128 threads for each multiprocessor.
        """
        num_places = 2 * (self._num_multiprocessors or multiprocessors_of(cache.keys.device))
        are_together = layer.window_tokens is None and layer.alibi_slopes is None
        return number_of_splits(num_rows, cache.keys.shape[2] if are_together else num_heads, num_places)


class FlashAttention3Backend:
    """Plans for the module `flash_attn_interface`; blocks of any size, on devices of capability 9.x.

    Args:
        write: The first half of attention.
        num_multiprocessors: Of the device; None: ask it.

    Raises: ImportError: the library is missing, or does not fit the installed torch.
    """

    def __init__(self, write: WriteKeysAndValues = write_in_torch, num_multiprocessors: int | None = None) -> None:
        self._with_kvcache: Any = import_module("flash_attn_interface").flash_attn_with_kvcache
        self._write = write
        self._num_multiprocessors = num_multiprocessors

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> AttentionPlan:
        """Prepare a step."""
        device = cache.keys.device
        return self._rows(
            metadata.slot_mapping,
            _running_sum(metadata.lengths, device),
            int(metadata.lengths.max()),
            to_device(metadata.starts + metadata.lengths, device),
            step_block_tables(metadata, cache),
        )

    def decode_plan(self, batch: DecodeBatch, cache: LayerCache) -> AttentionPlan:
        """Prepare decodes that depend on nothing on the host; see `DecodePlanner`."""
        num_visible_tokens = batch.num_visible_tokens
        query_ends = torch.arange(len(num_visible_tokens) + 1, dtype=torch.int32, device=num_visible_tokens.device)
        tables = decode_block_tables(batch, cache.block_size)
        return self._rows(batch.slot_mapping, query_ends, 1, num_visible_tokens, tables)

    def _rows(
        self,
        slot_mapping: torch.Tensor,
        query_ends: torch.Tensor,
        longest_query: int,
        num_visible_tokens: torch.Tensor,
        tables: TablesUnder,
    ) -> AttentionPlan:
        """Prepare rows of any length."""
        num_rows = len(num_visible_tokens)

        def call(query: torch.Tensor, cache: LayerCache, layer: AttentionLayer) -> torch.Tensor:
            assert layer.alibi_slopes is None, "version 3 has no ALiBi; the rules say so"
            output: torch.Tensor = self._with_kvcache(
                query,
                cache.keys,
                cache.values,
                cache_seqlens=num_visible_tokens,
                page_table=tables(layer.window_tokens),
                cu_seqlens_q=query_ends,
                max_seqlen_q=longest_query,
                num_splits=self._num_splits(num_rows, cache) if longest_query == 1 else 0,
                **_scores(layer),
            )
            return output

        return FlashAttentionPlan(self._write, slot_mapping, call)

    def _num_splits(self, num_rows: int, cache: LayerCache) -> int:
        """Return into how many parts decodes cut the keys of a row at most; the device cuts shorter ones into fewer.

        Version 3 takes the query heads of a KV head together; a program fills a multiprocessor. 0 leaves all to it.
        """
        num_places = self._num_multiprocessors or multiprocessors_of(cache.keys.device)
        return number_of_splits(num_rows, cache.keys.shape[2], num_places)


@dataclass(frozen=True, slots=True)
class FlashAttentionPlan:
    """One step, prepared; see `AttentionPlan`."""

    write: WriteKeysAndValues
    slot_mapping: torch.Tensor  # [num_tokens] int64
    # Attends with rotated queries, [num_tokens, num_heads, head_dim] in and out.
    call: Callable[[torch.Tensor, LayerCache, AttentionLayer], torch.Tensor]

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Rotate, write the keys and values of all tokens into the cache, then attend."""
        query = self.write(qkv, rotation, self.slot_mapping, cache).query
        return self.call(query, cache, layer).flatten(1)


class _Scores(TypedDict):
    """Arguments that all functions of the library have in common."""

    softmax_scale: float
    causal: bool
    window_size: tuple[int, int]
    softcap: float


def _scores(layer: AttentionLayer) -> _Scores:
    """Return how a layer attends in the library's words; its window does not count the token itself."""
    assert layer.sinks is None, "neither version has sinks; the rules say so"
    assert layer.distance_biases is None, "neither version has distance biases; the rules say so"
    return {
        "softmax_scale": layer.scale,
        "causal": True,
        "window_size": (-1, -1) if layer.window_tokens is None else (layer.window_tokens - 1, 0),
        "softcap": layer.soft_cap or 0.0,
    }


def _slopes_of(query: torch.Tensor, layer: AttentionLayer) -> torch.Tensor | None:
    """Return the slopes of a layer's heads, [num_heads] float32; None: it has no ALiBi."""
    slopes = layer.alibi_slopes
    return None if slopes is None else slopes_on(query.device, query.dtype, slopes)


def _running_sum(counts: Int32Array, device: torch.device) -> torch.Tensor:
    """Return 0 and the sums up to each count, [num_rows + 1] int32 on the device."""
    sums = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=sums[1:])
    return to_device(sums, device)
