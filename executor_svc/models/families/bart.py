"""BART, mBART, Pegasus and Marian: an encoder, and a decoder whose layers attend to what it returns.

Sources: Lewis et al. 2019, "BART"; Liu et al. 2020, "Multilingual Denoising Pre-training for Neural Machine
Translation"; Junczys-Dowmunt et al. 2018, "Marian".
"""

from dataclasses import replace
from typing import Final

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.config import LayerConfig, MlpConfig, ModelConfig, NormConfig, WeightNames
from executor_svc.models.families.common import attending_layers, read_activation
from executor_svc.models.fields import ConfigFields
from octavo_shared.errors import ModelLoadError

# Position embeddings of BART start with two rows for padding.
_POSITION_OFFSET: Final = 2
_HAVE_ENCODER: Final = {"is_encoder_decoder": True, "tie_word_embeddings": True}


def read_bart(fields: ConfigFields) -> ModelConfig:
    """Read a BART config.json: norms behind each part, one behind the embedding, learned positions."""
    return _read(fields, is_post_norm=True, has_embedding_norm=True, position_offset=_POSITION_OFFSET)


def read_mbart(fields: ConfigFields) -> ModelConfig:
    """Read an mBART config.json: BART with norms before each part and behind the last one."""
    return _read(fields, is_post_norm=False, has_embedding_norm=True, position_offset=_POSITION_OFFSET)


def read_pegasus(fields: ConfigFields) -> ModelConfig:
    """Read a Pegasus config.json: mBART with computed positions and no norm behind the embedding."""
    fields.refuse({"static_position_embeddings": True})
    return _read(fields, is_post_norm=False, has_embedding_norm=False, position_offset=None)


def read_marian(fields: ConfigFields) -> ModelConfig:
    """Read a Marian config.json: BART with computed positions and no norm behind the embedding."""
    fields.refuse(
        {
            "share_encoder_decoder_embeddings": True,
            "decoder_vocab_size": fields.integer("vocab_size"),
            "static_position_embeddings": True,
        }
    )
    return _read(fields, is_post_norm=True, has_embedding_norm=False, position_offset=None)


def _read(
    fields: ConfigFields, *, is_post_norm: bool, has_embedding_norm: bool, position_offset: int | None
) -> ModelConfig:
    fields.refuse(_HAVE_ENCODER)
    encoder = _read_stack(fields, "encoder", is_post_norm, has_embedding_norm, position_offset)
    decoder = _read_stack(fields, "decoder", is_post_norm, has_embedding_norm, position_offset)
    return replace(decoder, encoder=encoder)


def _read_stack(
    fields: ConfigFields, stack: str, is_post_norm: bool, has_embedding_norm: bool, position_offset: int | None
) -> ModelConfig:
    """Read the encoder or the decoder."""
    hidden_size = fields.integer("d_model")
    num_heads, num_layers = fields.integer(f"{stack}_attention_heads"), fields.integer(f"{stack}_layers")
    if hidden_size % num_heads:
        raise ModelLoadError(
            f"{fields.source} has d_model {hidden_size}, which {num_heads} {stack}_attention_heads do not divide"
        )
    head_dim = hidden_size // num_heads
    mlp = MlpConfig(fields.integer(f"{stack}_ffn_dim"), read_activation(fields, "gelu"), is_gated=False, has_bias=True)
    attention = AttentionLayer(float(head_dim**-0.5))
    prefix, layers, behind = f"model.{stack}", [], ""
    for number in range(num_layers):
        layer = f"{prefix}.layers.{number}"
        norms = [f"{layer}.self_attn_layer_norm", f"{layer}.encoder_attn_layer_norm", f"{layer}.final_layer_norm"]
        if stack == "encoder":
            del norms[1]
        before = [behind, *norms[:-1]] if is_post_norm else norms
        behind = norms[-1]
        own = LayerConfig(
            num_heads, num_heads, head_dim, attention, None, mlp, names=_names(layer, "self_attn", before)
        )
        if stack == "encoder":
            layers.append(own)
            continue
        layers += attending_layers(own, _names(layer, "encoder_attn", before[1:]))
    return ModelConfig(
        source=fields.source,
        architecture=fields.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=fields.integer("max_position_embeddings", 1024),
        layers=tuple(layers),
        norm=NormConfig(1e-5, is_layer_norm=True, has_bias=True),
        names=WeightNames(
            embedding="model.shared",
            embedding_norm=f"{prefix}.layernorm_embedding",
            position_embedding=f"{prefix}.embed_positions",
            norm=behind if is_post_norm else f"{prefix}.layer_norm",
        ),
        tie_word_embeddings=True,
        qkv_bias=True,
        attention_output_bias=True,
        has_embedding_norm=has_embedding_norm,
        embedding_scale=hidden_size**0.5 if fields.flag("scale_embedding") else 1.0,
        position_offset=position_offset,
        has_sinusoidal_positions=position_offset is None,
        is_post_norm=is_post_norm,
        has_logits_bias=stack == "decoder",
    )


def _names(layer: str, attention: str, before: list[str]) -> WeightNames:
    """Return the names of a layer with the norms before its attention and, as the last one, before its MLP."""
    query, key, value, output = (f"{layer}.{attention}.{part}_proj" for part in ("q", "k", "v", "out"))
    return WeightNames(
        attention_norm=before[0],
        qkv=(query, key, value),
        attention_output=output,
        mlp_norm=before[-1],
        gate_up=(f"{layer}.fc1",),
        down=f"{layer}.fc2",
    )
