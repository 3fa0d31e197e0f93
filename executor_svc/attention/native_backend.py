"""Paged attention in C that reads the cache in place: float32 on a CPU, any format of the cache, any block size.

See `executor_svc/native/`. The library cuts a step into tiles of query tokens of one sequence, and into tasks that the
threads take in turn (plan.c). Tasks cover the keys that a window leaves to see, so each kind of layer has its own.
"""

import numpy as np
import torch

from executor_svc.attention.cache_format import FORMAT_NUMBERS
from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, LayerCache, Rotation
from executor_svc.native.library import NativeLibrary
from executor_svc.native.structs import LayerCacheStruct, StepStruct


class NativeAttentionBackend:
    """Plans for caches of every format on a CPU.

    `in_bfloat16`: queries, keys, weights and values are rounded to bfloat16 before they are multiplied.
    """

    def __init__(self, library: NativeLibrary, *, in_bfloat16: bool = False) -> None:
        self._library = library
        self.in_bfloat16 = in_bfloat16

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> "NativeAttentionPlan":
        """Prepare a step."""
        return NativeAttentionPlan(self._library, metadata, in_bfloat16=self.in_bfloat16)

    def full_plan(self, metadata: AttentionMetadata) -> "NativeAttentionPlan":
        """Prepare whole texts, each token of which sees all of its text."""
        return NativeAttentionPlan(self._library, metadata, in_bfloat16=self.in_bfloat16, is_full=True)


class NativeAttentionPlan:
    """One step, prepared; see `executor_svc.attention.interface.AttentionPlan`.

    `is_full`: each token sees all tokens of its row, as in an encoder; rows are whole then, and no layer has a window.
    """

    def __init__(
        self, library: NativeLibrary, metadata: AttentionMetadata, *, in_bfloat16: bool = False, is_full: bool = False
    ) -> None:
        self._library = library
        self._in_bfloat16 = in_bfloat16
        self._is_full = is_full
        self._metadata = metadata
        self._block_tables = np.ascontiguousarray(metadata.block_tables, np.int32)
        self._rows = [
            np.ascontiguousarray(column, np.int32)
            for column in (np.arange(len(metadata.starts)), metadata.starts, metadata.lengths)
        ]
        self._longest = int((metadata.starts + metadata.lengths).max())
        self._structs: dict[AttentionLayer, StepStruct] = {}
        self._kept: list[object] = []  # what the structs have pointers into

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Rotate, write the keys and values of all tokens into the cache, then attend."""
        num_tokens, num_vectors, _ = qkv.shape
        assert qkv.is_contiguous(), "tokens lie one after the other"
        num_heads = num_vectors - (0 if layer.reads_only else cache.num_vectors)
        struct = self._structs.get(layer)
        if struct is None:
            struct = self._structs[layer] = self._step_struct(num_tokens, num_heads, cache, layer)
        if rotation is None:
            struct.cos = struct.sin = None
            struct.rotary_dim = 0
        else:
            struct.cos, struct.sin = rotation.cos.data_ptr(), rotation.signed_sin.data_ptr()
            struct.rotary_dim = rotation.cos.shape[1]
        struct.distance_biases, struct.num_distances = biases_address(layer)
        out = torch.empty(num_tokens, num_heads * cache.value_dim)
        self._library.attention(struct, qkv, cache_struct(cache), sinks_address(layer), out)
        return out

    def _step_struct(self, num_tokens: int, num_heads: int, cache: LayerCache, layer: AttentionLayer) -> StepStruct:
        """Describe the step for layers that attend like this one, but for the rotation."""
        num_kv_heads, head_dim = cache.keys.shape[2:]
        slopes = None if layer.alibi_slopes is None else np.array(layer.alibi_slopes, np.float32)
        struct = StepStruct(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qkv_stride=(num_heads + (0 if layer.reads_only else cache.num_vectors)) * head_dim,
            block_size=cache.block_size,
            value_begin=cache.value_begin,
            block_stride=cache.keys.stride(0),
            cache_format=FORMAT_NUMBERS[cache.keys.dtype],
            num_tokens=num_tokens,
            table_width=self._block_tables.shape[1],
            window=self._longest if layer.window_tokens is None else min(layer.window_tokens, self._longest),
            first=layer.first_position,
            scale=layer.scale,
            soft_cap=layer.soft_cap or 0.0,
            slopes=None if slopes is None else slopes.ctypes.data,
            slot_mapping=self._metadata.slot_mapping.data_ptr(),
            block_tables=self._block_tables.ctypes.data,
            in_bfloat16=self._in_bfloat16,
            reads_only=layer.reads_only,
            is_full=self._is_full,
        )
        self._kept += [slopes, self._library.plan_attention(struct, *self._rows)]
        return struct


def cache_struct(cache: LayerCache) -> LayerCacheStruct:
    """Return where a layer has its keys and values; scales of int8 lie behind each block of both."""
    assert not cache.value_begin or cache.values.data_ptr() == cache.keys.data_ptr(), "values are parts of keys"
    return LayerCacheStruct(cache.keys.data_ptr(), cache.values.data_ptr(), cache.key_scale, cache.value_scale)


def sinks_address(layer: AttentionLayer) -> int | None:
    """Return where the sinks of a layer are; None: it has none."""
    return None if layer.sinks is None else _address(layer.sinks)


def biases_address(layer: AttentionLayer) -> tuple[int | None, int]:
    """Return where the distance biases of a layer are, and how many a head has; None and 0: it has none."""
    biases = layer.distance_biases
    return (None, 0) if biases is None else (_address(biases), biases.shape[1])


def _address(weights: torch.Tensor) -> int:
    assert weights.dtype == torch.float32, "C reads float32"
    assert weights.device.type == "cpu", "they have come with the weights"
    assert weights.is_contiguous(), "heads lie one after the other"
    return weights.data_ptr()
