"""Steps for tests of attention: rows on a paged cache that is NaN where nobody wrote, and a naive attention."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata, LayerCache, Rotation
from executor_svc.attention.key_value_write import write_in_torch
from executor_svc.cache.cache_engine import CacheShape

Doubles = npt.NDArray[np.float64]
Rows = Sequence[tuple[int, int]]  # (computed, new) tokens of each sequence

DECODES: Rows = [(0, 1), (1, 1), (7, 1), (95, 1), (96, 1), (97, 1), (130, 1)]
CHUNKS: Rows = [(0, 2), (0, 33), (5, 3), (90, 40), (200, 2)]
NUM_FREE_BLOCKS = 3


class Step:
    """Where the tokens of a step are: scattered blocks, and block tables full of garbage beside them.

    Args:
        rows: The sequences.
        block_size: In tokens.
        gone_window: The widest window of the layers. What lies before it has no blocks; None: all have theirs.
        device: Where the cache is.
    """

    def __init__(
        self, rows: Rows, block_size: int, gone_window: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.rows, self.block_size, self.device = rows, block_size, device
        self.firsts = [
            0 if gone_window is None else max(0, start + 1 - gone_window) // block_size * block_size
            for start, _ in rows
        ]  # the first position of each sequence that has a block
        starts, lengths = np.array(rows, np.int32).T.copy()
        first_blocks, num_blocks = np.array(self.firsts) // block_size, -(-(starts + lengths) // block_size)
        self.num_blocks = int((num_blocks - first_blocks).sum()) + NUM_FREE_BLOCKS
        free = np.random.default_rng(3).permutation(self.num_blocks).astype(np.int32)
        # Garbage: a block that nobody writes, and ids that are out of range on either side.
        garbage = np.array([free[-1], -1, 10**6], np.int32)
        tables = np.resize(garbage, (len(rows), int(num_blocks.max())))
        self.slots: list[list[int]] = []  # of each sequence, from `firsts` on
        for row, (first, end) in enumerate(zip(first_blocks, num_blocks, strict=True)):
            tables[row, first:end], free = free[: end - first], free[end - first :]
            positions = np.arange(first * block_size, starts[row] + lengths[row])
            slots = tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
            self.slots.append(slots.tolist())
        new_slots = [slot for slots, (_, length) in zip(self.slots, rows, strict=True) for slot in slots[-length:]]
        self.metadata = AttentionMetadata(starts, lengths, tables, torch.tensor(new_slots, device=device))


class LayerInput:
    """What a layer gets in a step: random queries, keys and values, and a random past in its cache."""

    def __init__(
        self,
        step: Step,
        heads: tuple[int, int],
        head_dim: int,
        *,
        is_rotated: bool = True,
        rotary_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
        value_begin: int = 0,
        seed: int = 3,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.step, self.dtype, self.scales = step, dtype, scales
        self.cache_dtype = cache_dtype or dtype
        self.num_heads, self.num_kv_heads = heads
        self.value_begin = value_begin
        num_tokens = len(step.metadata.slot_mapping)
        shape = (step.num_blocks, step.block_size, self.num_kv_heads, head_dim)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        for slots, (_, length) in zip(step.slots, step.rows, strict=True):
            past = slots[:-length]
            for pool in (self.keys, self.values):
                pool.flatten(0, 1)[past] = torch.randn(len(past), *shape[2:], generator=generator).to(dtype)
        if value_begin:
            self.values = self.keys
        num_vectors = self.num_heads + (1 if value_begin else 2) * self.num_kv_heads
        self.qkv = torch.randn(num_tokens, num_vectors, head_dim, generator=generator).to(dtype)
        self.rotation: Rotation | None = None
        if is_rotated:
            angles = 6 * torch.rand(num_tokens, (rotary_dim or head_dim) // 2, generator=generator)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            cosines, signed_sines = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
            self.rotation = Rotation(cosines.to(step.device), signed_sines.to(step.device))
        self.keys, self.values, self.qkv = (tensor.to(step.device) for tensor in (self.keys, self.values, self.qkv))

    def attend(self, backend: AttentionBackend, layer: AttentionLayer) -> tuple[torch.Tensor, LayerCache]:
        """Return what a backend answers for a plan of this layer alone, and the cache after it."""
        cache = self.cache()
        return self.attend_on(backend, layer, cache), cache

    def attend_on(self, backend: AttentionBackend, layer: AttentionLayer, cache: LayerCache) -> torch.Tensor:
        """Return what a backend answers on a cache that has the past."""
        plan = backend.plan(self.step.metadata, cache)
        return plan.attend(self.qkv.clone(), self.rotation, cache, layer)

    def cache(self) -> LayerCache:
        """Return a cache with the past, in the format of the cache; what nobody wrote is no number."""
        if self.cache_dtype == self.dtype:
            keys = self.keys.clone()
            return LayerCache(keys, keys if self.value_begin else self.values.clone(), value_begin=self.value_begin)
        sizes = self.step.block_size, self.num_kv_heads, self.keys.shape[3]
        shape = CacheShape(1, *sizes, self.cache_dtype, value_begin=self.value_begin)
        device = self.step.device
        pool_shape = self.step.num_blocks, *shape.pool_shape
        pools = [torch.empty(pool_shape, dtype=shape.pool_dtype, device=device) for _ in range(shape.num_pools)]
        for pool in pools:
            pool.view(torch.uint8).fill_(0xFF)
        (cache,) = shape.layer_caches(pools, [self.scales])
        past = [slot for slots, (_, num) in zip(self.step.slots, self.step.rows, strict=True) for slot in slots[:-num]]
        vectors = [self.keys] if self.value_begin else [self.keys, self.values]
        keys_and_values = torch.cat([pool.flatten(0, 1)[past] for pool in vectors], 1)
        write_in_torch(keys_and_values, None, torch.tensor(past, dtype=torch.int64, device=device), cache)
        return cache

    def attend_naively(
        self, layer: AttentionLayer, written: LayerCache | None = None, query_factor: float = 0.0
    ) -> tuple[torch.Tensor, LayerCache]:
        """Return what `attend` should, in float64 on the CPU: one query at a time, whole sequences in plain tensors.

        `written` is a cache that has the keys and values of this step; None: they are written here. Behind
        `query_factor`, which is not 0, queries are rounded to bfloat16.
        """
        qkv, slot_mapping = self.qkv.cpu().double(), self.step.metadata.slot_mapping.cpu()
        rotated = qkv if self.value_begin else qkv[:, : -self.num_kv_heads]
        if self.rotation is not None:
            half = self.rotation.cos.shape[1] // 2
            cos, sin = (part.cpu().double()[:, None, half:] for part in (self.rotation.cos, self.rotation.signed_sin))
            low, high, rest = rotated[..., :half], rotated[..., half : 2 * half], rotated[..., 2 * half :]
            rotated = torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)
        if written is None:
            pool = self.keys.cpu().double()
            cache = LayerCache(pool, pool if self.value_begin else self.values.cpu().double())
            cache.keys.flatten(0, 1)[slot_mapping] = rotated[:, self.num_heads :]
            if not self.value_begin:
                cache.values.flatten(0, 1)[slot_mapping] = qkv[:, -self.num_kv_heads :]
        else:
            cache = LayerCache(*decoded(written))
        if query_factor:
            rotated = (rotated * query_factor).bfloat16().double() / query_factor
        queries = rotated[:, : self.num_heads].numpy()
        output = np.empty_like(queries[..., self.value_begin :])
        token = 0
        for (start, length), first, slots in zip(self.step.rows, self.step.firsts, self.step.slots, strict=True):
            missing = np.full((first, *self.keys.shape[2:]), np.nan)
            keys, values = (
                np.concatenate((missing, pool.flatten(0, 1)[slots].numpy())) for pool in (cache.keys, cache.values)
            )
            for position in range(start, start + length):
                output[token] = _attend_one(queries[token], keys, values[..., self.value_begin :], position, layer)
                token += 1
        return torch.from_numpy(output).flatten(1), cache


def decoded(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the elements of a cache stand for, keys and values in float64 on the CPU."""
    keys, values = cache.keys.cpu().double(), cache.values.cpu().double()
    if cache.key_scales is not None and cache.value_scales is not None:
        keys = keys * cache.key_scales.cpu().transpose(1, 2).double()[..., None]
        values = values * cache.value_scales.cpu().transpose(1, 2).double()[..., None]
    return keys * cache.key_scale, values * cache.value_scale


