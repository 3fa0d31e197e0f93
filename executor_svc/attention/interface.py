"""What the model, the model runner and the attention backends agree on.

The runner describes a step once (`AttentionMetadata`), the backend turns that into whatever its
kernels need (`AttentionPlan`), and every layer of the model calls the plan. All of it is passed as
arguments: there is no current step anywhere.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, runtime_checkable

import torch

from octavo_shared.step_wire.step import Int32Array


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The block pool of one layer. Unwritten slots hold anything, NaN included.

    The dtype of keys and values is the format of the cache; see `cache_format.py`. Both pools are contiguous, but for
    the C and Triton backends, which take blocks any distance apart, and but for int8, which has scales behind the
    elements of each block.
    """

    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]; of a latent cache its keys
    _: KW_ONLY
    # Values are the numbers of a key from there on: the cache is latent, and `values` is `keys`. 0: they lie apart.
    value_begin: int = 0
    # Of int8, [num_blocks, num_kv_heads, block_size] float32; None: the format has none.
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    # Of FP8: what all elements of the layer are multiplied by.
    key_scale: float = 1.0
    value_scale: float = 1.0
    # The cache group of the layer: which block tables its blocks are in.
    group: int = 0

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.keys.shape[1]

    @property
    def pools(self) -> Sequence[torch.Tensor]:
        """What holds it: keys and values, or what is both."""
        return (self.keys,) if self.value_begin else (self.keys, self.values)

    @property
    def num_vectors(self) -> int:
        """Vectors that a token has in them."""
        return self.keys.shape[2] * len(self.pools)

    @property
    def value_dim(self) -> int:
        """Numbers in a value."""
        return self.keys.shape[3] - self.value_begin


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a step are. Rows are sequences; their tokens lie one row after the other.

    Token i of a row has position starts + i and sees the positions 0 to starts + i of its sequence.
    """

    starts: Int32Array  # [num_rows] position of the row's first token
    lengths: Int32Array  # [num_rows] tokens of the row in this step, 1 or more
    block_tables: Int32Array  # [num_rows, max_num_blocks] what lies beyond a row's blocks is garbage
    slot_mapping: torch.Tensor  # [num_tokens] int64: block id * block_size + offset in the block


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Decodes on the device, one token a row. A CUDA graph reads these tensors anew at each replay.

    Rows that pad a batch are rows like others: their block belongs to no sequence.
    """

    num_visible_tokens: torch.Tensor  # [num_rows] int32: what the row's query sees, its own token included; 1 or more
    block_tables: torch.Tensor  # [num_rows, max_num_blocks] int32; what lies beyond a row's blocks is garbage
    slot_mapping: torch.Tensor  # [num_rows] int64, as in `AttentionMetadata`


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of the tokens of a step; equal for all heads, of which it turns the first dimensions."""

    cos: torch.Tensor  # [num_tokens, rotary_dim]
    # The minus of the rotation sits in the first half, which spares a negation in every layer.
    signed_sin: torch.Tensor  # [num_tokens, rotary_dim]

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Turn [num_tokens, num_heads, head_dim] by the angles of its positions."""
        rotary_dim = self.cos.shape[1]
        turning, rest = heads[..., :rotary_dim], heads[..., rotary_dim:]
        swapped = turning.roll(rotary_dim // 2, -1)
        turned = torch.addcmul(turning * self.cos[:, None], swapped, self.signed_sin[:, None])
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How one layer attends. A score is `scale` * query . key, then capped, then shifted by ALiBi and distance biases.

    Equal ones attend alike but for their sinks and distance biases, which are weights.
    """

    scale: float
    # A token sees the last so many positions, its own included; None: all.
    window_tokens: int | None = None
    # A score becomes cap * tanh(score / cap).
    soft_cap: float | None = None
    # To a score of head h is added alibi_slopes[h] * (key position - query position); [num_heads].
    # Source: Press et al. 2021, "Train Short, Test Long".
    alibi_slopes: tuple[float, ...] | None = None
    # The softmax of head h is over its scores and sinks[h], whose value is 0; [num_heads] float32, on the device of the
    # model. Before there are weights, one on the device "meta" stands for them.
    # Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card".
    sinks: torch.Tensor | None = field(default=None, compare=False)
    # To a score of head h is added distance_biases[h, min(query position - key position, num_distances - 1)];
    # [num_heads, num_distances] float32, where `sinks` are. Where a token sees later ones too, a row is of distances
    # from -n to n; those beyond count as these.
    # Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer".
    distance_biases: torch.Tensor | None = field(default=None, compare=False)
    # A token sees no position before this one, but for its own. Only the C library has other ones than 0.
    first_position: int = 0
    # The tokens have queries alone: keys and values are those that an earlier layer, or an encoder, wrote into a cache.
    reads_only: bool = False


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """What a layer keeps of each token."""

    num_kv_heads: int  # of this rank
    head_dim: int
    window: int | None = None  # last tokens that it sees, the token itself included; None: all
    value_begin: int = 0  # see `LayerCache.value_begin`
    is_of_encoder: bool = False  # it is of the tokens of an encoder's input, not of the sequence


class AttentionPlan(Protocol):
    """One step, prepared; used once a layer."""

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Rotate queries and keys, write the keys and values of all tokens into the cache, then attend.

        Args:
            qkv: Queries, keys and values before rotation, [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; no
                values where the cache is latent, and queries alone of a layer that only reads.
            rotation: For the positions of the tokens; None: they are rotated already, or never.
            cache: The block pool that the layer reads; written, unless it only reads.
            layer: How this layer attends. Blocks that its window has left behind are not read.

        Returns:
            [num_tokens, num_heads * value_dim], valid until the next call of any plan of the backend.
        """


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """One step of a model with several cache groups: a plan for each, whose block tables differ."""

    plans: Sequence[AttentionPlan]

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Attend by the plan of the layer's group; see `AttentionPlan.attend`."""
        return self.plans[cache.group].attend(qkv, rotation, cache, layer)


def join_plans(plans: Sequence[AttentionPlan]) -> AttentionPlan:
    """Return one plan for all cache groups."""
    return plans[0] if len(plans) == 1 else GroupedPlan(plans)


def first_caches(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Return the cache of the first layer of each cache group: it stands for all of them."""
    first: dict[int, LayerCache] = {}
    for cache in caches:
        first.setdefault(cache.group, cache)
    return [first[group] for group in sorted(first)]


class AttentionBackend(Protocol):
    """Makes plans; holds no state of a step."""

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> AttentionPlan:
        """Prepare a step of one cache group. `cache` stands for its layers: shapes, dtype and device are equal."""


@runtime_checkable
class DecodePlanner(Protocol):
    """A backend whose decodes can be captured in a CUDA graph."""

    def decode_plan(self, batch: DecodeBatch, cache: LayerCache) -> AttentionPlan:
        """Prepare decodes that depend on nothing on the host.

        The plan's `attend` launches the same kernels with the same arguments whatever the tensors of `batch` hold,
        and waits for nothing.
        """


class ReadPlan(AttentionPlan, Protocol):
    """A plan whose second half can be launched alone."""

    def read(self, query: torch.Tensor, cache: LayerCache, layer: AttentionLayer, output: torch.Tensor) -> None:
        """Attend to what is in the cache, the tokens' own keys and values included.

        Args:
            query: After rotation, [num_tokens, num_heads, head_dim]; its last two dimensions are contiguous.
            cache: The block pool that the layer reads.
            layer: How this layer attends.
            output: [num_tokens, num_heads * value_dim], contiguous; written.
        """


@runtime_checkable
class CacheReader(Protocol):
    """A backend that writes the cache and reads it in two halves: what is around the reads can be captured."""

    def write(
        self, qkv: torch.Tensor, rotation: Rotation | None, slot_mapping: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        """Do the first half of `AttentionPlan.attend`, which looks at nothing on the host; return rotated queries.

        Shapes are those of `WriteKeysAndValues`; the queries are valid until `qkv` is written.
        """

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> ReadPlan:
        """Prepare a step of one cache group; see `AttentionBackend.plan`."""
