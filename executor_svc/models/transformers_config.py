"""Which models run through transformers' code, as far as config.json tells: known before weights are read."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from executor_svc.checkpoint.model_directory import read_json_object
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError

# Its frequencies depend on the longest sequence of a batch, so a token's keys would depend on its neighbours. The type
# "dynamic" changes beyond max_position_embeddings only, which no sequence reaches.
BATCH_DEPENDENT_ROPE_TYPE = "longrope"
PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# What such a layer knows of a sequence is not in the KV cache: it would be lost between two steps.
STATEFUL_LAYER_TYPES = frozenset({"conv", "hybrid", "hybrid_sliding", "linear_attention"})


def find_architecture(directory: Path) -> tuple[Any, Any]:
    """Return the transformers class of a model, and its configuration.

    Raises: ModelLoadError: the model cannot run on paged attention, or its configuration is wrong; one sentence.
    """
    source = directory / "config.json"
    raw = read_json_object(source)
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(f"{source} has architectures {shown(repr(names))}; it must be a list of one name")
    name = names[0]
    model_class = _model_class(name, raw)
    try:
        config = model_class.config_class.from_json_file(source)
    except Exception as error:  # of transformers and huggingface_hub, of many types
        raise ModelLoadError(f"{source} is not a configuration of {name}: {error}") from error
    _check_config(model_class, config)
    return model_class, config


def refusal(architecture: str, reason: str) -> ModelLoadError:
    """Return the error that refuses a model."""
    return ModelLoadError(f"{architecture} cannot run on paged attention: {reason}")


def _model_class(name: str, raw: Mapping[str, object]) -> Any:
    """Return the class of an architecture, if it is a language model with an attention that can be exchanged."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        if raw.get("auto_map") is not None:
            raise refusal(name, "its code is part of the model repository (auto_map), and such code is never run")
        if hasattr(transformers, name):
            raise refusal(name, "it is not a causal language model")
        raise refusal(name, f"transformers {transformers.__version__} does not know it")
    model_class = getattr(transformers, name)
    # Not `_supports_attention_backend`: several classes with an attention that can be exchanged lack that flag.
    if not model_class._can_set_attn_implementation():
        raise refusal(name, "its code in transformers does not support a custom attention implementation")
    return model_class


def _check_config(model_class: Any, config: Any) -> None:
    name = model_class.__name__
    if config.get_text_config() is not config or not hasattr(config, "num_hidden_layers"):
        raise refusal(name, "it combines several models, not just a language model")
    _check_layer_types(model_class, getattr(config, "layer_types", None) or ())
    if BATCH_DEPENDENT_ROPE_TYPE in _rope_types(getattr(config, "rope_parameters", None)):
        raise refusal(name, "its rotary frequencies depend on the other sequences of a batch (longrope)")
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise refusal(name, "its configuration has no maximum sequence length (max_position_embeddings)")


def _check_layer_types(model_class: Any, layer_types: Collection[str]) -> None:
    """Refuse layers that do something else than attend. Without types, the class says if it keeps a state."""
    stateful = sorted(STATEFUL_LAYER_TYPES.intersection(layer_types))
    if stateful or (model_class._is_stateful and not layer_types):
        which = f" (layers of type {' and '.join(stateful)})" if stateful else ""
        raise refusal(model_class.__name__, f"it keeps a recurrent state besides the KV cache{which}")
    for layer_type in layer_types:
        if layer_type not in PAGED_LAYER_TYPES:
            raise refusal(model_class.__name__, f"it has layers of type {layer_type}")


def _rope_types(parameters: object) -> list[object]:
    """Return the rotary types; `parameters` are the model's, or by type of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [each.get("rope_type", each.get("type")) for each in (parameters, *nested)]
