"""The first half of paged attention in one kernel: rotate queries and keys in place, write keys and values."""

import torch
import triton
import triton.language as tl

from executor_svc.attention.interface import LayerCache, Rotation
from executor_svc.attention.key_value_write import RotatedHeads
from executor_svc.triton_kernels.cache_formats import INT8, PLAIN, fp8_of, int8_of, int8_scales_of, operands_of
from executor_svc.triton_kernels.tiles import pad

# Numbers of a program, of both halves together.
TILE_NUMBERS = 2048


@triton.jit
def key_value_write_kernel(
    qkv,
    qkv_stride,
    cos,
    signed_sin,
    slot_mapping,
    keys,
    values,
    key_scales,
    value_scales,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_VECTORS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Rotate and write some heads of one token; the grid is (tokens, tiles of heads). A latent cache has no values."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    halves = tl.arange(0, HALF_PADDED)
    LOW: tl.constexpr = (HEAD_DIM + 1) // 2
    HIGH: tl.constexpr = HEAD_DIM - LOW
    is_head = heads < NUM_VECTORS
    HAS_VALUES: tl.constexpr = NUM_VECTORS > NUM_HEADS + NUM_KV_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    is_low = is_head[:, None] & (halves < LOW)[None, :]
    is_high = is_head[:, None] & (halves < HIGH)[None, :]
    TURNING: tl.constexpr = ROTARY_DIM // 2
    # Where the numbers of both halves are in a head. Where part of it turns, each half has half of that part first.
    if ROTARY_DIM == HEAD_DIM:
        lows = halves
        highs = halves + LOW
    else:
        lows = tl.where(halves < TURNING, halves, halves + TURNING)
        highs = halves + tl.where(halves < TURNING, TURNING, LOW)
    vectors = qkv + token * qkv_stride + heads[:, None] * HEAD_DIM
    low = tl.load(vectors + lows[None, :], mask=is_low, other=0.0)
    high = tl.load(vectors + highs[None, :], mask=is_high, other=0.0)
    if cos is not None:
        angles = token * ROTARY_DIM + halves
        turns = halves < TURNING
        # What is beyond the half or does not turn is multiplied by 1.
        cos_low = tl.load(cos + angles, mask=turns, other=1.0).to(tl.float32)[None, :]
        cos_high = tl.load(cos + angles + TURNING, mask=turns, other=1.0).to(tl.float32)[None, :]
        sin_low = tl.load(signed_sin + angles, mask=turns, other=0.0).to(tl.float32)[None, :]
        sin_high = tl.load(signed_sin + angles + TURNING, mask=turns, other=0.0).to(tl.float32)[None, :]
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        rotated_low = (wide_low * cos_low + wide_high * sin_low).to(low.dtype)
        rotated_high = (wide_high * cos_high + wide_low * sin_high).to(low.dtype)
        low = tl.where(is_value[:, None], low, rotated_low)
        high = tl.where(is_value[:, None], high, rotated_high)
        is_rotated = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
        tl.store(vectors + lows[None, :], low, mask=is_low & is_rotated)
        tl.store(vectors + highs[None, :], high, mask=is_high & is_rotated)
    slot = tl.load(slot_mapping + token)
    first_element = slot * (NUM_KV_HEADS * HEAD_DIM)
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    if FORMAT == INT8:
        block_id, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        first_element = block_id * BLOCK_STRIDE + offset * (NUM_KV_HEADS * HEAD_DIM)
        scales = int8_scales_of(low, high)
        low, high = int8_of(low, scales), int8_of(high, scales)
        first_scale = block_id * (BLOCK_STRIDE // 4) + offset
        tl.store(key_scales + first_scale + (heads - NUM_HEADS) * BLOCK_SIZE, scales, mask=is_key)
        if HAS_VALUES:
            new_scales = value_scales + first_scale + (heads - NUM_HEADS - NUM_KV_HEADS) * BLOCK_SIZE
            tl.store(new_scales, scales, mask=is_head & is_value)
    elif FORMAT != PLAIN:
        scale = tl.where(is_value, value_scale, key_scale)[:, None]
        low = fp8_of(tl.div_rn(low.to(tl.float32), scale), FORMAT)
        high = fp8_of(tl.div_rn(high.to(tl.float32), scale), FORMAT)
    new_keys = keys + first_element + (heads - NUM_HEADS)[:, None] * HEAD_DIM
    tl.store(new_keys + lows[None, :], low, mask=is_low & is_key[:, None])
    tl.store(new_keys + highs[None, :], high, mask=is_high & is_key[:, None])
    if HAS_VALUES:
        new_values = values + first_element + (heads - NUM_HEADS - NUM_KV_HEADS)[:, None] * HEAD_DIM
        tl.store(new_values + lows[None, :], low, mask=is_low & is_value[:, None])
        tl.store(new_values + highs[None, :], high, mask=is_high & is_value[:, None])


def write_in_triton(
    qkv: torch.Tensor, rotation: Rotation | None, slot_mapping: torch.Tensor, cache: LayerCache
) -> RotatedHeads:
    """Rotate and write in one launch; see `WriteKeysAndValues`.

    Queries and keys are rotated in place, in float32: with one rounding where torch rounds the products as well. The
    last two dimensions of `qkv` and the rotation must be contiguous. Keys and values come back as they were before the
    format of the cache rounded them.
    """
    num_tokens, num_vectors, head_dim = qkv.shape
    num_kv_heads = cache.keys.shape[2]
    num_heads = num_vectors - cache.num_vectors
    assert qkv.stride()[1:] == (head_dim, 1), "the heads of a token lie one after the other"
    if rotation is not None:
        assert rotation.cos.is_contiguous(), "the angles of a token lie one after the other"
        assert rotation.signed_sin.is_contiguous(), "the angles of a token lie one after the other"
    operands = operands_of(cache)
    is_fp8 = operands.value_factor is not None
    half_padded = pad((head_dim + 1) // 2)
    tile_heads = TILE_NUMBERS // (2 * half_padded)
    key_value_write_kernel[(num_tokens, triton.cdiv(num_vectors, tile_heads))](
        qkv,
        qkv.stride(0),
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.signed_sin,
        slot_mapping,
        operands.keys,
        operands.values,
        operands.key_scales,
        operands.value_scales,
        cache.key_scale if is_fp8 else None,
        cache.value_scale if is_fp8 else None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        NUM_VECTORS=num_vectors,
        HEAD_DIM=head_dim,
        ROTARY_DIM=head_dim if rotation is None else rotation.cos.shape[1],
        HALF_PADDED=half_padded,
        TILE_HEADS=tile_heads,
        BLOCK_SIZE=cache.block_size,
        BLOCK_STRIDE=operands.block_stride,
        FORMAT=operands.format_number,
        num_warps=4,
    )
    key, value = qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, -num_kv_heads:, cache.value_begin :]
    return RotatedHeads(qkv[:, :num_heads], key, value)
