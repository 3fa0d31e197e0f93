"""The weights of attentions on a latent cache on one rank, uninitialised; `decoder_weights.py` makes all others."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic

import numpy as np
import torch

from executor_svc.checkpoint.gguf.rounding import restore_rows
from executor_svc.checkpoint.weight_map import (
    BlockTarget,
    Range,
    RoundingTarget,
    WeightMap,
    WeightTarget,
    memory_of,
)
from executor_svc.models.config import LatentConfig, LayerConfig, ModelConfig
from executor_svc.models.dense import (
    DenseKernels,
    HeadMaps,
    Latent,
    LatentWeights,
    MapsApart,
    MatrixRole,
    MatrixT,
    Norm,
)
from executor_svc.models.sharding import Rows, Shard, rotary_rows, scaled
from executor_svc.native.structs import NumberFormat

MakeColumns = Callable[[Sequence[Rows], int], MatrixT]
MakeNorm = Callable[[str, int], Norm]
StoredFormats = Callable[[Sequence[str]], Sequence[NumberFormat]]


class LatentLayers(Generic[MatrixT]):
    """Makes what these layers have behind their projection.

    Args:
        config: Of the model.
        shard: The part of this rank: of the heads; all ranks have the vectors of the cache whole.
        kernels: What joins the weights.
        weight_map: Is told where tensors of a checkpoint go.
        columns: Makes a matrix of rows of tensors with so many inputs.
        norm: Makes the norm of a name and a size.
        stored: The number formats that a file has decided.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        kernels: DenseKernels[MatrixT],
        weight_map: WeightMap,
        columns: MakeColumns[MatrixT],
        norm: MakeNorm,
        stored: StoredFormats,
    ) -> None:
        self._names = config.names
        self._shard = shard
        self._kernels = kernels
        self._map = weight_map
        self._columns = columns
        self._norm = norm
        self._stored = stored

    def projected_rows(self, index: int, layer: LayerConfig) -> list[Rows]:
        """Return this rank's rows of the projection of a layer; see `LatentWeights`."""
        latent, names = _latent_of(layer), self._names
        name = names.latent.format(layer=index)
        num_rows = latent.rank + latent.rotary_dim
        of_key = Rows(name, num_rows, rotary_rows(layer, latent.rank, latent.rotary_dim))
        vector = [of_key, Rows(name, num_rows, ((0, latent.rank),))]
        if latent.query_rank is None:
            return [*self._query_rows(names.qkv[0].format(layer=index), layer), *vector]
        rank = latent.query_rank
        return [Rows(names.query_vector.format(layer=index), rank, ((0, rank),)), *vector]

    def latent(self, index: int, layer: LayerConfig) -> Latent:
        """Return what a layer has before and behind its attention."""
        latent, names, queries, query_norm = _latent_of(layer), self._names, None, None
        if latent.query_rank is not None:
            query_norm = self._norm(names.query_vector_norm.format(layer=index), latent.query_rank)
            queries = self._columns(self._query_rows(names.queries.format(layer=index), layer), latent.query_rank)
        norm = self._norm(names.latent_norm.format(layer=index), latent.rank)
        num_heads = self._shard.num_heads(layer)
        maps = self._maps(index, layer, num_heads)
        return self._kernels.latent(LatentWeights(latent, num_heads, norm, query_norm, queries, *maps))

    def _query_rows(self, name: str, layer: LayerConfig) -> list[Rows]:
        """Return the rows of all numbers of queries that are not rotated, then of the others."""
        latent, ours = _latent_of(layer), range(*self._shard.even_part(layer.num_heads))
        width = latent.key_dim + latent.rotary_dim
        kept = tuple((head * width, head * width + latent.key_dim) for head in ours)
        begins = [head * width + latent.key_dim for head in ours]
        turning = tuple(rows for begin in begins for rows in rotary_rows(layer, begin, latent.rotary_dim))
        return [Rows(name, layer.num_heads * width, rows) for rows in (kept, turning)]

    def _maps(self, index: int, layer: LayerConfig, num_heads: int) -> tuple[HeadMaps, HeadMaps]:
        """Return the maps of this rank's heads to keys and to values."""
        latent, names = _latent_of(layer), self._names
        ours = self._shard.even_part(layer.num_heads)
        sizes = (latent.key_dim, latent.rank), (latent.rank, latent.value_dim)
        if latent.has_maps_apart:
            apart = [name.format(layer=index) for name in names.latent_maps_apart]
            keys = self._head_maps(num_heads, *sizes[0], stored=self._stored(apart[:1]))
            values = self._head_maps(num_heads, *sizes[1], role="values", stored=self._stored(apart[1:]))
            for name, maps, (num_inputs, num_outputs) in zip(apart, (keys, values), sizes, strict=True):
                shape, rows = (layer.num_heads * num_outputs, num_inputs), (scaled(ours, num_outputs),)
                self._map.add(f"{name}.weight", shape, _MapRows(maps.weights, num_outputs, num_inputs), rows=rows)
            return keys, values
        name = names.latent_maps.format(layer=index)
        stored = self._stored([name])
        # Codes lie in blocks of inputs, which are outputs here.
        of_keys = [each if each == NumberFormat.BFLOAT16 else NumberFormat.FLOAT32 for each in stored]
        keys = self._head_maps(num_heads, *sizes[0], stored=of_keys)
        values = self._head_maps(num_heads, *sizes[1], role="values", stored=stored)
        width = latent.key_dim + latent.value_dim
        shape = (layer.num_heads * width, latent.rank)
        begins = [(head * width, head * width + latent.key_dim) for head in range(*ours)]
        to_keys = _MapRows(keys.weights, latent.key_dim, latent.rank, is_transposed=True)
        to_values = _MapRows(values.weights, latent.value_dim, latent.rank)
        self._map.add(f"{name}.weight", shape, to_keys, rows=[(begin, end) for begin, end in begins])
        self._map.add(f"{name}.weight", shape, to_values, rows=[(end, end + latent.value_dim) for _, end in begins])
        return keys, values

    def _head_maps(
        self,
        num_heads: int,
        num_inputs: int,
        num_outputs: int,
        *,
        role: MatrixRole = "layer",
        stored: Sequence[NumberFormat] = (),
    ) -> HeadMaps:
        """Return a linear map for each head with uninitialised weights."""
        kernels, joined = self._kernels, None
        if all(each in (NumberFormat.FLOAT32, NumberFormat.BFLOAT16) for each in stored):
            joined = kernels.joined_maps(num_heads, num_inputs, num_outputs)
        if joined is not None:
            return joined
        return MapsApart(
            [kernels.matrix(num_inputs, [num_outputs], role=role, stored=stored) for _ in range(num_heads)]
        )


