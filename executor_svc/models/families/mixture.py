"""Mixtral and Qwen3-MoE: a mixture of experts in place of each MLP.

Source: Jiang et al. 2024, "Mixtral of Experts"; Qwen Team 2025, "Qwen3 Technical Report".
"""

from dataclasses import replace

from executor_svc.models.config import ExpertsConfig, ModelConfig, WeightNames
from executor_svc.models.families.common import read_decoder
from executor_svc.models.families.qwen import with_query_key_norm
from executor_svc.models.fields import ConfigFields
from octavo_shared.errors import ModelLoadError


def read_mixtral(fields: ConfigFields) -> ModelConfig:
    """Read a Mixtral config.json."""
    windows = [fields.optional_integer("sliding_window")] * fields.integer("num_hidden_layers")
    moe = "model.layers.{layer}.block_sparse_moe"
    names = WeightNames(
        router=f"{moe}.gate",
        gate_up=(f"{moe}.experts.{{expert}}.w1", f"{moe}.experts.{{expert}}.w3"),
        down=f"{moe}.experts.{{expert}}.w2",
    )
    experts = _read_experts(fields, "num_local_experts", is_normalized=True)
    return replace(read_decoder(fields, windows=windows), names=names, experts=experts)


def read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """Read a Qwen3-MoE config.json in which every layer has experts."""
    fields.refuse({"decoder_sparse_step": 1, "mlp_only_layers": []})
    # Unlike Qwen3 it has no max_window_layers: every layer has the window.
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    config = with_query_key_norm(fields, [window] * fields.integer("num_hidden_layers"))
    mlp = "model.layers.{layer}.mlp"
    names = WeightNames(
        router=f"{mlp}.gate",
        gate_up=(f"{mlp}.experts.{{expert}}.gate_proj", f"{mlp}.experts.{{expert}}.up_proj"),
        down=f"{mlp}.experts.{{expert}}.down_proj",
    )
    size_name = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    return replace(
        config,
        mlp=replace(config.mlp, intermediate_size=fields.integer("moe_intermediate_size")),
        names=names,
        experts=_read_experts(fields, size_name, is_normalized=fields.flag("norm_topk_prob")),
    )


def _read_experts(fields: ConfigFields, size_name: str, *, is_normalized: bool) -> ExpertsConfig:
    num_experts, num_chosen = fields.integer(size_name), fields.integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelLoadError(f"{fields.source} selects {num_chosen} of {num_experts} experts")
    return ExpertsConfig(num_experts, num_chosen, is_normalized)
