"""Rotary position embedding: what config.json says of it, and the rotation of the tokens of a step.

In config.json it is `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`. The two halves of what
turns of a head are rotated against each other, as in transformers' Llama; of every type, by position alone. The
attention backends apply the rotation, to queries and to the keys that they write. Source: Su et al. 2021, "RoFormer".
"""

import math
from dataclasses import replace

import torch

from executor_svc.attention.interface import Rotation
from executor_svc.models.config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)
from executor_svc.models.fields import ConfigFields
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError, UnsupportedModelError


def read_rope(
    fields: ConfigFields,
    head_dim: int,
    max_position_embeddings: int,
    *,
    layer_type: str = "",
    has_partial_rotary: bool = False,
) -> RopeConfig:
    """Read the rotary embedding, in a model with several that of a type of layer.

    Raises: UnsupportedModelError: its type is not known, or it turns part of the head where the family has not
        `has_partial_rotary`.
    """
    parameters = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if isinstance(parameters, dict) and layer_type in parameters:
        parameters = parameters[layer_type]
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"{fields.source} has rope parameters {shown(repr(parameters))}; they must be an object")
    shared = {name: fields.values.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    rope = ConfigFields({**shared, **parameters}, fields.source)
    rotary_dim = _read_rotary_dim(rope, head_dim)
    if parameters.get("rope_type") == "proportional":  # the frequencies are those of all dimensions
        scaling = ProportionalScaling(rotary_dim // 2)
        return RopeConfig(rope.number("rope_theta", 10_000.0), scaling if rotary_dim < head_dim else None)
    if rotary_dim != head_dim and not has_partial_rotary:
        raise UnsupportedModelError(
            f"{fields.source} has a rotary embedding for {rotary_dim} of the {head_dim} dimensions of a head; "
            f"{fields.architecture} rotates all of them"
        )
    read = RopeConfig(rope.number("rope_theta", 10_000.0), rotary_dim=None if rotary_dim == head_dim else rotary_dim)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "su" or (rope_type == "yarn" and "short_factor" in parameters):
        rope_type = "longrope"  # its names in the first files of Phi-3
    if rope_type == "dynamic":
        rope.number("factor")  # it counts beyond max_position_embeddings, which no sequence reaches
    elif rope_type == "linear":
        return replace(read, scaling=LinearScaling(rope.number("factor")))
    elif rope_type == "factors":
        return replace(read, scaling=_read_factors(rope, "factors", rotary_dim // 2))
    elif rope_type in ("llama3", "yarn", "longrope"):
        # As in transformers, what stands beside `rope_parameters` wins.
        name = "original_max_position_embeddings"
        original = fields.optional_integer(name) or rope.integer(name, max_position_embeddings)
        if rope_type == "yarn":
            return _with_yarn(read, rope, original, max_position_embeddings)
        if rope_type == "longrope":
            return _with_longrope(read, rope, original, max_position_embeddings, rotary_dim // 2)
        factor = rope.number("factor")
        limits = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return replace(read, scaling=Llama3Scaling(factor, *limits, original))
    elif rope_type != "default":
        raise UnsupportedModelError(
            f"{fields.source} has a rotary embedding of type {shown(str(rope_type))}; supported are default, linear, "
            "dynamic, llama3, yarn and longrope"
        )
    return read


def _read_rotary_dim(rope: ConfigFields, head_dim: int) -> int:
    """Read how many dimensions of a head turn; `rotary_dim` is what GGUF files have."""
    rotary_dim = rope.optional_integer("rotary_dim")
    if rotary_dim is None:
        rotary_dim = int(head_dim * min(2.0, rope.number("partial_rotary_factor", 1.0)))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        factor = shown(repr(rope.values.get("partial_rotary_factor")))
        raise ModelLoadError(
            f"{rope.source} has partial_rotary_factor {factor}; of a head_dim of {head_dim} it must leave an even "
            f"number of dimensions, 2 to {head_dim}"
        )
    return rotary_dim


def _with_yarn(read: RopeConfig, rope: ConfigFields, original: int, max_position_embeddings: int) -> RopeConfig:
    factor = rope.number("factor", max_position_embeddings / original)
    if read.theta <= 1:
        raise ModelLoadError(f"{rope.source} has rope_theta {read.theta}; for yarn it must be a number above 1")
    scaling = YarnScaling(
        factor, rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0), original, rope.flag("truncate", True)
    )
    attention_factor, scales = rope.optional_number("attention_factor"), [1.0, 0.0]
    if attention_factor is None:
        if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
            scales = [rope.number("mscale"), rope.number("mscale_all_dim")]
        grown, grown_everywhere = (1 + 0.1 * scale * math.log(max(1.0, factor)) for scale in scales)
        attention_factor = grown / grown_everywhere
    return replace(read, scaling=scaling, attention_factor=attention_factor)


def _with_longrope(
    read: RopeConfig, rope: ConfigFields, original: int, max_position_embeddings: int, num_pairs: int
) -> RopeConfig:
    """Read the frequencies of sequences up to the original length; longer ones have others for all their tokens."""
    factor = rope.number("factor", max_position_embeddings / original)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(max(1.0, factor)) / math.log(max(2, original)))
    return replace(
        read,
        scaling=_read_factors(rope, "short_factor", num_pairs),
        attention_factor=attention_factor,
        max_positions=original if original < max_position_embeddings else None,
    )


def _read_factors(rope: ConfigFields, name: str, num_pairs: int) -> FrequencyFactors:
    factors = rope.values.get(name)
    if (
        not isinstance(factors, list)
        or len(factors) != num_pairs
        or not all(type(each) in (int, float) and 0 < each < 1e38 for each in factors)
    ):
        raise ModelLoadError(f"{rope.source} has rotary factors ({name}) that are not {num_pairs} numbers above 0")
    return FrequencyFactors(tuple(map(float, factors)))


def rope_fields(fields: ConfigFields) -> ConfigFields:
    """Return the fields of the one rotary embedding, by either of its names."""
    return fields.nested("rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling")


def query_factors(rope: RopeConfig, max_positions: int) -> torch.Tensor:
    """Return what queries of each interval of positions are multiplied by, float32; empty: they do not grow."""
    if not rope.query_growth:
        return torch.empty(0)
    intervals = torch.arange(-(-max_positions // rope.query_interval), dtype=torch.float64)
    return (1 + rope.query_growth * (1 + intervals).log()).float()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle that each pair of dimensions turns in one position, [rotary_dim / 2] float32."""
    rotary_dim = rope.rotary_dim or head_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, FrequencyFactors):
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, ProportionalScaling):
        frequencies[scaling.num_pairs :] = 0.0
        return frequencies
    if isinstance(scaling, YarnScaling):
        share_kept = _share_kept_by_yarn(scaling, rope.theta, rotary_dim)
    else:
        # Source: Llama 3.1: waves longer than the training context are stretched by `factor`, short
        # ones stay, the ones between are mixed.
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        share_kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        share_kept.clamp_(0, 1)
    return frequencies * share_kept + frequencies / scaling.factor * (1 - share_kept)


def _share_kept_by_yarn(scaling: YarnScaling, theta: float, rotary_dim: int) -> torch.Tensor:
    """Return which share of each frequency is not stretched: it falls by pair, between those with the two betas."""

    def pair_with(num_turns: float) -> float:
        wave = math.log(scaling.original_max_position_embeddings) - math.log(num_turns) - math.log(2 * math.pi)
        return rotary_dim * wave / (2 * math.log(theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)


def rotations(positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> Rotation:
    """Return the rotation of tokens at `positions`, [num_tokens], whatever the head; cos and sin are times `factor`."""
    angles = positions[:, None].float() * frequencies  # [num_tokens, rotary_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))


def sinusoidal_positions(num_positions: int, size: int) -> torch.Tensor:
    """Return the embedding of each position, [num_positions, size] float32: all sines, then all cosines.

    Source: Vaswani et al. 2017, "Attention Is All You Need"; the order is Marian's.
    """
    pairs = torch.arange(0, size, 2, dtype=torch.float64) / size
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] / 10_000**pairs
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :size].float()
