"""The dense part of a model: segments between the attentions, and the weights that they own.

A *segment* is all the work from the output of one attention to the input of the next:

    residual += attention_output(attended)           the end of a layer, which the first segment has not
    residual += mlp(norm(residual))
    result    = projection(norm(residual))           the next layer's q, k and v, before rotation

A layer without attention or without an MLP lacks that line. Some models norm or scale what joins the residual stream
too, or norm each head of queries, keys and values. Gemma 4 adds what each token has for each layer (`PerLayer`) behind
the MLP, and scales the residual stream.

A decoder of n layers is n segments with an attention behind each, the end of the last layer, and the head, which is
a segment without a layer's end. `DenseKernels` makes them. It has three implementations: `TorchDense` (any device and
number format; the reference, whose int8 products on a CPU are in C), `NativeDense` (C, float32 on a CPU), and
`TritonDense` (a GPU: kernels in Triton between torch's products).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

from executor_svc.adapters.products import AdaptedPart
from executor_svc.adapters.slots import AdapterSlots
from executor_svc.attention.interface import Rotation
from executor_svc.checkpoint.weight_map import Range, WeightTarget
from executor_svc.models.config import Activation, ExpertsConfig, LatentConfig
from executor_svc.native.structs import NumberFormat

# "vocabulary": the embedding or the head, whose rows are looked up; "router": it chooses experts, and is not quantized;
# "qkv": its parts are queries, keys and values, and maybe gates; "values": it makes values;
# "delta_net": its last two parts, and "mamba2": its
# last one, say what a state keeps; "layer": all others.
MatrixRole = Literal["layer", "qkv", "values", "delta_net", "mamba2", "vocabulary", "router"]


class Matrix(Protocol):
    """A linear map, possibly of several parts that a checkpoint holds apart, such as q, k and v."""

    @property
    def weights(self) -> Sequence[WeightTarget]:
        """The parts, each [num_outputs of the part, num_inputs]."""

    @property
    def biases(self) -> Sequence[torch.Tensor]:
        """The bias of each part; empty if there is none."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""


MatrixT = TypeVar("MatrixT", bound=Matrix)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm or LayerNorm over the last dimension.

    The number format of the weight decides in which one is computed: Gemma's is float32.
    """

    weight: torch.Tensor  # [size]
    bias: torch.Tensor | None  # [size]
    epsilon: float
    is_layer_norm: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., size] normed, in the number format of `x`."""
        converted = x.to(self.weight.dtype)
        if self.is_layer_norm:
            return F.layer_norm(converted, self.weight.shape, self.weight, self.bias, self.epsilon).to(x.dtype)
        return F.rms_norm(converted, self.weight.shape, self.weight, self.epsilon).to(x.dtype)


@dataclass(frozen=True, slots=True)
class EmbeddingWeights(Generic[MatrixT]):
    """What makes the first residual stream: norm(scale * tokens[id] + positions[position + position_offset])."""

    tokens: MatrixT
    vocabulary: Range  # the tokens whose embeddings this rank has
    scale: torch.Tensor | None  # [] in the number format of the model, as in transformers; None: 1
    positions: torch.Tensor | None  # [num_positions, hidden_size]
    position_offset: int
    norm: Norm | None


@dataclass(frozen=True, slots=True)
class Mlp(Generic[MatrixT]):
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

    gate: MatrixT | None
    up: MatrixT
    down: MatrixT
    activation: Activation
    is_merged: bool = False  # `up` has two parts, the gate and what it was, and `gate` is None


@dataclass(slots=True)
class MatrixStack:
    """Matrices of one shape, one of each expert, that kernels may lay one behind the other and multiply by at once.

    `weights` are [count, num_outputs, num_inputs], and `biases`, if there are any, [count, num_outputs]. Both are made
    with the first matrix; None: kernels give each matrix memory of its own.
    """

    count: int
    weights: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    num_taken: int = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights, which are there, and the biases."""
        assert self.weights is not None, "matrices lie here"
        return self.weights, self.biases

    def take(
        self, shape: tuple[int, int], *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return memory for the next matrix, [num_outputs, num_inputs], and for its bias if it has one."""
        if self.weights is None:
            self.weights = torch.empty((self.count, *shape), dtype=dtype, device=device)
            self.biases = torch.empty((self.count, shape[0]), dtype=dtype, device=device) if has_bias else None
        assert self.weights.shape[1:] == shape, "they are alike"
        index, self.num_taken = self.num_taken, self.num_taken + 1
        return self.weights[index], None if self.biases is None else self.biases[index]


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """Norms of the residual stream for a router and its experts, and of what experts and the shared one return.

    outputs(experts(inputs(residual))) + shared_outputs(shared(mlp_norm(residual))), as in Gemma 4.
    """

    router: Norm
    inputs: Norm
    outputs: Norm
    shared_outputs: Norm


