"""BLOOM: ALiBi in place of positions, LayerNorm behind the embedding, q, k and v of a head side by side.

Source: BigScience Workshop 2022, "BLOOM"; the slopes: Press et al. 2021, "Train Short, Test Long".
"""

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.config import LayerConfig, MlpConfig, ModelConfig, NormConfig, WeightNames
from executor_svc.models.families.common import alibi_slopes
from executor_svc.models.fields import ConfigFields

_LAYER = "transformer.h.{layer}"
_NAMES = WeightNames(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    attention_norm=f"{_LAYER}.input_layernorm",
    qkv=(f"{_LAYER}.self_attention.query_key_value",),
    qkv_layout="interleaved",
    attention_output=f"{_LAYER}.self_attention.dense",
    mlp_norm=f"{_LAYER}.post_attention_layernorm",
    gate_up=(f"{_LAYER}.mlp.dense_h_to_4h",),
    down=f"{_LAYER}.mlp.dense_4h_to_h",
    norm="transformer.ln_f",
    optional_prefix="transformer.",  # bigscience's own checkpoints are without
)


def read_bloom(fields: ConfigFields) -> ModelConfig:
    """Read a BLOOM config.json."""
    fields.refuse({"apply_residual_connection_post_layernorm": False})
    hidden_size = fields.integer("hidden_size", fields.optional_integer("n_embed"))
    num_heads = fields.integer("n_head", fields.optional_integer("num_attention_heads"))
    num_layers = fields.integer("n_layer", fields.optional_integer("num_hidden_layers"))
    head_dim = max(1, hidden_size // num_heads)
    attention = AttentionLayer(head_dim**-0.5, alibi_slopes=alibi_slopes(num_heads))
    return ModelConfig(
        source=fields.source,
        architecture=fields.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=head_dim,
        # ALiBi has no limit; this is what the models were trained on.
        max_position_embeddings=fields.integer("seq_length", 2048),
        layers=(LayerConfig(attention, rope=None),) * num_layers,
        norm=NormConfig(fields.number("layer_norm_epsilon", 1e-5), is_layer_norm=True, has_bias=True),
        mlp=MlpConfig(4 * hidden_size, "gelu_tanh", is_gated=False, has_bias=True),
        names=_NAMES,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=True,
        attention_output_bias=True,
        has_embedding_norm=True,
    )
