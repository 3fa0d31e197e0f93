"""What most families share, under the names that transformers' configurations give it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.config import (
    Activation,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    WeightNames,
)
from executor_svc.models.fields import ConfigFields
from executor_svc.models.rotary_embedding import read_rope
from executor_svc.models.state_config import Mamba2Config
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError, UnsupportedModelError

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def read_decoder(
    fields: ConfigFields,
    *,
    activation: Activation = "silu",
    is_tied: bool = False,
    windows: Sequence[int | None] | None = None,
    has_partial_rotary: bool = False,
) -> ModelConfig:
    """Read a decoder with RMSNorm, rotary embedding and a gated MLP; families replace what they do otherwise.

    Args:
        fields: config.json.
        activation: Of the MLP where config.json is silent.
        is_tied: Whether the head is the embedding where config.json is silent.
        windows: Sliding window of each layer in tokens; None: all see everything.
        has_partial_rotary: Whether `partial_rotary_factor` counts; transformers' code of most families rotates all.
    """
    num_layers, hidden_size = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise ModelLoadError(f"{fields.source} has head_dim {head_dim}; rotary embedding requires an even one")
    num_kv_heads = read_kv_heads(fields, num_heads)
    max_position_embeddings = fields.integer("max_position_embeddings", 2048)
    mlp = MlpConfig(fields.integer("intermediate_size"), read_activation(fields, activation))
    rope = read_rope(fields, head_dim, max_position_embeddings, has_partial_rotary=has_partial_rotary)
    return ModelConfig(
        source=fields.source,
        architecture=fields.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=max_position_embeddings,
        layers=tuple(
            LayerConfig(num_heads, num_kv_heads, head_dim, AttentionLayer(head_dim**-0.5, window), rope, mlp)
            for window in windows or [None] * num_layers
        ),
        norm=NormConfig(fields.number("rms_norm_eps", 1e-6)),
        names=WeightNames(),
        tie_word_embeddings=fields.flag("tie_word_embeddings", is_tied),
    )


def with_interleaved_rotary(config: ModelConfig) -> ModelConfig:
    """Return a decoder whose checkpoints have members of pairs that turn as neighbours."""
    layers = (
        layer if layer.rope is None else replace(layer, rope=replace(layer.rope, is_interleaved=True))
        for layer in config.layers
    )
    return replace(config, layers=tuple(layers))


def mlp_of(config: ModelConfig) -> MlpConfig:
    """Return the MLP of a decoder as `read_decoder` reads it, the same in all layers."""
    mlp = config.layers[0].mlp
    assert isinstance(mlp, MlpConfig), "experts come later"
    return mlp


def read_experts(
    fields: ConfigFields,
    size_name: str,
    mlp: MlpConfig,
    *,
    is_normalized: bool,
    chosen_name: str = "num_experts_per_tok",
) -> ExpertsConfig:
    """Read how many experts there are, and how many a token goes to, by the names that the family has for it."""
    num_experts, num_chosen = fields.integer(size_name), fields.integer(chosen_name)
    if num_chosen > num_experts:
        raise ModelLoadError(f"{fields.source} selects {num_chosen} of {num_experts} experts")
    return ExpertsConfig(num_experts, num_chosen, is_normalized, mlp)


def read_sigmoid_experts(fields: ConfigFields, size_name: str, mlp: MlpConfig, shared_size: int) -> ExpertsConfig:
    """Read experts chosen by sigmoids with a bias, beside one without a gate that takes every token, as DeepSeek-V3's.

    Args:
        fields: config.json.
        size_name: What the family calls the number of experts.
        mlp: One of them.
        shared_size: Size of the one for every token.
    """
    experts = replace(
        read_experts(fields, size_name, mlp, is_normalized=fields.flag("norm_topk_prob", True)),
        scoring="sigmoid",
        has_correction_bias=True,
        sum_epsilon=1e-20,  # in transformers' code
        scale=fields.number("routed_scaling_factor", 1.0),
        shared=replace(mlp, intermediate_size=shared_size),
        has_shared_gate=False,
    )
    return read_groups(fields, experts)


def read_groups(fields: ConfigFields, experts: ExpertsConfig) -> ExpertsConfig:
    """Read of which groups a token's experts are chosen."""
    num_groups, num_chosen = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    size = experts.num_experts // num_groups
    least = max(2 if experts.scoring == "sigmoid" and num_groups > 1 else 1, -(-experts.num_chosen // num_chosen))
    if num_groups * size != experts.num_experts or num_chosen > num_groups or size < least:
        raise ModelLoadError(
            f"{fields.source} has n_group {num_groups} and topk_group {num_chosen}, but chooses {experts.num_chosen} "
            f"of {experts.num_experts} experts; groups must be equal, of at least {least}, and no fewer than chosen"
        )
    return replace(experts, num_groups=num_groups, num_chosen_groups=num_chosen)


def with_experts_behind(config: ModelConfig, first: int, experts: ExpertsConfig) -> ModelConfig:
    """Return a decoder with experts in all layers but the first ones."""
    layers = (layer if index < first else replace(layer, mlp=experts) for index, layer in enumerate(config.layers))
    return replace(config, layers=tuple(layers))


def with_experts(config: ModelConfig, fields: ConfigFields, experts: ExpertsConfig) -> ModelConfig:
    """Return a decoder of Qwen with experts in every layer, but those that config.json names."""
    step, without = fields.integer("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(isinstance(layer, int) for layer in without):
        raise ModelLoadError(f"{fields.source} has mlp_only_layers {shown(repr(without))}; it must be a list of layers")
    layers = (
        replace(layer, mlp=layer.mlp if index in without or (index + 1) % step else experts)
        for index, layer in enumerate(config.layers)
    )
    return replace(config, layers=tuple(layers))


def read_kv_heads(fields: ConfigFields, num_attention_heads: int) -> int:
    """Read the number of KV heads, which divides the number of attention heads."""
    num_kv_heads = fields.integer("num_key_value_heads", num_attention_heads)
    if num_attention_heads % num_kv_heads:
        raise ModelLoadError(
            f"{fields.source} has {num_attention_heads} attention heads, not a multiple of {num_kv_heads} KV heads"
        )
    return num_kv_heads


def read_activation(fields: ConfigFields, default: Activation) -> Activation:
    """Read the MLP's activation, whichever of its names config.json uses."""
    for name in ("hidden_activation", "hidden_act", "activation_function"):
        value = fields.values.get(name)
        if value is not None:
            if not isinstance(value, str) or value not in ACTIVATIONS:
                supported = ", ".join(ACTIVATIONS)
                raise UnsupportedModelError(f"{fields.source} has {name} {value!r}; supported are {supported}")
            return ACTIVATIONS[value]
    return default


def read_windows(fields: ConfigFields, window: int | None, is_windowed_by_default: Sequence[bool]) -> list[int | None]:
    """Return the window of each layer by `layer_types`.

    Args:
        fields: config.json.
        window: Size of a window in tokens; None: there is none.
        is_windowed_by_default: Which layers have it where config.json does not say so, [num_layers].
    """
    layer_types = fields.values.get("layer_types")
    if layer_types is None:
        return [window if is_windowed else None for is_windowed in is_windowed_by_default]
    kinds = {"full_attention": None, "sliding_attention": window}
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) and kind in kinds for kind in layer_types):
        supported = " and ".join(kinds)
        raise UnsupportedModelError(f"{fields.source} has layer_types {layer_types!r}; supported are {supported}")
    if len(layer_types) != len(is_windowed_by_default):
        raise ModelLoadError(
            f"{fields.source} has {len(layer_types)} layer_types for {len(is_windowed_by_default)} layers"
        )
    return [kinds[kind] for kind in layer_types]


def read_layer_types(fields: ConfigFields, of_states: str, attends_by_default: Sequence[bool]) -> list[str]:
    """Read the kind of each layer of a hybrid: `of_states` or "full_attention".

    Args:
        fields: config.json.
        of_states: What the family calls a layer with a state.
        attends_by_default: Which layers attend where config.json does not say so, [num_layers].
    """
    kinds, found = (of_states, "full_attention"), fields.values.get("layer_types")
    if found is None:
        found = [kinds[attends] for attends in attends_by_default]
    if not isinstance(found, list) or not all(kind in kinds for kind in found) or kinds[1] not in found:
        raise UnsupportedModelError(
            f"{fields.source} has layer_types {found!r}; supported are {' and '.join(kinds)}, the latter at least once"
        )
    if len(found) != len(attends_by_default):
        raise ModelLoadError(f"{fields.source} has {len(found)} layer_types for {len(attends_by_default)} layers")
    return found


def checked_mamba2(fields: ConfigFields, mamba: Mamba2Config) -> Mamba2Config:
    """Return what a family has read. Raises: ModelLoadError: it has parts of groups, or bounds for time steps."""
    limits = fields.values.get("time_step_limit")
    # Zero and infinity, which JSON does not have: transformers writes it as an object.
    if limits not in (None, [0, math.inf], [0, {"__float__": "Infinity"}]):
        raise UnsupportedModelError(f"{fields.source} has time_step_limit {limits!r}, which is not supported")
    if mamba.num_heads % mamba.num_groups:
        raise ModelLoadError(
            f"{fields.source} has {mamba.num_heads} heads in a Mamba-2 layer, "
            f"not a multiple of {mamba.num_groups} groups"
        )
    return mamba


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head: 2 ** (-8 i / n) for a power of two n, with slopes of 2 n between for the rest.

    Source: Press et al. 2021, "Train Short, Test Long".
    """
    closest = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / closest) for i in range(1, closest + 1)]
    slopes += [2 ** (-4 * i / closest) for i in range(1, 2 * (num_heads - closest), 2)]
    return tuple(slopes)


def attending_layers(layer: LayerConfig, names: WeightNames) -> list[LayerConfig]:
    """Return a layer of a decoder that attends to an encoder, as the two of `ModelConfig`.

    First is attention among the tokens alone, then, with these names, attention to the encoder's input and the MLP.
    """
    to_encoder = replace(
        layer,
        attention=replace(layer.attention, reads_only=True),
        distance_buckets=None,
        attends_to_encoder=True,
        names=names,
    )
    return [replace(layer, mlp=None), to_encoder]
