"""Granite 3, and 4.0: layers with Mamba-2 among those that attend, experts or none beside an MLP for every token.

Embedding, attention scores, logits and what joins the residual stream have factors of their own. Sources: IBM 2025,
"Granite 4.0"; Dao & Gu 2024, "Transformers are SSMs".
"""

from dataclasses import replace
from typing import Final

from executor_svc.models.config import ExpertsConfig, LayerConfig, MlpConfig, ModelConfig, WeightNames
from executor_svc.models.families.common import checked_mamba2, mlp_of, read_decoder, read_experts, read_layer_types
from executor_svc.models.families.llama import read_llama
from executor_svc.models.fields import ConfigFields
from executor_svc.models.state_config import Mamba2Config
from octavo_shared.errors import UnsupportedModelError

_LAYER: Final = "model.layers.{layer}"
_SHARED: Final = ((f"{_LAYER}.shared_mlp.input_linear",), f"{_LAYER}.shared_mlp.output_linear")
_NAMES: Final = WeightNames(
    state=f"{_LAYER}.mamba",
    router=f"{_LAYER}.block_sparse_moe.router.layer",
    expert_gate_up=tuple(f"{_LAYER}.block_sparse_moe.experts.{{expert}}.{part}_proj" for part in ("gate", "up")),
    expert_down=f"{_LAYER}.block_sparse_moe.experts.{{expert}}.down_proj",
    gate_up=_SHARED[0],
    down=_SHARED[1],
    shared_gate_up=_SHARED[0],
    shared_down=_SHARED[1],
)
# Of GGUF files, which hold gate and up apart.
_NAMES_APART: Final = WeightNames(state=_NAMES.state, router=_NAMES.router)

# What the kinds of layers are called in the first files.
_KINDS: Final = {"mamba": "linear_attention", "attention": "full_attention"}


def read_granite_hybrid(fields: ConfigFields) -> ModelConfig:
    """Read a Granite 4.0 config.json, with Mamba-2 layers or without."""
    fields.refuse({"hidden_act": "silu", "normalization_function": "rmsnorm"})
    config = read_decoder(fields)
    has_bias, has_rope = fields.flag("attention_bias"), _read_has_rope(fields)
    scale = fields.number("attention_multiplier", 1.0)
    mlp, kinds = _read_mlp(fields, config), _read_kinds(fields)
    mamba = _read_mamba2(fields, config.hidden_size) if "linear_attention" in kinds else None

    def layer_of(layer: LayerConfig, kind: str) -> LayerConfig:
        if kind == "linear_attention":
            return replace(layer, rope=None, mlp=mlp, attends=False, state=mamba)
        attention = replace(layer.attention, scale=scale)
        return replace(layer, attention=attention, rope=layer.rope if has_rope else None, mlp=mlp)

    config = replace(
        config,
        layers=tuple(layer_of(*pair) for pair in zip(config.layers, kinds, strict=True)),
        names=_NAMES_APART if fields.flag("has_gates_apart") else _NAMES,
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
    )
    return _with_factors(config, fields)


def read_granite(fields: ConfigFields) -> ModelConfig:
    """Read a Granite 3 config.json without experts: Llama with these factors."""
    config = read_llama(fields)
    attention = replace(config.layers[0].attention, scale=fields.number("attention_multiplier", 1.0))
    return _with_factors(config.with_layers(attention=attention), fields)


def _with_factors(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def _read_has_rope(fields: ConfigFields) -> bool:
    kind = fields.values.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise UnsupportedModelError(
            f"{fields.source} has position_embedding_type {kind!r}; supported are rope, nope and null"
        )
    return kind == "rope"


def _read_kinds(fields: ConfigFields) -> list[str]:
    found, num_layers = fields.values.get("layer_types"), fields.integer("num_hidden_layers")
    if isinstance(found, list):
        found = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in found]
    renamed = ConfigFields({**fields.values, "layer_types": found}, fields.source)
    return read_layer_types(renamed, "linear_attention", [False] * num_layers)


def _read_mlp(fields: ConfigFields, config: ModelConfig) -> MlpConfig | ExpertsConfig:
    """Read the MLP that every token goes to, and the experts beside it, if there are some."""
    shared = replace(mlp_of(config), intermediate_size=fields.integer("shared_intermediate_size", 1024))
    if not fields.integer("num_local_experts", 8, least=0):
        return shared
    experts = read_experts(fields, "num_local_experts", mlp_of(config), is_normalized=True)
    return replace(experts, shared=shared, has_shared_gate=False)


def _read_mamba2(fields: ConfigFields, hidden_size: int) -> Mamba2Config:
    num_heads = fields.integer("mamba_n_heads", 128)
    by_default = max(1, fields.integer("mamba_expand", 2) * hidden_size // num_heads)
    is_told = fields.values.get("mamba_d_head") not in (None, "auto")
    mamba = Mamba2Config(
        num_heads=num_heads,
        num_groups=fields.integer("mamba_n_groups", 1),
        head_dim=fields.integer("mamba_d_head") if is_told else by_default,
        state_size=fields.integer("mamba_d_state", 256),
        conv_size=fields.integer("mamba_d_conv", 4, least=2),
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        has_bias=fields.flag("mamba_proj_bias"),
    )
    return checked_mamba2(fields, mamba)
