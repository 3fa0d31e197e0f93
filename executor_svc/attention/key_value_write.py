"""The first half of paged attention: rotate queries and keys, write keys and values into the cache."""

from typing import NamedTuple, Protocol

import torch

from executor_svc.attention.cache_format import decode, encode
from executor_svc.attention.interface import LayerCache, Rotation


class RotatedHeads(NamedTuple):
    """The heads of a step's tokens after rotation, keys and values as the cache has them; views where possible."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, value_dim]


class WriteKeysAndValues(Protocol):
    """Rotates and writes; there is one implementation in torch and one in Triton."""

    def __call__(
        self, qkv: torch.Tensor, rotation: Rotation | None, slot_mapping: torch.Tensor, cache: LayerCache
    ) -> RotatedHeads:
        """Write the keys and values of all tokens into their slots.

        Args:
            qkv: Before rotation, [num_tokens, num_heads + 2 * num_kv_heads, head_dim], without values where the cache
                is latent; may be overwritten.
            rotation: Of the tokens; None: they are rotated already, or never.
            slot_mapping: [num_tokens] int64, as in `AttentionMetadata`.
            cache: The layer's block pool; written.
        """


def write_in_torch(
    qkv: torch.Tensor, rotation: Rotation | None, slot_mapping: torch.Tensor, cache: LayerCache
) -> RotatedHeads:
    """Rotate and write in plain torch operations, on any device; see `WriteKeysAndValues`."""
    num_kv_heads = cache.keys.shape[2]
    num_heads = qkv.shape[1] - cache.num_vectors
    turning = qkv[:, : num_heads + num_kv_heads]
    rotated = turning if rotation is None else rotation.apply(turning)
    query, key = rotated[:, :num_heads], rotated[:, num_heads:]
    key = _write(key, slot_mapping, cache.keys, cache.key_scales, cache.key_scale)
    value = key[..., cache.value_begin :]
    if not cache.value_begin:
        value = _write(qkv[:, -num_kv_heads:], slot_mapping, cache.values, cache.value_scales, cache.value_scale)
    return RotatedHeads(query, key, value)


def read_in_torch(
    query: torch.Tensor, rotation: Rotation | None, slot_mapping: torch.Tensor, cache: LayerCache
) -> RotatedHeads:
    """Rotate queries, [num_tokens, num_heads, head_dim]; keys and values are in the cache already."""
    blocks, offsets = slot_mapping // cache.block_size, slot_mapping % cache.block_size
    assert not cache.value_begin, "no family has layers that only read a latent cache"
    key = _read(blocks, offsets, cache.keys, cache.key_scales, cache.key_scale, query.dtype)
    value = _read(blocks, offsets, cache.values, cache.value_scales, cache.value_scale, query.dtype)
    return RotatedHeads(query if rotation is None else rotation.apply(query), key, value)


def _read(
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return what some slots of keys or values hold, [num_tokens, num_kv_heads, head_dim]."""
    is_byte = pool.dtype.itemsize == 1
    elements = (pool.view(torch.uint8) if is_byte else pool)[blocks, offsets]
    if elements.dtype == dtype:
        return elements
    return decode(elements.view(pool.dtype), None if scales is None else scales[blocks, :, offsets], dtype, scale)


def _write(
    heads: torch.Tensor, slot_mapping: torch.Tensor, pool: torch.Tensor, scales: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Write keys or values; return what the format of the cache makes of them."""
    if pool.dtype == heads.dtype and pool.is_contiguous():
        pool.flatten(0, 1)[slot_mapping] = heads
        return heads
    blocks, offsets = slot_mapping // pool.shape[1], slot_mapping % pool.shape[1]
    if pool.dtype == heads.dtype:
        pool[blocks, offsets] = heads
        return heads
    elements, new_scales = encode(heads, pool.dtype, scale)
    if pool.dtype.itemsize == 1:  # torch moves bytes, but not all numbers of one
        pool, written = pool.view(torch.uint8), elements.view(torch.uint8)
    else:
        written = elements
    pool[blocks, offsets] = written
    if scales is not None and new_scales is not None:
        scales[blocks, :, offsets] = new_scales
    return decode(elements, new_scales, heads.dtype, scale)
