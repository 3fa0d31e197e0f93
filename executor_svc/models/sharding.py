"""What part of a model a tensor-parallel rank has.

Source: Shoeybi et al. 2019, "Megatron-LM": heads and MLP columns are shared out, so that one sum over the ranks
follows each attention and each MLP; the vocabulary is shared out by rows of the embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from executor_svc.attention.interface import AttentionLayer
from executor_svc.checkpoint.weight_map import Range
from executor_svc.models.config import ExpertsConfig, LayerConfig, ModelConfig
from executor_svc.models.state_config import DeltaNetConfig, Mamba2Config
from octavo_shared.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor of a checkpoint; `tensor` is its name without `.weight` and `.bias`."""

    tensor: str
    tensor_rows: int  # of all of it
    ranges: tuple[Range, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank; ranges are begin and end in the whole model."""

    rank: int
    size: int
    # May be shorter than `vocabulary_rows` on the last ranks, or empty.
    vocabulary: Range
    vocabulary_rows: int  # rows that each rank has, with padding

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> "Shard":
        """Return the part of `rank` of `size`. Raises: ModelLoadError: so many ranks cannot share the model."""
        layers = config.layers if config.encoder is None else (*config.layers, *config.encoder.layers)
        for layer in dict.fromkeys(layers):
            _check(config, layer, size)
        rows = -(-config.vocab_size // size)
        vocabulary_begin = min(rank * rows, config.vocab_size)
        return cls(
            rank=rank,
            size=size,
            vocabulary=(vocabulary_begin, min(vocabulary_begin + rows, config.vocab_size)),
            vocabulary_rows=rows,
        )

    def even_part(self, count: int) -> Range:
        """Return this rank's part of what is shared out evenly: heads, and columns of an MLP."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def kv_heads(self, layer: LayerConfig) -> Range:
        """Return this rank's KV heads. With fewer of them than ranks, several ranks have the same one."""
        first = self.rank * layer.num_kv_heads // self.size
        return first, first + self.num_kv_heads(layer)

    def num_heads(self, layer: LayerConfig) -> int:
        """Return how many attention heads of a layer this rank has."""
        return layer.num_heads // self.size

    def num_kv_heads(self, layer: LayerConfig) -> int:
        """Return how many KV heads of a layer this rank has."""
        return max(1, layer.num_kv_heads // self.size)

    def attention_layer(
        self, layer: LayerConfig, sinks: torch.Tensor | None = None, distance_biases: torch.Tensor | None = None
    ) -> AttentionLayer:
        """Return how this rank's heads of a layer attend, with their sinks and distance biases."""
        slopes, own = layer.attention.alibi_slopes, slice(*self.even_part(layer.num_heads))
        slopes = None if slopes is None else slopes[own]
        return replace(layer.attention, alibi_slopes=slopes, sinks=sinks, distance_biases=distance_biases)


def scaled(heads: Range, head_dim: int) -> Range:
    """Return the rows of a range of heads."""
    return heads[0] * head_dim, heads[1] * head_dim


def rotary_rows(layer: LayerConfig, begin: int, size: int) -> tuple[Range, ...]:
    """Return the rows of a head from `begin` on, first those that turn, so that pairs are as the model has them."""
    if layer.rope is None or not layer.rope.is_interleaved:
        return ((begin, begin + size),)
    rotary_dim = layer.rope.rotary_dim or size
    turning = [(row, row + 1) for first in (0, 1) for row in range(begin + first, begin + rotary_dim, 2)]
    return (*turning, (begin + rotary_dim, begin + size)) if rotary_dim < size else tuple(turning)


def rows_by_turns(tensor: str, num_heads: int, sizes: Sequence[int], ours: Sequence[Range]) -> list[Rows]:
    """Return the rows of each part of a tensor that holds, head by head, so many rows of each."""
    rows_of_head = sum(sizes)
    begins = [sum(sizes[:part]) for part in range(len(sizes))]
    return [
        Rows(
            tensor,
            num_heads * rows_of_head,
            tuple((head * rows_of_head + begin, head * rows_of_head + begin + size) for head in range(*heads)),
        )
        for begin, size, heads in zip(begins, sizes, ours, strict=True)
    ]


def qkv_rows(config: ModelConfig, shard: Shard, index: int) -> list[Rows]:
    """Return the rows of q, of k and of v of a layer that a rank has, and of the gate of what is attended."""
    layer, names = config.layers[index], config.names_of(index)
    tensors = [name.format(layer=index) for name in names.qkv]
    counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    ours_of_kv = shard.kv_heads(layer)
    ours = (shard.even_part(layer.num_heads), ours_of_kv, ours_of_kv)
    dim = layer.head_dim
    if layer.keys_are_values:
        tensors[2] = tensors[1]
    if layer.cache_of is not None or layer.attends_to_encoder:
        return [Rows(tensors[0], counts[0] * dim, (scaled(ours[0], dim),))]
    if names.qkv_layout == "apart":
        parts = zip(tensors, counts, ours, strict=True)
        query, key, value = (Rows(tensor, count * dim, (scaled(heads, dim),)) for tensor, count, heads in parts)
        if layer.rope is not None and layer.rope.is_interleaved:
            query, key = (_in_rotary_order(layer, part) for part in (query, key))
        if not layer.has_output_gate:
            return [query, key, value]
        query, gate = rows_by_turns(tensors[0], counts[0], (dim, dim), [ours[0]] * 2)
        return [query, key, value, gate]
    total = sum(counts) * dim
    if names.qkv_layout == "merged":
        begins = (0, counts[0], counts[0] + counts[1])
        return [
            Rows(tensors[0], total, (scaled((first + heads[0], first + heads[1]), dim),))
            for first, heads in zip(begins, ours, strict=True)
        ]
    return rows_by_turns(tensors[0], layer.num_heads, (dim, dim, dim), ours)


def encoder_rows(config: ModelConfig, shard: Shard, index: int) -> list[Rows]:
    """Return the rows of k and of v that a rank has of a layer that attends to an encoder."""
    layer, names = config.layers[index], config.names_of(index)
    ours = scaled(shard.kv_heads(layer), layer.head_dim)
    return [Rows(tensor, layer.num_kv_heads * layer.head_dim, (ours,)) for tensor in names.qkv[1:]]


def _in_rotary_order(layer: LayerConfig, rows: Rows) -> Rows:
    """Return the rows of whole heads in the order of `rotary_rows`."""
    ((begin, end),), dim = rows.ranges, layer.head_dim
    ranges = [pair for head in range(begin, end, dim) for pair in rotary_rows(layer, head, dim)]
    return replace(rows, ranges=tuple(ranges))


def _check(config: ModelConfig, layer: LayerConfig, size: int) -> None:
    mlp = layer.mlp.mlp if isinstance(layer.mlp, ExpertsConfig) else layer.mlp
    shared = layer.mlp.shared if isinstance(layer.mlp, ExpertsConfig) else None
    size_of_mlp = 0 if mlp is None else mlp.intermediate_size
    problems = {
        f"{layer.num_heads} attention heads": layer.num_heads % size,
        f"{layer.num_kv_heads} KV heads": layer.num_kv_heads % size and size % layer.num_kv_heads,
        f"an intermediate_size of {size_of_mlp}": size_of_mlp % size,
    }
    if isinstance(layer.state, DeltaNetConfig):
        problems[f"{layer.state.num_key_heads} key heads in a delta net"] = layer.state.num_key_heads % size
        problems["a delta net in the order of llama.cpp"] = layer.state.is_tiled and size > 1
    elif isinstance(layer.state, Mamba2Config):
        problems[f"{layer.state.num_heads} heads in a Mamba-2 layer"] = layer.state.num_heads % size
        has_whole_groups = layer.state.num_groups == 1 or layer.state.num_groups % size == 0
        problems[f"{layer.state.num_groups} groups in a Mamba-2 layer"] = not has_whole_groups
    elif layer.state is not None:
        problems[f"{layer.state.size} channels in a short convolution"] = layer.state.size % size
    if shared is not None:
        problems[f"a shared expert of {shared.intermediate_size}"] = shared.intermediate_size % size
    for what, remainder in problems.items():
        if remainder:
            raise ModelLoadError(
                f"tp is {size}, but {config.source} has {what}, which is not divisible among the ranks"
            )
