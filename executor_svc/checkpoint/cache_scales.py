"""The scales of an FP8 cache that a checkpoint brings: one for the keys and one for the values of a layer."""

import math
import re
from collections.abc import Sequence
from typing import Final

from executor_svc.checkpoint.weights import Checkpoint
from octavo_shared.errors import ModelLoadError

# Behind the name of a layer's attention, for keys and for values: of compressed-tensors, vLLM and ModelOpt.
_NAMES: Final = (("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("k_proj.k_scale", "v_proj.v_scale"))
_IS_SCALE: Final = re.compile(r"\.(attn\.|[kv]_proj\.)?[kv]_scale$")


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a scale of the cache, which only FP8 reads."""
    return _IS_SCALE.search(name) is not None


def read_cache_scales(checkpoint: Checkpoint, attention: str, layers: Sequence[int]) -> Sequence[tuple[float, float]]:
    """Return the scales of an FP8 cache, of keys and values of some layers, 1 where the checkpoint has none.

    Raises: ModelLoadError: a scale is no positive number.
    """
    modules = [attention.format(layer=layer) for layer in layers]
    of_keys, of_values = zip(*_NAMES, strict=True)
    return [(_read_scale(checkpoint, each, of_keys), _read_scale(checkpoint, each, of_values)) for each in modules]


def _read_scale(checkpoint: Checkpoint, layer: str, names: Sequence[str]) -> float:
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
