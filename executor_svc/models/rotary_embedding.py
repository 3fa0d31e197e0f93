"""Rotary position embedding: what config.json says of it, and the rotation of the tokens of a step.

In config.json it is `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`. The two halves of a head
are rotated against each other, as in transformers' Llama. The attention backends apply the rotation, to queries and to
the keys that they write. Source: Su et al. 2021, "RoFormer".
"""

import math

import torch

from executor_svc.attention.interface import Rotation
from executor_svc.models.config import FrequencyFactors, LinearScaling, Llama3Scaling, RopeConfig
from executor_svc.models.fields import ConfigFields
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError, UnsupportedModelError


def read_rope(fields: ConfigFields, max_position_embeddings: int, *, layer_type: str = "") -> RopeConfig:
    """Read the rotary embedding, in a model with several that of a type of layer.

    Raises: UnsupportedModelError: its type is not one of default, linear and llama3, or it leaves out dimensions.
    """
    parameters = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if isinstance(parameters, dict) and layer_type in parameters:
        parameters = parameters[layer_type]
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"{fields.source} has rope parameters {shown(repr(parameters))}; they must be an object")
    fields.refuse({"partial_rotary_factor": 1.0})
    rope = ConfigFields({"rope_theta": fields.values.get("rope_theta"), **parameters}, fields.source)
    theta = rope.number("rope_theta", 10_000.0)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    part = "" if parameters.get("partial_rotary_factor", 1.0) == 1.0 else ", for part of the head"
    if part or rope_type not in ("default", "linear", "llama3", "factors"):
        raise UnsupportedModelError(
            f"{fields.source} has a rotary embedding of type {rope_type}{part}; supported are default, linear and "
            "llama3, for the whole head"
        )
    if rope_type == "default":
        return RopeConfig(theta)
    if rope_type == "linear":
        return RopeConfig(theta, LinearScaling(rope.number("factor")))
    if rope_type == "factors":
        return RopeConfig(theta, _read_factors(fields, parameters.get("factors")))
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings", max_position_embeddings),
    )
    return RopeConfig(theta, scaling)


def _read_factors(fields: ConfigFields, factors: object) -> FrequencyFactors:
    num_pairs = fields.integer("head_dim") // 2
    if (
        not isinstance(factors, list)
        or len(factors) != num_pairs
        or not all(isinstance(each, float) and 0 < each < math.inf for each in factors)
    ):
        raise ModelLoadError(f"{fields.source} has rotary factors that are not {num_pairs} numbers above 0")
    return FrequencyFactors(tuple(factors))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle that each pair of dimensions turns in one position, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, FrequencyFactors):
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    # Source: Llama 3.1: waves longer than the training context are stretched by `factor`, short
    # ones stay, the ones between are mixed.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    share_kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share_kept.clamp_(0, 1)
    return frequencies * share_kept + frequencies / scaling.factor * (1 - share_kept)


def rotations(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Return the rotation of tokens at `positions`, [num_tokens], whatever the head."""
    angles = positions[:, None].float() * frequencies  # [num_tokens, head_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
