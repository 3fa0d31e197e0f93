"""Paged attention in plain torch operations: any device, any block size; the reference.

Pages are gathered with `index_select` over whole blocks, then torch's fused attention runs on the
copy, in the number format of the queries. Of the pure torch forms this is the fastest on CPUs (loops
over sequences, gathers by token and matmul-softmax-matmul lose by 2x and more). Layers with a soft
cap, ALiBi, distance biases or sinks, and products in bfloat16 of float32, write it out.

Rows of one token (decodes) run batched in buckets of similar length. Longer rows (prefill chunks)
run one by one: on their own keys and values when they see no others, else on their gathered pages.
What is read depends on the window of a layer: it is planned once for each, when the first layer
asks for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

from executor_svc.attention.cache_format import decode
from executor_svc.attention.explicit_attention import attend_explicitly, slopes_on
from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, LayerCache, Rotation
from executor_svc.attention.key_value_write import read_in_torch, write_in_torch
from executor_svc.attention.step_reads import DecodeBucket, PrefillChunk, StepReads, plan_reads, score_dtype


class TorchAttentionBackend:
    """Plans for any device that torch runs on.

    `in_bfloat16`: float32 queries, keys, weights and values are rounded to bfloat16 before they are multiplied.
    """

    def __init__(self, *, in_bfloat16: bool = False) -> None:
        self._in_bfloat16 = in_bfloat16

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> "TorchAttentionPlan":
        """Prepare a step."""
        return TorchAttentionPlan(metadata, cache, in_bfloat16=self._in_bfloat16)

    def full_plan(self, metadata: AttentionMetadata) -> "TorchFullPlan":
        """Prepare whole texts, each token of which sees all of its text."""
        return TorchFullPlan(metadata.lengths.tolist(), self._in_bfloat16)


class TorchAttentionPlan:
    """One step, prepared. Scratch memory is shared by all layers, so layers must run in turn."""

    def __init__(self, metadata: AttentionMetadata, cache: LayerCache, *, in_bfloat16: bool = False) -> None:
        self._metadata = metadata
        self._in_bfloat16 = in_bfloat16
        self._longest = int((metadata.starts + metadata.lengths).max())
        self._reads: dict[int | None, StepReads] = {}  # by window
        self._most_blocks = 0  # of any read
        self._scratch: dict[torch.Size, list[torch.Tensor]] = {}  # by the shape of a block

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Rotate, write the keys and values of all tokens into the cache, then attend; see `AttentionPlan`."""
        take = read_in_torch if layer.reads_only else write_in_torch
        query, key, value = take(qkv, rotation, self._metadata.slot_mapping, cache)
        reads = self._reads_under(layer.window_tokens, cache, query.dtype)
        if len(reads.buckets) == 1 and reads.buckets[0].rows is None:
            return self._decode(reads.buckets[0], query, cache, layer).flatten(1)
        output = query.new_empty(*query.shape[:2], cache.value_dim)
        for bucket in reads.buckets:
            output[bucket.rows] = self._decode(bucket, query[bucket.rows], cache, layer)
        for chunk in reads.chunks:
            output[chunk.tokens] = self._prefill(chunk, query, key, value, cache, layer)
        return output.flatten(1)

    def _reads_under(self, window: int | None, cache: LayerCache, dtype: torch.dtype) -> StepReads:
        """Return what layers with this window read; make room for it in scratch memory."""
        if window is not None and window >= self._longest:
            window = None
        reads = self._reads.get(window)
        if reads is None:
            reads = self._reads[window] = plan_reads(self._metadata, window, cache, dtype)
            self._most_blocks = max(self._most_blocks, reads.max_num_blocks)
        return reads

    def _gather(
        self, block_ids: torch.Tensor, cache: LayerCache, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy blocks, into scratch memory if need be; return keys and values, [num_slots, num_kv_heads, their dim]."""
        if cache.keys.dtype != dtype:
            keys = values = _read(cache.keys, cache.key_scales, cache.key_scale, block_ids, dtype)
            if not cache.value_begin:
                values = _read(cache.values, cache.value_scales, cache.value_scale, block_ids, dtype)
            return keys, values[..., cache.value_begin :]
        # Fresh memory for every gather would cost more page faults than the copy itself.
        pools, scratch = cache.pools, self._scratch.get(cache.keys.shape)
        if scratch is None or len(scratch[0]) < len(block_ids):
            scratch = [pool.new_empty((self._most_blocks, *pool.shape[1:])) for pool in pools]
            self._scratch[cache.keys.shape] = scratch
        gathered = [each[: len(block_ids)] for each in scratch]
        for pool, out in zip(pools, gathered, strict=True):
            torch.index_select(pool, 0, block_ids, out=out)
        keys, values = (gathered[place].flatten(0, 1) for place in (0, -1))
        return keys, values[..., cache.value_begin :]

    def _decode(
        self, bucket: DecodeBucket, query: torch.Tensor, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Attend with one query token a row, [n, num_heads, head_dim]; return [n, num_heads, value_dim]."""
        keys, values = self._gather(bucket.block_ids, cache, query.dtype)
        # Padding has weight 0, but 0 * NaN is NaN: what other sequences left there must go.
        keys.index_fill_(0, bucket.padding, 0)
        if not cache.value_begin:
            values.index_fill_(0, bucket.padding, 0)
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = keys.shape[1]
        keys = keys.view(num_rows, -1, num_kv_heads, head_dim)
        values = values.reshape(num_rows, -1, num_kv_heads, cache.value_dim)
        if not self._is_fused(layer):
            return self._explicitly(bucket, query.unsqueeze(1), keys, values, layer).squeeze(1)
        output = F.scaled_dot_product_attention(
            # The query heads that share a KV head act as its query tokens: no copy of K and V a head.
            query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim),
            keys.transpose(1, 2),  # [n, num_kv_heads, num_keys, head_dim]
            values.transpose(1, 2),
            attn_mask=bucket.mask,
            scale=layer.scale,
        )
        return output.reshape(num_rows, num_heads, cache.value_dim)

    def _prefill(
        self,
        chunk: PrefillChunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        """Attend with the tokens of one row; return [length, num_heads, value_dim]."""
        if chunk.block_ids is None:
            keys, values = key[chunk.tokens], value[chunk.tokens]
        else:
            keys, values = self._gather(chunk.block_ids, cache, query.dtype)
            slots = slice(chunk.first_slot, chunk.first_slot + chunk.num_keys)
            keys, values = keys[slots], values[slots]
        query, keys, values = query[chunk.tokens].unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
        if not self._is_fused(layer):
            return self._explicitly(chunk, query, keys, values, layer).squeeze(0)
        output = F.scaled_dot_product_attention(
            query.transpose(1, 2),  # [1, num_heads, length, head_dim]
            keys.transpose(1, 2),  # [1, num_kv_heads, num_keys, head_dim]
            values.transpose(1, 2),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=layer.scale,
            enable_gqa=keys.shape[2] != query.shape[2],
        )
        return output.squeeze(0).transpose(0, 1)

    def _is_fused(self, layer: AttentionLayer) -> bool:
        biases = layer.alibi_slopes, layer.distance_biases, layer.sinks
        is_plain = layer.soft_cap is None and all(each is None for each in biases)
        return is_plain and not self._in_bfloat16

    def _explicitly(
        self,
        reads: DecodeBucket | PrefillChunk,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        """Attend without the fused attention; see `attend_explicitly`."""
        slopes = layer.alibi_slopes
        return attend_explicitly(
            query,
            keys,
            values,
            distances=reads.distances,
            hidden=reads.hidden,
            scale=layer.scale,
            soft_cap=layer.soft_cap,
            slopes=None if slopes is None else slopes_on(query.device, query.dtype, slopes),
            sinks=layer.sinks,
            distance_biases=layer.distance_biases,
            in_bfloat16=self._in_bfloat16,
        )


@dataclass(frozen=True, slots=True)
class TorchFullPlan:
    """Whole texts of these lengths, each token of which sees all of its text; the cache stays as it is."""

    lengths: Sequence[int]
    in_bfloat16: bool

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Attend; see `AttentionPlan`. No encoder rotates."""
        assert rotation is None, "positions are in the embedding, or in biases"
        num_kv_heads = cache.keys.shape[2]
        sizes = [qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
        attended = []
        for text in torch.split(qkv, list(self.lengths)):
            query, keys, values = (part.unsqueeze(0) for part in torch.split(text, sizes, 1))
            positions = torch.arange(len(text), device=qkv.device, dtype=score_dtype(qkv.dtype))
            distances = (positions - positions[:, None]).unsqueeze(0)
            slopes = layer.alibi_slopes
            output = attend_explicitly(
                query,
                keys,
                values,
                distances=distances,
                hidden=torch.zeros_like(distances, dtype=torch.bool),
                scale=layer.scale,
                soft_cap=layer.soft_cap,
                slopes=None if slopes is None else slopes_on(qkv.device, qkv.dtype, slopes),
                sinks=layer.sinks,
                distance_biases=layer.distance_biases,
                sees_later_tokens=True,
                in_bfloat16=self.in_bfloat16,
            )
            attended.append(output.squeeze(0))
        return torch.cat(attended).flatten(1)


def _read(
    pool: torch.Tensor, scales: torch.Tensor | None, scale: float, block_ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return what blocks of a pool stand for, [num_slots, num_kv_heads, head_dim] in `dtype`."""
    is_bytes = pool.dtype.itemsize == 1  # torch moves bytes, but not all numbers of one
    elements = pool.view(torch.uint8)[block_ids.long()].view(pool.dtype) if is_bytes else pool[block_ids.long()]
    of_blocks = None if scales is None else scales[block_ids.long()].transpose(1, 2)
    return decode(elements, of_blocks, dtype, scale).flatten(0, 1)
