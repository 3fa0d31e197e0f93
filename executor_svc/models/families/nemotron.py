"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention, an MLP and experts, none of them gated.

Attention has no positions. Sources: NVIDIA 2025, "Nemotron-H" and "Nemotron 3 Nano".
"""

from dataclasses import replace
from typing import Final

from executor_svc.models.config import ExpertsConfig, LayerConfig, MlpConfig, ModelConfig, WeightNames
from executor_svc.models.families.common import checked_mamba2, mlp_of, read_decoder, read_sigmoid_experts
from executor_svc.models.fields import ConfigFields
from executor_svc.models.state_config import Mamba2Config
from octavo.values.wording import shown
from octavo_shared.errors import UnsupportedModelError

_LAYER: Final = "backbone.layers.{layer}"
_MIXER: Final = f"{_LAYER}.mixer"
_NAMES: Final = WeightNames(
    embedding="backbone.embeddings",
    attention_norm=f"{_LAYER}.norm",
    qkv=(f"{_MIXER}.q_proj", f"{_MIXER}.k_proj", f"{_MIXER}.v_proj"),
    attention_output=f"{_MIXER}.o_proj",
    state=_MIXER,
    mlp_norm=f"{_LAYER}.norm",
    router=f"{_MIXER}.gate",
    correction_bias=f"{_MIXER}.gate.e_score_correction_bias",
    gate_up=(f"{_MIXER}.up_proj",),
    down=f"{_MIXER}.down_proj",
    expert_gate_up=(f"{_MIXER}.experts.{{expert}}.up_proj",),
    expert_down=f"{_MIXER}.experts.{{expert}}.down_proj",
    shared_gate_up=(f"{_MIXER}.shared_experts.up_proj",),
    shared_down=f"{_MIXER}.shared_experts.down_proj",
    norm="backbone.norm_f",
)

# What the kinds of layers are called in the first files: as a letter each, or by another name.
_KINDS: Final = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "linear_attention",
    "attention": "full_attention",
}


def read_nemotron_h(fields: ConfigFields) -> ModelConfig:
    """Read a Nemotron-H or Nemotron 3 config.json."""
    fields.refuse(
        {
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "sliding_window": None,
            "moe_latent_size": None,
            "n_shared_experts": 1,
        }
    )
    kinds = _read_kinds(fields)
    own = {"num_hidden_layers": len(kinds), "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5)}
    config = read_decoder(ConfigFields({**fields.values, **own}, fields.source), activation="relu2")
    mlp = replace(mlp_of(config), is_gated=False)
    layer = replace(config.layers[0], rope=None, mlp=None)

    def layer_of(kind: str) -> LayerConfig:
        if kind == "full_attention":
            return layer
        if kind == "linear_attention":
            return replace(layer, attends=False, state=_read_mamba2(fields))
        return replace(layer, attends=False, mlp=mlp if kind == "mlp" else _read_experts(fields, mlp))

    of_kind = {kind: layer_of(kind) for kind in dict.fromkeys(kinds)}
    return replace(config, layers=tuple(of_kind[kind] for kind in kinds), names=_NAMES)


def _read_kinds(fields: ConfigFields) -> list[str]:
    name = "layers_block_type"
    if fields.values.get(name) is None:
        name = "hybrid_override_pattern"
    found = fields.values.get(name)
    kinds = [_KINDS.get(kind, kind) for kind in found if isinstance(kind, str)] if isinstance(found, list | str) else []
    is_known = {*kinds} <= {*_KINDS.values()} and isinstance(found, list | str) and len(kinds) == len(found)
    if not is_known or "full_attention" not in kinds or kinds[0] in ("mlp", "moe"):
        raise UnsupportedModelError(
            f"{fields.source} has {name} {shown(repr(found))}; supported are linear_attention (M), full_attention (*), "
            "mlp (-) and moe (E), full_attention at least once, and not mlp or moe first"
        )
    return kinds


def _read_mamba2(fields: ConfigFields) -> Mamba2Config:
    mamba = Mamba2Config(
        num_heads=fields.integer("mamba_num_heads", 128),
        num_groups=fields.integer("n_groups", 8),
        head_dim=fields.integer("mamba_head_dim", 64),
        state_size=fields.integer("ssm_state_size", 128),
        conv_size=fields.integer("conv_kernel", 4, least=2),
        has_conv_bias=fields.flag("use_conv_bias", True),
        has_bias=fields.flag("use_bias"),
    )
    return checked_mamba2(fields, mamba)


def _read_experts(fields: ConfigFields, mlp: MlpConfig) -> ExpertsConfig:
    own = replace(mlp, intermediate_size=fields.integer("moe_intermediate_size"))
    shared_size = fields.integer("moe_shared_expert_intermediate_size")
    return read_sigmoid_experts(fields, "n_routed_experts", own, shared_size)
