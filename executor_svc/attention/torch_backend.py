"""Paged attention in plain torch operations: any device, any block size; the reference.

Pages are gathered with `index_select` over whole blocks, then torch's fused attention runs on the
copy. Of the pure torch forms this is the fastest on CPUs (loops over sequences, gathers by token
and matmul-softmax-matmul lose by 2x and more).

Rows of one token (decodes) run batched in buckets of similar context length. Longer rows (prefill
chunks) run one by one: causally on their own keys and values when they start a sequence, else on
their gathered pages with a mask.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- the name that everybody knows

from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, LayerCache, Rotation
from shared.step import Int32Array

# Contexts up to this many tokens share a bucket: splitting them saves less than a launch costs.
MIN_BUCKET_TOKENS = 128


class TorchAttentionBackend:
    """Plans for any device that torch runs on."""

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> "TorchAttentionPlan":
        """Prepare a step: block ids, masks and scratch memory."""
        num_decodes = _num_leading_decodes(metadata.lengths)
        buckets = [
            _plan_bucket(metadata, rows, num_decodes, cache)
            for rows in _bucket_by_context(metadata.starts[:num_decodes] + 1)
        ]
        token_ends = np.cumsum(metadata.lengths)
        chunks = [
            _plan_chunk(metadata, row, int(token_ends[row]), cache) for row in range(num_decodes, len(token_ends))
        ]
        return TorchAttentionPlan(metadata.slot_mapping, buckets, chunks, cache)


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """Decode rows of similar context length, padded to whole blocks of the longest."""

    rows: torch.Tensor | None  # [n] int64 token indices; None: all tokens of the step, in order
    block_ids: torch.Tensor  # [n * max_num_blocks]; padded with block 0
    padding: torch.Tensor  # [num_padded] indices into the gathered slots [n * max_num_blocks * block_size]
    mask: torch.Tensor  # [n, 1, 1, max_num_blocks * block_size]: 0 for the context, -inf for padding


@dataclass(frozen=True, slots=True)
class _PrefillChunk:
    """One row of several tokens. `block_ids` and `mask` are None when it starts its sequence."""

    tokens: slice
    context_len: int
    block_ids: torch.Tensor | None  # [num_blocks of the context]
    mask: torch.Tensor | None  # [length, context_len]: 0 where visible, else -inf


class TorchAttentionPlan:
    """One step, prepared. Scratch memory is shared by all layers, so layers must run in turn."""

    def __init__(
        self,
        slot_mapping: torch.Tensor,
        buckets: list[_DecodeBucket],
        chunks: list[_PrefillChunk],
        cache: LayerCache,
    ) -> None:
        self._slot_mapping = slot_mapping
        self._buckets = buckets
        self._chunks = chunks
        gathered = [bucket.block_ids for bucket in buckets]
        gathered += [chunk.block_ids for chunk in chunks if chunk.block_ids is not None]
        num_blocks = max((len(block_ids) for block_ids in gathered), default=0)
        # Fresh memory for every gather would cost more page faults than the copy itself.
        self._keys = cache.keys.new_empty((num_blocks, *cache.keys.shape[1:]))
        self._values = cache.values.new_empty((num_blocks, *cache.values.shape[1:]))

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Rotate, write the keys and values of all tokens into the cache, then attend; see `AttentionPlan`."""
        num_kv_heads = cache.keys.shape[2]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        rotated = qkv[:, :-num_kv_heads] if rotation is None else rotation.apply(qkv[:, :-num_kv_heads])
        query, key, value = rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, -num_kv_heads:]
        cache.keys.flatten(0, 1)[self._slot_mapping] = key
        cache.values.flatten(0, 1)[self._slot_mapping] = value
        if len(self._buckets) == 1 and self._buckets[0].rows is None:
            return self._decode(self._buckets[0], query, cache).flatten(1)
        output = query.new_empty(query.shape)
        for bucket in self._buckets:
            output[bucket.rows] = self._decode(bucket, query[bucket.rows], cache)
        for chunk in self._chunks:
            output[chunk.tokens] = self._prefill(chunk, query, key, value, cache)
        return output.flatten(1)

    def _gather(self, block_ids: torch.Tensor, cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy blocks into scratch memory; return keys and values, [num_slots, num_kv_heads, head_dim]."""
        keys, values = self._keys[: len(block_ids)], self._values[: len(block_ids)]
        torch.index_select(cache.keys, 0, block_ids, out=keys)
        torch.index_select(cache.values, 0, block_ids, out=values)
        return keys.flatten(0, 1), values.flatten(0, 1)

    def _decode(self, bucket: _DecodeBucket, query: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """Attend with one query token a row, [n, num_heads, head_dim] in and out."""
        keys, values = self._gather(bucket.block_ids, cache)
        # Padding has weight 0, but 0 * NaN is NaN: what other sequences left there must go.
        keys.index_fill_(0, bucket.padding, 0)
        values.index_fill_(0, bucket.padding, 0)
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = keys.shape[1]
        output = F.scaled_dot_product_attention(
            # The query heads that share a KV head act as its query tokens: no copy of K and V a head.
            query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim),
            keys.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2),  # [n, num_kv_heads, padded_len, head_dim]
            values.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2),
            attn_mask=bucket.mask,
        )
        return output.reshape(num_rows, num_heads, head_dim)

    def _prefill(
        self, chunk: _PrefillChunk, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        """Attend with the tokens of one row; return [length, num_heads, head_dim]."""
        if chunk.block_ids is None:
            keys, values = key[chunk.tokens], value[chunk.tokens]
        else:
            keys, values = self._gather(chunk.block_ids, cache)
            keys, values = keys[: chunk.context_len], values[: chunk.context_len]
        output = F.scaled_dot_product_attention(
            query[chunk.tokens].transpose(0, 1).unsqueeze(0),  # [1, num_heads, length, head_dim]
            keys.transpose(0, 1).unsqueeze(0),  # [1, num_kv_heads, context_len, head_dim]
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=keys.shape[1] != query.shape[1],
        )
        return output.squeeze(0).transpose(0, 1)


def _num_leading_decodes(lengths: Int32Array) -> int:
    """Count the rows of one token before the first longer one; they are their own token indices."""
    longer = np.flatnonzero(lengths > 1)
    return int(longer[0]) if len(longer) else len(lengths)


def _bucket_by_context(context_lens: Int32Array) -> list[Int32Array]:
    """Split rows so that no context is padded to more than twice its length, short ones apart."""
    order = np.argsort(context_lens, kind="stable").astype(np.int32)
    ascending = context_lens[order]
    buckets: list[Int32Array] = []
    end = len(order)
    while end:
        longest = ascending[end - 1]
        begin = int(np.searchsorted(ascending, longest // 2)) if longest > MIN_BUCKET_TOKENS else 0
        buckets.append(np.sort(order[begin:end]))
        end = begin
    return buckets


def _plan_bucket(metadata: AttentionMetadata, rows: Int32Array, num_decodes: int, cache: LayerCache) -> _DecodeBucket:
    device = cache.keys.device
    context_lens = metadata.starts[rows] + 1
    num_blocks = -(-int(context_lens.max()) // cache.block_size)
    block_ids = metadata.block_tables[rows, :num_blocks]
    is_padding = np.arange(num_blocks * cache.block_size) >= context_lens[:, None]
    mask = np.where(is_padding, -np.inf, 0.0)[:, None, None]
    covers_step = num_decodes == len(rows) == len(metadata.lengths)
    return _DecodeBucket(
        rows=None if covers_step else torch.from_numpy(rows.astype(np.int64)).to(device),
        block_ids=torch.from_numpy(block_ids.ravel()).to(device),
        padding=torch.from_numpy(np.flatnonzero(is_padding)).to(device),
        mask=torch.from_numpy(mask).to(device, cache.keys.dtype),
    )


def _plan_chunk(metadata: AttentionMetadata, row: int, token_end: int, cache: LayerCache) -> _PrefillChunk:
    start, length = int(metadata.starts[row]), int(metadata.lengths[row])
    tokens, context_len = slice(token_end - length, token_end), start + length
    if start == 0:
        return _PrefillChunk(tokens, context_len, block_ids=None, mask=None)
    device = cache.keys.device
    num_blocks = -(-context_len // cache.block_size)
    mask = torch.full((length, context_len), -torch.inf, dtype=cache.keys.dtype, device=device)
    return _PrefillChunk(
        tokens,
        context_len,
        block_ids=torch.from_numpy(metadata.block_tables[row, :num_blocks].copy()).to(device),
        mask=mask.triu_(start + 1),
    )