def _latent_of(layer: LayerConfig) -> LatentConfig:
    assert layer.latent is not None, "the layer attends on a latent cache"
    return layer.latent


class _MapRows:
    """Rows of a tensor that are the maps of heads, one behind the other; a place for weights.

    Args:
        weights: Of each head.
        rows: Rows of the tensor that are one map.
        num_inputs: Columns of the tensor.
        is_transposed: Whether what is stored is the map from its outputs to its inputs. Codes become the numbers that
            they stand for.
    """

    def __init__(
        self, weights: Sequence[WeightTarget], rows: int, num_inputs: int, *, is_transposed: bool = False
    ) -> None:
        self._weights = weights
        self._rows = rows
        self._is_transposed = is_transposed
        self.shape = torch.Size((rows * len(weights), num_inputs))
        self._whole: torch.Tensor | None = None  # what is rounded, until all of it is there

    @property
    def nbytes(self) -> int:
        """Size of all maps."""
        return sum(weight.nbytes for weight in self._weights)

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """Of all maps."""
        return [tensor for weight in self._weights for tensor in memory_of(weight)]

    def copy_(self, source: torch.Tensor, /) -> None:
        """Take over the values of a tensor of this shape."""
        for weight, part in zip(self._weights, torch.split(source, self._rows), strict=True):
            weight.copy_(part.T.contiguous() if self._is_transposed else part)

    def copy_blocks(self, blocks: torch.Tensor, block_type: int, order: torch.Tensor | None) -> bool:
        """Take over codes; see `BlockTarget`."""
        assert order is None, "heads lie in their order"
        if self._is_transposed:
            with np.errstate(all="ignore"):  # what overflows is not finite
                restored = restore_rows(block_type, blocks.numpy())[:, : self.shape[1]]
            values = torch.from_numpy(np.ascontiguousarray(restored, np.float32))
            self.copy_(values)
            return bool(values.isfinite().all())
        parts = zip(self._weights, torch.split(blocks, self._rows), strict=True)
        return all(_as_blocks(weight).copy_blocks(part.contiguous(), block_type, None) for weight, part in parts)

    def round_rows(self, first_row: int, source: torch.Tensor) -> torch.Tensor:
        """Quantize some rows, which follow the last ones; see `RoundingTarget`."""
        if self._is_transposed:
            if self._whole is None:
                self._whole = torch.empty(self.shape)
            self._whole[first_row : first_row + len(source)] = source
            if first_row + len(source) == self.shape[0]:
                self.copy_(self._whole)
                self._whole = None
            return source
        held: list[torch.Tensor] = []
        for begin, end in _heads_of(first_row, first_row + len(source), self._rows):
            weight = self._weights[begin // self._rows]
            assert isinstance(weight, RoundingTarget), "what takes codes quantizes too"
            held.append(weight.round_rows(begin % self._rows, source[begin - first_row : end - first_row]))
        return torch.cat(held)


def _as_blocks(weight: WeightTarget) -> BlockTarget:
    assert isinstance(weight, BlockTarget), "what is planned for codes takes them"
    return weight


def _heads_of(begin: int, end: int, rows: int) -> list[Range]:
    """Cut a range of rows where a head of so many rows ends."""
    cuts = [begin, *range((begin // rows + 1) * rows, end, rows), end]
    return list(pairwise(cuts))
