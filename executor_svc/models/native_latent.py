"""What comes before and behind an attention on a latent cache, in C; see `executor_svc.models.dense.Latent`."""

from collections.abc import Sequence
from ctypes import addressof

import torch

from executor_svc.models.dense import HeadMaps, LatentWeights, MapsApart, Norm
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import LatentStruct, MatrixStruct, NormStruct


class NativeLatent:
    """Two calls of the library."""

    def __init__(self, library: NativeLibrary, weights: LatentWeights[PackedMatrix]) -> None:
        config = weights.config
        self._library = library
        self._weights = weights  # the structs have pointers into them
        self._maps = [
            (MatrixStruct * weights.num_heads)(*(matrix.struct for matrix in _matrices_of(maps)))
            for maps in (weights.keys, weights.values)
        ]
        self.struct = LatentStruct(
            num_heads=weights.num_heads,
            rank=config.rank,
            rotary_dim=config.rotary_dim,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            query_rank=config.query_rank or 0,
            norm=norm_struct(weights.norm),
            query_norm=norm_struct(weights.query_norm),
            keys=addressof(self._maps[0]),
            values=addressof(self._maps[1]),
        )
        if weights.queries is not None:
            self.struct.queries = weights.queries.struct

    def queries(self, projected: torch.Tensor) -> torch.Tensor:
        """Return what attention takes; see `Latent`."""
        out = torch.empty(projected.shape[0], self._weights.num_heads + 1, self._weights.config.vector_dim)
        self._library.latent_queries(self.struct, projected, out)
        return out

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Map attended latents to values; see `Latent`."""
        out = torch.empty(attended.shape[0], self._weights.num_heads * self._weights.config.value_dim)
        self._library.latent_values(self.struct, attended, out)
        return out


def norm_struct(norm: Norm | None) -> NormStruct:
    """Return a norm as the library has it; its tensors must live as long as it is used."""
    if norm is None:
        return NormStruct()
    bias = None if norm.bias is None else norm.bias.data_ptr()
    return NormStruct(norm.weight.data_ptr(), bias, norm.is_layer_norm, norm.epsilon)


def _matrices_of(maps: HeadMaps) -> Sequence[PackedMatrix]:
    assert isinstance(maps, MapsApart), "as `NativeDense` makes them"
    matrices: Sequence[PackedMatrix] = maps.matrices
    return matrices
