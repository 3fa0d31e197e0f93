"""The model architectures that the executor runs.

`llama.py` is the model, `config.py` reads its config.json, `layers.py` and `rotary.py` hold the parts.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from executor_svc.errors import ModelLoadError
from executor_svc.models.config import ModelConfig
from executor_svc.models.llama import LlamaForCausalLM

# Mistral without a sliding window is Llama under another name; config.py refuses the window.
MODEL_CLASSES: Final[Mapping[str, type[LlamaForCausalLM]]] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": LlamaForCausalLM,
    }
)


def model_class(config: ModelConfig) -> type[LlamaForCausalLM]:
    """Return the class that runs `config.architecture`.

    Raises: ModelLoadError: there is none.
    """
    if config.architecture not in MODEL_CLASSES:
        raise ModelLoadError(
            f"{config.source} names the architecture {config.architecture}; supported are {', '.join(MODEL_CLASSES)}"
        )
    return MODEL_CLASSES[config.architecture]


__all__ = ["MODEL_CLASSES", "LlamaForCausalLM", "ModelConfig", "model_class"]