@dataclass(frozen=True, slots=True)
class Experts(Generic[MatrixT]):
    """A mixture of experts. Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"."""

    router: MatrixT  # to a score of each expert
    experts: tuple[Mlp[MatrixT], ...]
    config: ExpertsConfig
    correction_bias: torch.Tensor | None = None  # [num_experts] float32, as the configuration says
    shared: Mlp[MatrixT] | None = None  # for every token, times sigmoid(shared_gate(x))
    shared_gate: MatrixT | None = None  # one output; None: the factor is 1
    scales: torch.Tensor | None = None  # [num_experts] float32, of the weight of each; None: 1
    norms: ExpertNorms | None = None  # None: all take the norm of the layer, and add what they return
    # Of `up`, with the gate before it, and of `down`; None: the matrices of each expert lie on their own.
    stacks: tuple[MatrixStack, MatrixStack] | None = None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms over each query head and each key head of a projection, before they are rotated."""

    query: Norm
    key: Norm
    num_heads: int
    num_kv_heads: int
    value: Norm | None = None  # of each value head; None: they are not normed


class HeadMaps(Protocol):
    """A linear map for each head, all of one shape: of DeepSeek's paper the absorbed W_UK and W_UV, from kv_b_proj."""

    @property
    def weights(self) -> Sequence[WeightTarget]:
        """Of each head, [num_outputs, num_inputs]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_heads, num_inputs] to [num_rows, num_heads, num_outputs]."""


@dataclass(frozen=True, slots=True)
class MapsApart(Generic[MatrixT]):
    """Maps that are matrices of their own."""

    matrices: Sequence[MatrixT]

    @property
    def weights(self) -> Sequence[WeightTarget]:
        """See `HeadMaps`."""
        return [matrix.weights[0] for matrix in self.matrices]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `HeadMaps`."""
        return torch.stack([matrix(x[:, head].contiguous()) for head, matrix in enumerate(self.matrices)], 1)


@dataclass(frozen=True, slots=True)
class LatentWeights(Generic[MatrixT]):
    """The weights of an attention on a latent cache, behind the projection and behind the attention.

    The projection makes queries, first all numbers that are not rotated and then the others, or the vector that queries
    are made of; then the vector of the cache, not normed.
    """

    config: LatentConfig
    num_heads: int  # of this rank
    norm: Norm  # of the latent
    query_norm: Norm | None  # of the vector that queries are made of; None, as `queries`: there is none
    queries: MatrixT | None
    keys: HeadMaps  # from the numbers of a query that are not rotated to the latent
    values: HeadMaps  # from the latent to a value


@dataclass(slots=True)
class LayerInputs:
    """What each token of a step has for each layer; each step has its own."""

    values: torch.Tensor  # [num_tokens, num_layers * size]


@dataclass(frozen=True, slots=True)
class PerLayer(Generic[MatrixT]):
    """What a layer takes of them: residual += norm(projection(activation(gate(residual)) * input)).

    Source: Google 2025, "Gemma 3n"; 2026, "Gemma 4": per-layer embeddings (PLE).
    """

    gate: MatrixT
    projection: MatrixT
    norm: Norm
    activation: Activation
    inputs: LayerInputs
    begin: int  # where those of this layer begin
    size: int  # numbers of a layer

    @property
    def own_inputs(self) -> torch.Tensor:
        """What the tokens of the step have for this layer, [num_tokens, size]."""
        return self.inputs.values[:, self.begin : self.begin + self.size]


@dataclass(frozen=True, slots=True)
class LayerEnd(Generic[MatrixT]):
    """The weights of a layer behind its attention. The norms of outputs come before they join the residual stream."""

    attention_output: MatrixT | None  # None: there is neither attention nor a state
    attention_output_norm: Norm | None
    mlp_norm: Norm | None  # None: as `mlp`
    mlp: Mlp[MatrixT] | Experts[MatrixT] | None  # None: there is none
    mlp_output_norm: Norm | None
    residual_scale: float = 1.0  # of what joins the residual stream, normed or not
    per_layer: PerLayer[MatrixT] | None = None
    layer_scale: torch.Tensor | None = None  # [1] float32, of the residual stream behind all that; None: 1


class Embedding(Protocol):
    """The way from tokens to the first residual stream."""

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, hidden_size], free to be written; both arguments are [num_tokens] int64."""


