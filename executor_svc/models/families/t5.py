"""T5, Flan-T5 and mT5: an encoder and a decoder as of BART, with RMSNorm, no positions and biases of distances.

Scores are not scaled.

Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer".
"""

from dataclasses import replace

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.config import DistanceBuckets, LayerConfig, MlpConfig, ModelConfig, NormConfig, WeightNames
from executor_svc.models.families.common import ACTIVATIONS, attending_layers
from executor_svc.models.fields import ConfigFields
from octavo_shared.errors import ModelLoadError, UnsupportedModelError


def read_t5(fields: ConfigFields) -> ModelConfig:
    """Read a T5 config.json. There is no limit of positions; theirs is what the models were trained on."""
    fields.refuse({"is_encoder_decoder": True})
    return replace(_read_stack(fields, "decoder"), encoder=_read_stack(fields, "encoder"))


def read_mt5(fields: ConfigFields) -> ModelConfig:
    """Read an mT5 config.json: T5 that never scales what its head gets."""
    return replace(read_t5(fields), logit_scale=1.0)


def _read_stack(fields: ConfigFields, stack: str) -> ModelConfig:
    """Read the encoder or the decoder."""
    buckets, mlp = _read_buckets(fields, sees_later_tokens=stack == "encoder"), _read_mlp(fields)
    hidden_size, num_layers = fields.integer("d_model"), fields.integer("num_layers")
    num_heads, head_dim = fields.integer("num_heads"), fields.integer("d_kv", 64)
    if stack == "decoder":
        num_layers = fields.integer("num_decoder_layers", num_layers)
    own = LayerConfig(num_heads, num_heads, head_dim, AttentionLayer(1.0), None, mlp, distance_buckets=buckets)
    layers: list[LayerConfig] = []
    for number in range(num_layers):
        block = f"{stack}.block.{number}.layer"
        if stack == "encoder":
            layers.append(replace(own, names=_names(stack, f"{block}.0", "SelfAttention", f"{block}.1", mlp.is_gated)))
            continue
        first = replace(own, names=_names(stack, f"{block}.0", "SelfAttention", f"{block}.2", mlp.is_gated))
        layers += attending_layers(first, _names(stack, f"{block}.1", "EncDecAttention", f"{block}.2", mlp.is_gated))
    # Transformers 5 writes that they are tied whether or not they are, and whether outputs are scaled beside it.
    is_tied = fields.flag("tie_word_embeddings", True) and fields.flag("scale_decoder_outputs", True)
    return ModelConfig(
        source=fields.source,
        architecture=fields.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=fields.integer("n_positions", 512),
        layers=tuple(layers),
        norm=NormConfig(fields.number("layer_norm_epsilon", 1e-6)),
        names=WeightNames(embedding="shared", norm=f"{stack}.final_layer_norm"),
        tie_word_embeddings=is_tied or stack == "encoder",
        logit_scale=hidden_size**-0.5 if is_tied else 1.0,
    )


def _read_mlp(fields: ConfigFields) -> MlpConfig:
    kind = fields.values.get("feed_forward_proj") or "relu"
    name = str(kind).removeprefix("gated-")
    is_gated = name != kind
    # What T5 v1.1 calls gated-gelu is gated by its approximation.
    activation = "gelu_tanh" if kind == "gated-gelu" else ACTIVATIONS.get(name)
    if activation is None:
        supported = ", ".join(ACTIVATIONS)
        raise UnsupportedModelError(
            f"{fields.source} has feed_forward_proj {kind!r}; supported are {supported}, each also behind gated-"
        )
    return MlpConfig(fields.integer("d_ff"), activation, is_gated)


def _read_buckets(fields: ConfigFields, *, sees_later_tokens: bool) -> DistanceBuckets:
    num_buckets = fields.integer("relative_attention_num_buckets", 32)
    max_distance = fields.integer("relative_attention_max_distance", 128)
    if num_buckets % 4 or max_distance <= num_buckets // 2:
        raise ModelLoadError(
            f"{fields.source} has relative_attention_num_buckets {num_buckets} and relative_attention_max_distance "
            f"{max_distance}; there must be a multiple of 4 buckets, and more than half as many distances"
        )
    return DistanceBuckets(num_buckets, max_distance, sees_later_tokens)


def _names(stack: str, attention: str, kind: str, mlp: str, is_gated: bool) -> WeightNames:
    """Return the names of a layer by the modules of its attention and of its MLP."""
    query, key, value, output = (f"{attention}.{kind}.{part}" for part in ("q", "k", "v", "o"))
    return WeightNames(
        attention_norm=f"{attention}.layer_norm",
        qkv=(query, key, value),
        attention_output=output,
        distance_biases=f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias",  # of all layers
        mlp_norm=f"{mlp}.layer_norm",
        gate_up=tuple(f"{mlp}.DenseReluDense.{part}" for part in (("wi_0", "wi_1") if is_gated else ("wi",))),
        down=f"{mlp}.DenseReluDense.wo",
    )