def _attend_one(query: Doubles, keys: Doubles, values: Doubles, position: int, layer: AttentionLayer) -> Doubles:
    """Attend with the token at a position of a sequence.

    Args:
        query: [num_heads, head_dim].
        keys: Of the sequence, [num_positions, num_kv_heads, head_dim].
        values: As `keys`, but for the size of a head.
        position: Of the token.
        layer: How.

    Returns:
        [num_heads, numbers of a value].
    """
    first = 0 if layer.window_tokens is None else max(0, position + 1 - layer.window_tokens)
    keys, values = keys[first : position + 1], values[first : position + 1]
    group = len(query) // keys.shape[1]
    output = np.empty((len(query), values.shape[2]))
    for head in range(len(query)):
        scores = layer.scale * (keys[:, head // group] * query[head]).sum(1)
        if layer.soft_cap is not None:
            scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
        if layer.alibi_slopes is not None:
            scores = scores + layer.alibi_slopes[head] * (np.arange(first, position + 1) - position)
        if layer.distance_biases is not None:
            biases = layer.distance_biases[head].cpu().double().numpy()
            scores = scores + biases[np.minimum(position - np.arange(first, position + 1), len(biases) - 1)]
        sink = -np.inf if layer.sinks is None else float(layer.sinks[head])
        highest = max(scores.max(), sink)
        weights = np.exp(scores - highest)
        total = weights.sum() + np.exp(sink - highest)
        output[head] = (weights[:, None] * values[:, head // group]).sum(0) / total
    return output


def sinks_of(num_heads: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return sinks below, among and above the scores, one far above all and one that is as good as none."""
    return torch.tensor([0.5, 3.0, -2.0, 1e30, -torch.inf, 7.0], device=device).repeat(-(-num_heads // 6))[:num_heads]


def biases_of(num_heads: int, num_distances: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return distance biases, [num_heads, num_distances]."""
    generator = torch.Generator().manual_seed(num_distances)
    return (2 * torch.randn(num_heads, num_distances, generator=generator)).to(device)
