"""What part of a model a tensor-parallel rank has.

Source: Shoeybi et al. 2019, "Megatron-LM": heads and MLP columns are shared out, so that one sum over the ranks
follows each attention and each MLP; the vocabulary is shared out by rows of the embedding.
"""

from dataclasses import dataclass, replace

from executor_svc.attention.interface import AttentionLayer
from executor_svc.checkpoint.weight_map import Range
from executor_svc.models.config import ModelConfig
from octavo_shared.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank; ranges are begin and end in the whole model."""

    rank: int
    size: int
    heads: Range
    # With fewer KV heads than ranks, several ranks have the same one.
    kv_heads: Range
    mlp_columns: Range
    # May be shorter than `vocabulary_rows` on the last ranks, or empty.
    vocabulary: Range
    vocabulary_rows: int  # rows that each rank has, with padding

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> "Shard":
        """Return the part of `rank` of `size`. Raises: ModelLoadError: so many ranks cannot share the model."""
        _check(config, size)
        num_kv_heads = config.num_key_value_heads
        first_kv_head = rank * num_kv_heads // size
        rows = -(-config.vocab_size // size)
        vocabulary_begin = min(rank * rows, config.vocab_size)
        return cls(
            rank=rank,
            size=size,
            heads=_even_part(config.num_attention_heads, rank, size),
            kv_heads=(first_kv_head, first_kv_head + max(1, num_kv_heads // size)),
            mlp_columns=_even_part(config.mlp.intermediate_size, rank, size),
            vocabulary=(vocabulary_begin, min(vocabulary_begin + rows, config.vocab_size)),
            vocabulary_rows=rows,
        )

    @property
    def num_heads(self) -> int:
        """Attention heads of this rank."""
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.kv_heads[1] - self.kv_heads[0]

    def attention_layer(self, layer: AttentionLayer) -> AttentionLayer:
        """Return how this rank's heads of a layer attend."""
        slopes, sinks, own = layer.alibi_slopes, layer.sinks, slice(*self.heads)
        return replace(
            layer,
            alibi_slopes=None if slopes is None else slopes[own],
            sinks=None if sinks is None else sinks[own],
        )


def _even_part(count: int, rank: int, size: int) -> Range:
    return rank * count // size, (rank + 1) * count // size


def _check(config: ModelConfig, size: int) -> None:
    kv_heads = config.num_key_value_heads
    problems = {
        f"{config.num_attention_heads} attention heads": config.num_attention_heads % size,
        f"{kv_heads} KV heads": kv_heads % size and size % kv_heads,
        f"an intermediate_size of {config.mlp.intermediate_size}": config.mlp.intermediate_size % size,
    }
    for what, remainder in problems.items():
        if remainder:
            raise ModelLoadError(
                f"tp is {size}, but {config.source} has {what}, which is not divisible among the ranks"
            )