class Segment(Protocol):
    """The dense work between two attentions."""

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment.

        Args:
            attended: Output of the attention, [num_tokens, num_heads * head_dim]; None if no layer with one ends here.
            residual: The residual stream, [num_tokens, hidden_size]; updated in place.

        Returns:
            [num_tokens, outputs of the projection].
        """


class LastSegment(Protocol):
    """The end of a layer that nothing follows but the head, or a layer without attention and state."""

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> None:
        """Update the residual stream in place; shapes as in `Segment`."""


class Latent(Protocol):
    """What comes before and behind an attention on a latent cache."""

    def queries(self, projected: torch.Tensor) -> torch.Tensor:
        """Return what attention takes, [num_tokens, num_heads + 1, rotary_dim + rank], not rotated.

        `projected`, [num_tokens, outputs of the projection], may be written.
        """

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Map attended latents, [num_tokens, num_heads * rank], to values, [num_tokens, num_heads * value_dim]."""


class DenseKernels(Protocol[MatrixT]):
    """Makes the weights and segments of a model. One model at a time; its segments run in turn."""

    @property
    def dtype(self) -> torch.dtype:
        """Number format of activations and cache."""

    @property
    def device(self) -> torch.device:
        """Where the model runs."""

    @property
    def merges_gate_and_up(self) -> bool:
        """Whether the gate of an MLP and what it gates are made as one matrix of two parts."""

    def matrix(
        self,
        num_inputs: int,
        sizes: Sequence[int],
        *,
        has_bias: bool = False,
        role: MatrixRole = "layer",
        stored: Sequence[NumberFormat] = (),
        stack: MatrixStack | None = None,
    ) -> MatrixT:
        """Return a linear map of `len(sizes)` parts with uninitialised weights.

        Args:
            num_inputs: Inputs of the map.
            sizes: Outputs of each part.
            has_bias: Whether a bias is added.
            role: What it is for; see `MatrixRole`.
            stored: The number format of each part where a file has decided it; empty: the kernels decide.
            stack: Where it may lie among others of its shape; None: it is alone.
        """

    def adapted(
        self,
        matrices: Sequence[MatrixT],
        parts: Sequence[Sequence[AdaptedPart]],
        slots: AdapterSlots,
        *,
        of_wanted: bool,
    ) -> Sequence[MatrixT]:
        """Return matrices in the place of these, to whose products adapters add, and tell `slots`.

        Args:
            matrices: With the same inputs.
            parts: Of each.
            slots: What holds the adapters.
            of_wanted: Whether the matrices map the wanted tokens of a step alone.
        """

    def embedding(self, weights: EmbeddingWeights[MatrixT]) -> Embedding:
        """Join the weights, filled by now or later, to an embedding."""

    def segment(
        self,
        layer_end: LayerEnd[MatrixT] | None,
        norm: Norm | None,
        projection: MatrixT,
        head_norms: HeadNorms | None = None,
        *,
        is_post_norm: bool = False,
    ) -> Segment:
        """Join weights, filled by now or later, to a segment.

        Args:
            layer_end: The layer that ends here; None in the first segment and in the head.
            norm: Before the projection; None: there is none.
            projection: To the next layer's q, k and v, or to logits.
            head_norms: Behind the projection; None: there are none.
            is_post_norm: Whether what the norms before parts return is the residual stream from there on.
        """

    def last_segment(self, layer_end: LayerEnd[MatrixT], *, is_post_norm: bool = False) -> LastSegment:
        """Join the weights of the end of a layer behind which nothing is projected; `is_post_norm` as of `segment`."""

    def rotations(self, positions: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0) -> Rotation:
        """Return the rotary embedding of tokens at `positions`, [num_tokens].

        `frequencies` are [rotary_dim / 2] float32; cos and sin are multiplied by `factor`.
        """

    def joined_maps(self, num_heads: int, num_inputs: int, num_outputs: int) -> HeadMaps | None:
        """Return a linear map for each head, in no codes of a file; None: each is a matrix of its own."""

    def latent(self, weights: LatentWeights[MatrixT]) -> Latent:
        """Join weights, filled by now or later, to what is before and behind an attention on a latent cache."""

    def gate(self, values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return values * sigmoid(gates), both [num_tokens, size]; `values` may be written."""

    def scale_logits(self, logits: torch.Tensor, scale: float) -> torch.Tensor:
        """Return scale * logits, for logits in float32."""

    def cap_logits(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap * tanh(logits / cap), for logits in float32."""
