"""What the decoder needs to know of a model: shapes, kinds of its parts, names of its weights.

A family (`executor_svc/models/families/`) reads a config.json into it. Everything that would change the numbers is
a field here, or is refused by the family.
"""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.state_config import StateConfig

# "swiglu_oai" is the gated one of gpt-oss: x sigmoid(1.702 x) (y + 1), x at most 7 and y from -7 to 7.
# "relu2" is the square of "relu".
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai", "relu2"]

# What makes scores of a router's outputs: the softmax over all experts, or the sigmoid of each one.
Scoring = Literal["softmax", "sigmoid"]

# How one tensor holds q, k and v: "merged" is all queries, all keys, all values; "interleaved" is, head by head, a
# query, a key and a value.
QkvLayout = Literal["apart", "merged", "interleaved"]

# How the projections of a gated delta net are stored: "apart" is q, k and v in one tensor, z, b and a in one each; "by
# key head" is two tensors, q, k, v and z in one, b and a in the other, key head by key head.
DeltaNetLayout = Literal["apart", "by key head"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `scaling` None: plain frequencies."""

    theta: float
    scaling: "Llama3Scaling | LinearScaling | YarnScaling | FrequencyFactors | ProportionalScaling | None" = None
    # So many first dimensions of a head turn; None: all.
    rotary_dim: int | None = None
    # Multiplies cos and sin.
    attention_factor: float = 1.0
    # Longer sequences have other frequencies, from their first token on; None: they do not.
    max_positions: int | None = None
    # In a checkpoint pairs that turn are neighbours; else half of the rotary dimensions apart, as in the model.
    is_interleaved: bool = False
    # A query at position p is multiplied by 1 + query_growth * log(1 + p // query_interval): attention temperature
    # tuning, `llama_4_scaling_beta`. Source: Meta 2025, "Llama 4".
    query_growth: float = 0.0
    query_interval: int = 1


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Stretches the slow rotary frequencies, as Llama 3.1 does for contexts beyond its training."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Stretches all rotary frequencies alike."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Stretches the slow rotary frequencies. Source: Peng et al. 2023, "YaRN".

    `beta_fast` and `beta_slow` are turns within the original context: above the one a frequency stays, below the other
    it is stretched by `factor`. `truncate`: between them are whole pairs of dimensions.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    truncate: bool


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Stretches each rotary frequency by a factor of its own, [rotary_dim / 2].

    GGUF files have them for Llama 3.1, longrope has them for sequences of the original length.
    """

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the fastest frequencies of a head turn, so many pairs of its dimensions; the others stand still."""

    num_pairs: int


@dataclass(frozen=True, slots=True)
class NormConfig:
    """All norms of a model: RMSNorm, or LayerNorm with or without a bias."""

    epsilon: float
    is_layer_norm: bool = False
    has_bias: bool = False
    # Checkpoints of Gemma hold the weight less 1.
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """down(activation(gate(x)) * up(x)) if gated, else down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts, each an MLP; the scores of the experts that the router chooses for a token weigh them."""

    num_experts: int
    num_chosen: int
    # Whether the weights of the chosen experts are scaled to a sum of 1.
    is_normalized: bool
    mlp: MlpConfig  # of each
    has_router_bias: bool = False
    scoring: Scoring = "softmax"
    # A bias is added to the scores for the choice, and not in the weights. Source: Wang et al. 2024,
    # "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts".
    has_correction_bias: bool = False
    # Added to the sum that scales the weights to 1.
    sum_epsilon: float = 0.0
    # Multiplies the weights at last.
    scale: float = 1.0
    # Experts are chosen in so many of equal groups, those whose best scores for the choice are highest: of softmax the
    # best one of a group, of sigmoids the sum of two. Source: DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3".
    num_groups: int = 1
    num_chosen_groups: int = 1
    # An expert that every token goes to; None: there is none.
    shared: MlpConfig | None = None
    has_shared_gate: bool = True  # that one is weighed by the sigmoid of a gate of its own
    has_expert_scales: bool = False  # the weight of each expert has a factor
    has_norms: bool = False  # see `ExpertNorms` of dense.py; there is a shared one


def activation_of(mlp: MlpConfig | ExpertsConfig) -> Activation:
    """Return the activation of an MLP, or of experts."""
    return (mlp.mlp if isinstance(mlp, ExpertsConfig) else mlp).activation


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (MLA): the cache has one vector of each token, for all heads.

    The vector is the rotary part of a key, which all heads share, then the latent. Each head makes the rest of its key
    of the latent, and its value. Source: DeepSeek-AI 2024, "DeepSeek-V2".
    """

    rank: int  # numbers of the latent
    rotary_dim: int
    key_dim: int  # of a head's key beside those
    value_dim: int
    query_rank: int | None = None  # queries are made of a normed vector of so many; None: of the hidden state
    # The maps to keys and values are tensors of their own, that of keys transposed, as in GGUF files.
    has_maps_apart: bool = False

    @property
    def vector_dim(self) -> int:
        """Numbers of a vector of the cache."""
        return self.rotary_dim + self.rank


@dataclass(frozen=True, slots=True)
class DistanceBuckets:
    """Buckets of the distances of tokens, each with a bias of each head: near ones apart, far ones by their logarithm.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer".
    """

    num_buckets: int
    max_distance: int
    sees_later_tokens: bool  # half of the buckets are of these

    @property
    def of_distances(self) -> list[int]:
        """The bucket of each distance to a token before, from 0 or `-max_distance` to `max_distance`."""
        num_buckets = self.num_buckets // 2 if self.sees_later_tokens else self.num_buckets
        num_exact = num_buckets // 2
        distances = torch.arange(self.max_distance + 1)
        # In float32, as the models were trained.
        logarithms = torch.log(distances.float() / num_exact) / math.log(self.max_distance / num_exact)
        far = (num_exact + (logarithms * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
        buckets: list[int] = torch.where(distances < num_exact, distances, far).tolist()
        later = [num_buckets + bucket for bucket in buckets[:0:-1]] if self.sees_later_tokens else []
        return later + buckets


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """A layer: attention, a state or neither, which mix tokens; then an MLP, experts or neither."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: AttentionLayer
    rope: RopeConfig | None  # None: positions enter elsewhere
    mlp: MlpConfig | ExpertsConfig | None
    attends: bool = True
    has_sinks: bool = False  # see `AttentionLayer.sinks`
    distance_buckets: DistanceBuckets | None = None  # of `AttentionLayer.distance_biases`; None: it has none
    state: StateConfig | None = None  # a layer with one does not attend
    # What is attended is multiplied by the sigmoid of a gate, number by number.
    has_output_gate: bool = False
    keys_are_values: bool = False  # before both are normed and keys are rotated
    # Heads attend on the vectors of the cache, one KV head of that size; None: on keys and values.
    latent: LatentConfig | None = None
    cache_of: int | None = None  # the layer before whose keys and values it reads; None: it has its own
    # Its keys and values are made of what the encoder returns, not of the tokens of a step, which have queries alone.
    attends_to_encoder: bool = False
    names: "WeightNames | None" = field(default=None, compare=False)  # its own; None: those of the model

    @property
    def has_mixer(self) -> bool:
        """Whether it mixes tokens; the first layer does."""
        return self.attends or self.state is not None

    @property
    def value_begin(self) -> int:
        """Where a value begins in a key; 0: they lie apart in the cache."""
        return 0 if self.latent is None else self.latent.rotary_dim


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of tensors without `.weight` and `.bias`; `{layer}` and `{expert}` are numbers. Defaults: Llama."""

    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    position_embedding: str = ""
    attention_norm: str = "model.layers.{layer}.input_layernorm"  # empty: there is none
    qkv: tuple[str, ...] = (
        "model.layers.{layer}.self_attn.q_proj",
        "model.layers.{layer}.self_attn.k_proj",
        "model.layers.{layer}.self_attn.v_proj",
    )
    qkv_layout: QkvLayout = "apart"
    query_norm: str = "model.layers.{layer}.self_attn.q_norm"
    key_norm: str = "model.layers.{layer}.self_attn.k_norm"
    # Of a latent cache: to the vector that queries are made of, its norm, from there to queries; to the vector of the
    # cache, the norm of its latent, from there to keys and values.
    query_vector: str = "model.layers.{layer}.self_attn.q_a_proj"
    query_vector_norm: str = "model.layers.{layer}.self_attn.q_a_layernorm"
    queries: str = "model.layers.{layer}.self_attn.q_b_proj"
    latent: str = "model.layers.{layer}.self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "model.layers.{layer}.self_attn.kv_a_layernorm"
    latent_maps: str = "model.layers.{layer}.self_attn.kv_b_proj"
    latent_maps_apart: tuple[str, str] = (
        "model.layers.{layer}.self_attn.k_b_proj",
        "model.layers.{layer}.self_attn.v_b_proj",
    )
    attention_output: str = "model.layers.{layer}.self_attn.o_proj"
    attention_output_norm: str = ""
    sinks: str = "model.layers.{layer}.self_attn.sinks"  # without a suffix
    distance_biases: str = ""  # of each bucket
    state: str = "model.layers.{layer}.linear_attn"  # the module of all tensors of a layer with a state
    delta_net_layout: DeltaNetLayout = "apart"
    mlp_norm: str = "model.layers.{layer}.post_attention_layernorm"
    router: str = "model.layers.{layer}.mlp.gate"
    correction_bias: str = "model.layers.{layer}.mlp.gate.e_score_correction_bias"  # without a suffix
    # Gate, then up; one name: one tensor holds both, in this order; without a gate: up alone.
    gate_up: tuple[str, ...] = ("model.layers.{layer}.mlp.gate_proj", "model.layers.{layer}.mlp.up_proj")
    down: str = "model.layers.{layer}.mlp.down_proj"
    # The same of experts.
    expert_gate_up: tuple[str, ...] = (
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj",
    )
    expert_down: str = "model.layers.{layer}.mlp.experts.{expert}.down_proj"
    # Of the shared one.
    shared_gate_up: tuple[str, ...] = (
        "model.layers.{layer}.mlp.shared_expert.gate_proj",
        "model.layers.{layer}.mlp.shared_expert.up_proj",
    )
    shared_down: str = "model.layers.{layer}.mlp.shared_expert.down_proj"
    shared_gate: str = "model.layers.{layer}.mlp.shared_expert_gate"
    # Of experts with norms; the first and the last have no suffix.
    router_norm: str = "model.layers.{layer}.router.scale"
    expert_norm: str = "model.layers.{layer}.pre_feedforward_layernorm_2"
    expert_output_norm: str = "model.layers.{layer}.post_feedforward_layernorm_2"
    shared_output_norm: str = "model.layers.{layer}.post_feedforward_layernorm_1"
    expert_scales: str = "model.layers.{layer}.router.per_expert_scale"
    mlp_output_norm: str = ""
    # Of what tokens have for each layer.
    per_layer_tokens: str = "model.embed_tokens_per_layer"
    per_layer_embedding_projection: str = "model.per_layer_model_projection"
    per_layer_embedding_norm: str = "model.per_layer_projection_norm"
    per_layer_gate: str = "model.layers.{layer}.per_layer_input_gate"
    per_layer_projection: str = "model.layers.{layer}.per_layer_projection"
    per_layer_norm: str = "model.layers.{layer}.post_per_layer_input_norm"
    layer_scale: str = "model.layers.{layer}.layer_scalar"  # without a suffix
    norm: str = "model.norm"
    head: str = "lm_head"
    logits_bias: str = "final_logits_bias"  # without a suffix
    # Of a head that drafts: its projection of the embedding of a token and the hidden state before it, and their norms.
    mtp_projection: str = "mtp.fc"
    mtp_embedding_norm: str = "mtp.pre_fc_norm_embedding"
    mtp_hidden_norm: str = "mtp.pre_fc_norm_hidden"
    # What some checkpoints leave out at the front of every name.
    optional_prefix: str = ""

    def of_mtp(self) -> "WeightNames":
        """Return the names of the head that drafts; embedding and head are the model's."""

        def renamed(name: Any) -> Any:
            if isinstance(name, tuple):
                return tuple(map(renamed, name))
            return f"mtp.{name.removeprefix('model.')}" if name.startswith("model.") else name

        own = {field.name: renamed(getattr(self, field.name)) for field in fields(self)}
        return WeightNames(**{**own, "embedding": self.embedding, "optional_prefix": self.optional_prefix})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder; names as in transformers' configurations where they have them."""

    source: Path  # the file, for error messages
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    names: WeightNames
    tie_word_embeddings: bool = False
    # False: it is stored as an embedder, and its own head is unknown; that it has is the embedding, and not used.
    has_head: bool = True
    qkv_bias: bool = False
    attention_output_bias: bool = False
    # Each query and key head is normed before it is rotated.
    has_query_key_norm: bool = False
    has_value_norm: bool = False  # each value head is normed too, without a weight
    # The outputs of attention and MLP are normed before they join the residual stream.
    has_output_norms: bool = False
    has_embedding_norm: bool = False
    embedding_scale: float = 1.0
    # Rows of the position embedding that come before position 0; None: there is no position embedding.
    position_offset: int | None = None
    has_sinusoidal_positions: bool = False  # it is computed, and no weight
    # What a norm before a part of a layer returns is the residual stream from there on.
    is_post_norm: bool = False
    # Multiplies what attention, state and MLP add to the residual stream.
    residual_scale: float = 1.0
    # Numbers that a token has for each layer; 0: none. See `PerLayer` of dense.py.
    per_layer_size: int = 0
    has_layer_scales: bool = False  # each layer ends with a factor of the residual stream
    logit_scale: float = 1.0
    # Logits become cap * tanh(logit / cap), behind the scale.
    logit_soft_cap: float | None = None
    has_logits_bias: bool = False  # added to the logits
    # Layers of a checkpoint behind these, which predict further tokens and are not read.
    num_further_layers: int = 0
    # The layer of a head that drafts (multi-token prediction, MTP), as checkpoints may have it; None: they have none.
    mtp: LayerConfig | None = None
    uses_mtp: bool = False
    # What computes the input that layers with `attends_to_encoder` attend to, with the same embedding of tokens.
    encoder: "ModelConfig | None" = None

    def with_layers(self, **changes: Any) -> "ModelConfig":
        """Return the same with other values in all layers."""
        return replace(self, layers=tuple(replace(layer, **changes) for layer in self.layers))

    def of_mtp(self) -> "ModelConfig":
        """Return the head that drafts, as a decoder of one layer.

        Beside each token it takes the hidden state before it, so it begins with the second token of a sequence.
        """
        assert self.mtp is not None, "it has one"
        layer = replace(self.mtp, attention=replace(self.mtp.attention, first_position=1))
        return replace(self, layers=(layer,), names=self.names.of_mtp(), mtp=None, uses_mtp=False)

    def names_of(self, index: int) -> WeightNames:
        """Return the names of the tensors of a layer."""
        return self.layers[index].names or self.names

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest sequence for which the rotary embeddings hold; None: they always do."""
        return min(
            (each.rope.max_positions for each in self.layers if each.rope and each.rope.max_positions), default=None
        )
