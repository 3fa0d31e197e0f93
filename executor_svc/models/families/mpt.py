"""MPT: ALiBi in place of positions, LayerNorm, q, k and v in one tensor, a plain MLP with GELU, no biases.

Source: MosaicML 2023, "Introducing MPT-7B"; the slopes: Press et al. 2021, "Train Short, Test Long".
"""

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.config import LayerConfig, MlpConfig, ModelConfig, NormConfig, WeightNames
from executor_svc.models.families.common import alibi_slopes
from executor_svc.models.fields import ConfigFields

_LAYER = "transformer.blocks.{layer}"
_NAMES = WeightNames(
    embedding="transformer.wte",
    attention_norm=f"{_LAYER}.norm_1",
    qkv=(f"{_LAYER}.attn.Wqkv",),
    qkv_layout="merged",
    attention_output=f"{_LAYER}.attn.out_proj",
    mlp_norm=f"{_LAYER}.norm_2",
    gate_up=(f"{_LAYER}.ffn.up_proj",),
    down=f"{_LAYER}.ffn.down_proj",
    norm="transformer.norm_f",
)


def read_mpt(fields: ConfigFields) -> ModelConfig:
    """Read an MPT config.json. `learned_pos_emb` is often true and means nothing beside ALiBi."""
    fields.refuse(
        {
            "expansion_ratio": 4,
            "no_bias": True,
            "logit_scale": None,
            "norm_type": "low_precision_layernorm",
        }
    )
    hidden_size, num_heads = fields.integer("d_model", 2048), fields.integer("n_heads", 16)
    head_dim = max(1, hidden_size // num_heads)
    attention = _read_attention(fields, num_heads, head_dim)
    return ModelConfig(
        source=fields.source,
        architecture=fields.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_seq_len", 2048),
        layers=(LayerConfig(attention, rope=None),) * fields.integer("n_layers", 24),
        norm=NormConfig(fields.number("layer_norm_epsilon", 1e-5), is_layer_norm=True),
        mlp=MlpConfig(4 * hidden_size, "gelu", is_gated=False),
        names=_NAMES,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _read_attention(fields: ConfigFields, num_heads: int, head_dim: int) -> AttentionLayer:
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
    scale = attention.optional_number("softmax_scale") or head_dim**-0.5
    return AttentionLayer(scale, alibi_slopes=alibi_slopes(num_heads))
