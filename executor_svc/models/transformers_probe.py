"""Which models run through transformers' code: as config.json tells, before weights are read, and as a run shows.

A few tokens go through the model while a recorder answers its attention. Whatever a layer asks of attention that
paged attention does not do refuses the model.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from executor_svc.attention.interface import AttentionLayer
from executor_svc.checkpoint.model_directory import read_json_object
from executor_svc.models.transformers_attention import PROBED_ATTENTION, AttentionCall, AttentionHook, MaskDescription
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


def from_pretrained(model_class: Any, directory: Path, dtype: torch.dtype, **more: object) -> tuple[Any, Any]:
    """Return a model in a directory, and which tensors do not fit. Raises: ModelLoadError: it cannot be loaded."""
    try:
        model, info = model_class.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **more,
        )
    except Exception as error:  # of transformers, which fails with many types
        raise ModelLoadError(f"{directory} cannot be loaded as {model_class.__name__}: {error}") from error
    return model, info


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


NUM_PROBE_TOKENS = 16

# Options of an attention function that change numbers, and that paged attention knows.
KNOWN_OPTIONS = frozenset({"scaling", "sliding_window", "softcap", "is_causal"})
# Options that change nothing: dropout is for training, and queries and keys are rotated already.
HARMLESS_OPTIONS = frozenset({"dropout", "position_ids"})


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """How a model attends; equal for all layers, but for `layers`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[AttentionLayer, ...]


def probe_attention(model: Any, base: Any, hook: AttentionHook) -> AttentionFacts:
    """Run a few tokens through `base`, which ends before the head, and return what its layers asked for.

    Raises: ModelLoadError: a layer wants what paged attention does not do; one sentence.
    """
    architecture = type(model).__name__
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> torch.Tensor:
        """Answer with zeros."""
        calls.append(call)
        return call.value.new_zeros((1, call.query.shape[2], call.query.shape[1], call.value.shape[3]))

    model.set_attn_implementation(PROBED_ATTENTION)
    positions = torch.arange(NUM_PROBE_TOKENS, device=model.device)
    try:
        with hook.handled_by(record):
            base(input_ids=probe_tokens(model)[None], position_ids=positions[None], use_cache=False)
    except Exception as error:  # foreign code, which fails with many types
        raise refusal(architecture, _why_it_failed(model, error)) from error
    try:
        return _facts(calls, model.config)
    except _UnsupportedAttentionError as error:
        raise refusal(architecture, str(error)) from error


def probe_tokens(model: Any) -> torch.Tensor:
    """Return the tokens that a model is probed with, [NUM_PROBE_TOKENS] int64, on its device."""
    vocab_size: int = model.config.vocab_size
    # Multiples of a prime: spread over the vocabulary, and all different unless that is tiny.
    return torch.arange(1, NUM_PROBE_TOKENS + 1, device=model.device) * 7919 % vocab_size


def _why_it_failed(model: Any, error: Exception) -> str:
    """Return why a model failed in the probe: a mask was asked for, or it fails on its own attention too."""
    if MaskDescription.__name__ in str(error):
        return "its code uses the attention mask, which paged attention does not create"
    what = f"{type(error).__name__}: {error}"
    try:
        model.set_attn_implementation("eager")
        model(input_ids=probe_tokens(model)[None], use_cache=False)
    except Exception:  # as above
        return f"its code does not run on a sequence of token ids ({what})"
    return f"its code fails with paged attention ({what})"


class _UnsupportedAttentionError(Exception):
    """The message says what a layer wants."""


def _facts(calls: Sequence[AttentionCall], config: Any) -> AttentionFacts:
    """Check that all layers attend, in the same shape, and return what they asked for."""
    num_layers: int = config.num_hidden_layers
    layer_ids = [_layer_idx(call) for call in calls]
    if layer_ids != list(range(num_layers)):
        num_attending = len({layer_idx for layer_idx in layer_ids if layer_idx in range(num_layers)})
        if num_attending < num_layers:
            raise _UnsupportedAttentionError(
                f"only {num_attending} of its {num_layers} layers call the attention interface, and the state of the "
                "others is not in the cache"
            )
        raise _UnsupportedAttentionError("its layers do not call attention once each, in order")
    first = calls[0]
    _, num_kv_heads, _, head_dim = first.key.shape
    for index, call in enumerate(calls):
        if call.value.shape != call.key.shape:
            raise _UnsupportedAttentionError(
                f"its keys have the size {call.key.shape[3]} a head and its values {call.value.shape[3]}"
            )
        if (call.query.shape, call.key.shape) != (first.query.shape, first.key.shape):
            raise _UnsupportedAttentionError(f"layers 0 and {index} differ in the number or size of their heads")
    layers = tuple(_layer(call, head_dim, config.max_position_embeddings) for call in calls)
    return AttentionFacts(first.query.shape[1], num_kv_heads, head_dim, layers)


def _layer_idx(call: AttentionCall) -> object:
    return getattr(call.module, "layer_idx", None)


def _layer(call: AttentionCall, head_dim: int, max_position_embeddings: int) -> AttentionLayer:
    for name, value in call.options.items():
        # A flag that is off asks for nothing.
        if name not in KNOWN_OPTIONS | HARMLESS_OPTIONS and value is not None and value is not False:
            raise _UnsupportedAttentionError(f"layer {_layer_idx(call)} passes {name} to attention")
    told = call.options.get("is_causal")
    if not (getattr(call.module, "is_causal", True) if told is None else told):
        raise _UnsupportedAttentionError(f"layer {_layer_idx(call)} attends to later tokens (it is not causal)")
    scaling, soft_cap = call.options.get("scaling"), call.options.get("softcap")
    window_tokens = _window(call, max_position_embeddings)
    return AttentionLayer(
        scale=head_dim**-0.5 if scaling is None else float(scaling),
        window_tokens=window_tokens,
        soft_cap=None if soft_cap is None else float(soft_cap),
    )


def _window(call: AttentionCall, max_position_embeddings: int) -> int | None:
    """Return the sliding window of a layer; its mask must be causal and show nothing else.

    The mask is what transformers' own attention goes by. Some models hand over `sliding_window` as well.
    """
    if not isinstance(call.mask, MaskDescription):
        raise _UnsupportedAttentionError(f"layer {_layer_idx(call)} has a custom mask, or none")
    window_tokens = call.mask.local_size
    if not _is_causal_window(call.mask, window_tokens, max_position_embeddings):
        raise _UnsupportedAttentionError(
            f"the mask of layer {_layer_idx(call)} is neither causal nor a causal sliding window"
        )
    handed_over = call.options.get("sliding_window")
    if handed_over is not None and handed_over != window_tokens:
        raise _UnsupportedAttentionError(
            f"layer {_layer_idx(call)} passes a window of {handed_over} tokens to attention, but a mask of "
            f"{window_tokens}"
        )
    return window_tokens


def _is_causal_window(mask: MaskDescription, window_tokens: int | None, max_position_embeddings: int) -> bool:
    """Whether a mask shows the last `window_tokens` positions (None: all) and no later one."""
    span = max_position_embeddings if window_tokens is None else window_tokens
    queries = torch.tensor([0, 1, span - 1, span, span + 1, 2 * span + 3])
    keys = torch.arange(int(queries.max()) + 2)
    expected = keys <= queries[:, None]
    if window_tokens is not None:
        expected &= keys > queries[:, None] - window_tokens
    try:
        return torch.equal(mask.visible(queries, keys), expected)
    except (IndexError, TypeError, RuntimeError):  # it looks at more than positions
        return False
