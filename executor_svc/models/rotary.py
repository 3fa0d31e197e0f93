"""Rotary position embedding.

Source: Su et al. 2021, "RoFormer"; the two halves of a head are rotated against each other, as in
transformers' Llama. The attention backends apply it, to queries and to the keys that they write.
"""

import math

import torch

from executor_svc.attention.interface import Rotation
from executor_svc.models.config import LinearScaling, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle that each pair of dimensions turns in one position, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies
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
