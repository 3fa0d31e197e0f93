"""Scales of an FP8 cache, as checkpoints bring them: one for the keys and one for the values of a layer."""

import math
import re
from collections.abc import Sequence
from typing import Final, Protocol

import torch

from octavo_shared.errors import ModelLoadError

# Behind the name of a layer's attention, for keys and for values: of compressed-tensors, vLLM and ModelOpt.
_NAMES: Final = (("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("k_proj.k_scale", "v_proj.v_scale"))
_IS_SCALE: Final = re.compile(r"\.(attn\.|[kv]_proj\.)?[kv]_scale$")


class ScaleSource(Protocol):
    """A checkpoint whose single tensors can be read."""

    def small_tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor; None: there is none of this name."""


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a scale of the cache, which only FP8 reads."""
    return _IS_SCALE.search(name) is not None


def read_cache_scales(checkpoint: ScaleSource, attention: str, num_layers: int) -> Sequence[tuple[float, float]]:
    """Return the scales of keys and values of each layer, 1 where the checkpoint has none.

    Raises: ModelLoadError: a scale is no positive number.
    """
    layers = [attention.format(layer=layer) for layer in range(num_layers)]
    of_keys, of_values = zip(*_NAMES, strict=True)
    return [(_read(checkpoint, layer, of_keys), _read(checkpoint, layer, of_values)) for layer in layers]


def _read(checkpoint: ScaleSource, layer: str, names: Sequence[str]) -> float:
    for name in names:
        tensor = checkpoint.small_tensor(f"{layer}.{name}")
        if tensor is None:
            continue
        if tensor.numel() != 1:
            raise ModelLoadError(
                f"the tensor {layer}.{name} has {tensor.numel()} values, but an FP8 cache has one scale a layer; set "
                "--kv-cache-dtype int8, which needs no scales"
            )
        scale = float(tensor)
        if not 0 < scale < math.inf:
            raise ModelLoadError(
                f"the tensor {layer}.{name} is {scale:g}, but the scale of an FP8 cache is above 0 and finite; set "
                "--kv-cache-dtype int8, which needs no scales"
            )
        return scale
    return 1.0
