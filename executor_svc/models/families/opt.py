"""OPT: learned positions, LayerNorm, a plain MLP with ReLU, biases everywhere.

Source: Zhang et al. 2022, "OPT: Open Pre-trained Transformer Language Models".
"""

from executor_svc.models.config import MlpConfig, ModelConfig, NormConfig, WeightNames
from executor_svc.models.families.common import make_layers, read_activation
from executor_svc.models.fields import ConfigFields

_LAYER = "model.decoder.layers.{layer}"
_NAMES = WeightNames(
    embedding="model.decoder.embed_tokens",
    position_embedding="model.decoder.embed_positions",
    attention_norm=f"{_LAYER}.self_attn_layer_norm",
    qkv=(f"{_LAYER}.self_attn.q_proj", f"{_LAYER}.self_attn.k_proj", f"{_LAYER}.self_attn.v_proj"),
    attention_output=f"{_LAYER}.self_attn.out_proj",
    mlp_norm=f"{_LAYER}.final_layer_norm",
    gate_up=(f"{_LAYER}.fc1",),
    down=f"{_LAYER}.fc2",
    norm="model.decoder.final_layer_norm",
)
# The position embedding starts with two rows for padding.
_POSITION_OFFSET = 2


def read_opt(fields: ConfigFields) -> ModelConfig:
    """Read the config.json of an OPT model with norms before each part (all but OPT-350m)."""
    fields.refuse(
        {
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
            "word_embed_proj_dim": fields.integer("hidden_size"),
        }
    )
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim, has_bias = max(1, hidden_size // num_heads), fields.flag("enable_bias", True)
    return ModelConfig(
        source=fields.source,
        architecture=fields.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        layers=make_layers([None] * fields.integer("num_hidden_layers"), None, scale=head_dim**-0.5),
        norm=NormConfig(epsilon=1e-5, is_layer_norm=True, has_bias=True),
        mlp=MlpConfig(fields.integer("ffn_dim"), read_activation(fields, "relu"), is_gated=False, has_bias=has_bias),
        names=_NAMES,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
        position_offset=_POSITION_OFFSET,
    )
