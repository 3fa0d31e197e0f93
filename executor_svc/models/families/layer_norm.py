"""BLOOM, MPT and OPT: LayerNorm, a plain MLP, as many KV heads as attention heads, and no rotary embedding.

Sources: BigScience Workshop 2022, "BLOOM"; MosaicML 2023, "Introducing MPT-7B"; Zhang et al. 2022, "OPT: Open
Pre-trained Transformer Language Models".
"""

from typing import Any

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.config import LayerConfig, MlpConfig, ModelConfig, NormConfig, WeightNames
from executor_svc.models.families.common import alibi_slopes, read_activation
from executor_svc.models.fields import ConfigFields

_BLOOM = "transformer.h.{layer}"
_BLOOM_NAMES = WeightNames(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    attention_norm=f"{_BLOOM}.input_layernorm",
    qkv=(f"{_BLOOM}.self_attention.query_key_value",),
    qkv_layout="interleaved",
    attention_output=f"{_BLOOM}.self_attention.dense",
    mlp_norm=f"{_BLOOM}.post_attention_layernorm",
    gate_up=(f"{_BLOOM}.mlp.dense_h_to_4h",),
    down=f"{_BLOOM}.mlp.dense_4h_to_h",
    norm="transformer.ln_f",
    optional_prefix="transformer.",  # bigscience's own checkpoints are without
)
_MPT = "transformer.blocks.{layer}"
_MPT_NAMES = WeightNames(
    embedding="transformer.wte",
    attention_norm=f"{_MPT}.norm_1",
    qkv=(f"{_MPT}.attn.Wqkv",),
    qkv_layout="merged",
    attention_output=f"{_MPT}.attn.out_proj",
    mlp_norm=f"{_MPT}.norm_2",
    gate_up=(f"{_MPT}.ffn.up_proj",),
    down=f"{_MPT}.ffn.down_proj",
    norm="transformer.norm_f",
)
_OPT = "model.decoder.layers.{layer}"
_OPT_NAMES = WeightNames(
    embedding="model.decoder.embed_tokens",
    position_embedding="model.decoder.embed_positions",
    attention_norm=f"{_OPT}.self_attn_layer_norm",
    qkv=(f"{_OPT}.self_attn.q_proj", f"{_OPT}.self_attn.k_proj", f"{_OPT}.self_attn.v_proj"),
    attention_output=f"{_OPT}.self_attn.out_proj",
    mlp_norm=f"{_OPT}.final_layer_norm",
    gate_up=(f"{_OPT}.fc1",),
    down=f"{_OPT}.fc2",
    norm="model.decoder.final_layer_norm",
)
# The position embedding of OPT starts with two rows for padding.
_POSITION_OFFSET = 2


def read_bloom(fields: ConfigFields) -> ModelConfig:
    """Read a BLOOM config.json: ALiBi, a norm behind the embedding, q, k and v of a head side by side."""
    fields.refuse({"apply_residual_connection_post_layernorm": False})
    hidden_size = fields.integer("hidden_size", fields.optional_integer("n_embed"))
    num_heads = fields.integer("n_head", fields.optional_integer("num_attention_heads"))
    num_layers = fields.integer("n_layer", fields.optional_integer("num_hidden_layers"))
    return _read_decoder(
        fields,
        (hidden_size, num_heads, num_layers),
        AttentionLayer(_scale(hidden_size, num_heads), alibi_slopes=alibi_slopes(num_heads)),
        # ALiBi has no limit; this is what the models were trained on.
        max_position_embeddings=fields.integer("seq_length", 2048),
        norm=NormConfig(fields.number("layer_norm_epsilon", 1e-5), is_layer_norm=True, has_bias=True),
        mlp=MlpConfig(4 * hidden_size, "gelu_tanh", is_gated=False, has_bias=True),
        names=_BLOOM_NAMES,
        qkv_bias=True,
        attention_output_bias=True,
        has_embedding_norm=True,
    )


def read_mpt(fields: ConfigFields) -> ModelConfig:
    """Read an MPT config.json: ALiBi, no biases. `learned_pos_emb` is often true and means nothing beside ALiBi."""
    fields.refuse({"expansion_ratio": 4, "no_bias": True, "logit_scale": None, "norm_type": "low_precision_layernorm"})
    hidden_size, num_heads = fields.integer("d_model", 2048), fields.integer("n_heads", 16)
    return _read_decoder(
        fields,
        (hidden_size, num_heads, fields.integer("n_layers", 24)),
        _read_mpt_attention(fields, hidden_size, num_heads),
        max_position_embeddings=fields.integer("max_seq_len", 2048),
        norm=NormConfig(fields.number("layer_norm_epsilon", 1e-5), is_layer_norm=True),
        mlp=MlpConfig(4 * hidden_size, "gelu", is_gated=False),
        names=_MPT_NAMES,
    )


def read_opt(fields: ConfigFields) -> ModelConfig:
    """Read the config.json of an OPT model with norms before each part (all but OPT-350m): learned positions."""
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    fields.refuse(
        {
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
            "word_embed_proj_dim": hidden_size,
        }
    )
    has_bias = fields.flag("enable_bias", True)
    return _read_decoder(
        fields,
        (hidden_size, num_heads, fields.integer("num_hidden_layers")),
        AttentionLayer(_scale(hidden_size, num_heads)),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        norm=NormConfig(epsilon=1e-5, is_layer_norm=True, has_bias=True),
        mlp=MlpConfig(fields.integer("ffn_dim"), read_activation(fields, "relu"), is_gated=False, has_bias=has_bias),
        names=_OPT_NAMES,
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
        position_offset=_POSITION_OFFSET,
    )


def _read_decoder(
    fields: ConfigFields, sizes: tuple[int, int, int], attention: AttentionLayer, mlp: MlpConfig, **others: Any
) -> ModelConfig:
    """Read what the three share; `sizes` are the hidden size, the number of heads and the number of layers."""
    hidden_size, num_heads, num_layers = sizes
    head_dim = max(1, hidden_size // num_heads)
    return ModelConfig(
        source=fields.source,
        architecture=fields.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=(LayerConfig(num_heads, num_heads, head_dim, attention, rope=None, mlp=mlp),) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        **others,
    )


def _scale(hidden_size: int, num_heads: int) -> float:
    head_dim = max(1, hidden_size // num_heads)
    return float(head_dim**-0.5)


def _read_mpt_attention(fields: ConfigFields, hidden_size: int, num_heads: int) -> AttentionLayer:
    attention = fields.nested("attn_config")
    attention.refuse(
        {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": None,
            "prefix_lm": False,
            "qk_ln": False,
        }
    )
    scale = attention.optional_number("softmax_scale") or _scale(hidden_size, num_heads)
    return AttentionLayer(scale, alibi_slopes=alibi_slopes(num_heads))
