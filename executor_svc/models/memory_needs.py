"""What a model needs of this machine's memory, from its headers alone: for people, before anything is loaded.

Imports no torch, so that a command can ask without waiting for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from gguf import GGMLQuantizationType as FileType
from gguf import LlamaFileType

from executor_svc.checkpoint import scaled_codes
from executor_svc.checkpoint.gguf.config import build_config
from executor_svc.checkpoint.gguf.files import read_files
from executor_svc.checkpoint.gguf.rounding import HELD_BITS, check_type
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.model_files import refuse_quantized
from executor_svc.device.host_memory import (
    available_memory_bytes,
    cache_bytes_for,
    cache_share_bytes,
    states_that_fit,
    total_memory_bytes,
)
from octavo_shared.errors import ModelLoadError

if TYPE_CHECKING:  # torch, and pydantic, which a machine that only measures may lack
    from executor_svc.checkpoint.gguf.model import GGUFModel
    from executor_svc.config import ExecutorConfig

Quantization = Literal["none", "bfloat16", "int8", "int8-a8", "int4"]

_ROUNDED_BITS = 8.5
_FILE_TYPES: Final[Mapping[object, str]] = MappingProxyType(
    {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
)
_BITS: Final[Mapping[str, float]] = MappingProxyType({"bfloat16": 16, "int8": 8.5, "int8-a8": 8.5, "int4": 5})
# Of safetensors, as they are held on a CPU without a quantization.
_STORED_BITS: Final[Mapping[str, float]] = MappingProxyType({"BF16": 16})

# Of an element of the KV cache; of int8 with the scale of a head of 64.
_CACHE_BITS: Final[Mapping[str, float]] = MappingProxyType(
    {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8.5, "fp8_e4m3": 8, "fp8_e5m2": 8}
)

# What people could take instead, with the bits of a weight that such a file has on average.
_SMALLER_FILES = (("Q8_0", 8.5), ("Q6_K", 6.6), ("Q5_K_M", 5.7), ("Q4_K_M", 4.9), ("Q3_K_M", 4.0), ("Q2_K", 3.2))
_SMALLER_QUANTIZATIONS = (("int8-a8", 8.5), ("int4", 5.5))

# Of a block, where the attention's preference is not known yet.
_BLOCK_TOKENS = 16

# Executor, scheduler and their libraries, without a model.
_PROGRAM_BYTES = 400_000_000
# Of the KV cache, where the settings say nothing: it takes more of what is free, and works with less.
_CACHED_TOKENS = 4096


# How the names of architectures with a KV cache end.
_GENERATIVE = ("ForCausalLM", "LMHeadModel")


class OutOfMemoryError(ModelLoadError):
    """The machine has too little memory for a model."""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What the headers of a model say.

    Attributes:
        architecture: As config.json names it; "": it does not.
        formats: Of its matrices, as the files name them, the one with most weights first; of a GGUF file its own name.
        num_weights: Of all tensors.
        file_bytes: Of the files with weights.
        held_bytes: What the weights take in memory.
        token_bytes: What a token takes in a KV cache of its floats.
        state_bytes: What a sequence takes in layers with a recurrent state.
        max_model_len: Tokens that a sequence may have.
        is_gguf: Whether it is a GGUF file.
    """

    architecture: str
    formats: tuple[str, ...]
    num_weights: int
    file_bytes: int
    held_bytes: int
    token_bytes: int
    max_model_len: int
    is_gguf: bool
    state_bytes: int = 0

    def needed_bytes(
        self, cache_bytes: int | None = None, max_model_len: int | None = None, max_num_seqs: int = 1
    ) -> int:
        """Return what it needs to run: weights, a KV cache for one sequence, states, and the programs.

        Args:
            cache_bytes: Of the KV cache, if that is said; None: for 4,096 tokens, or a sequence if that is shorter.
            max_model_len: Tokens of a sequence, if that is said.
            max_num_seqs: Sequences that have a state.
        """
        if cache_bytes is None:
            cache_bytes = self.token_bytes * min(max_model_len or self.max_model_len, _CACHED_TOKENS)
        return self.held_bytes + cache_bytes + self.state_bytes * max_num_seqs + _PROGRAM_BYTES

    def why_too_large(
        self,
        name: str,
        needed_bytes: int,
        available_bytes: int | None,
        num_executors: int = 1,
        max_num_seqs: int = 1,
    ) -> str | None:
        """Return the sentence that refuses a model for which memory lacks, with what would work; None: it fits."""
        if available_bytes is None or needed_bytes <= available_bytes:
            return None
        slot_bytes = self.state_bytes * num_executors
        num_lacking = -(-(needed_bytes - available_bytes) // slot_bytes) if slot_bytes else max_num_seqs
        held_bytes = self.held_bytes * num_executors
        rest = needed_bytes - held_bytes
        smaller = _SMALLER_FILES if self.is_gguf else _SMALLER_QUANTIZATIONS
        fitting = [
            f"{'a file in' if self.is_gguf else '--quantization'} {choice} (about {_gb(size)})"
            for choice, bits in smaller
            if (size := int(self.num_weights * bits / 8) * num_executors + rest) <= available_bytes
            and size < needed_bytes
        ]
        if num_lacking < max_num_seqs:
            took = f"the states of {max_num_seqs} sequences take {_gb(slot_bytes * max_num_seqs)}"
            advice = f"--max-num-seqs {max_num_seqs - num_lacking} would fit: {took}"
        elif rest > available_bytes:
            states, setting = (", states", ", --max-num-seqs") if self.state_bytes else ("", "")
            settings = f"--kv-cache-gib{setting} or --max-model-len"
            advice = f"{_gb(rest)} are for the KV cache{states} and the programs: lower {settings}"
        elif fitting:
            advice = f"{fitting[0]} would fit"
        else:
            advice = "no smaller format would fit either: free memory, or take a smaller model"
        return (
            f"{name} needs {_gb(needed_bytes)} of memory, {_gb(held_bytes)} of it for weights, and "
            f"{_gb(available_bytes)} are free; {advice}"
        )


def check_memory(model: Path | GGUFModel, config: ExecutorConfig, num_executors: int = 1) -> str:
    """Return what a model needs and what there is: needs 3.1 GB, up to 7.4 GB with full KV caches, 21 GB free.

    Args:
        model: A directory, a GGUF file, or the header of one.
        config: The settings of each executor on this machine; its device is a CPU.
        num_executors: How many there are.

    Raises: ModelLoadError: memory lacks, with what would work; or the model is damaged, or of a kind that is not read.
    """
    float_bytes: Literal[2, 4] = 4 if config.dtype in ("auto", "float32") else 2
    summary = summarize_model(
        model,
        config.quantization,
        float_bytes=float_bytes,
        allow_requantization=config.allow_requantization,
        has_mtp=config.draft_method == "mtp",
    )
    auto_bits = 16 if config.compute_dtype == "bfloat16" else 8 * float_bytes
    cache_bits = _CACHE_BITS.get(config.kv_cache_dtype, auto_bits)
    summary = replace(summary, token_bytes=int(summary.token_bytes * cache_bits / (8 * float_bytes)))
    cache_bytes = None if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30) * config.tp
    if config.num_device_blocks is not None:
        block_bytes = summary.token_bytes * (config.block_size_tokens or _BLOCK_TOKENS)
        state_gib = None if config.state_cache_gib is None else config.state_cache_gib * config.tp
        cache_bytes = cache_bytes_for(config.num_device_blocks, block_bytes, summary.state_bytes, state_gib)
    max_num_seqs, available = config.max_num_seqs, available_memory_bytes()
    if summary.state_bytes and available is not None and "max_num_seqs" not in config.model_fields_set:
        others = summary.needed_bytes(0, max_num_seqs=0)
        max_num_seqs = states_that_fit(summary.state_bytes, available // num_executors - others, max_num_seqs)
    needed = summary.needed_bytes(cache_bytes, config.max_model_len, max_num_seqs) * num_executors
    if trouble := summary.why_too_large(config.model, needed, available, num_executors, max_num_seqs):
        raise OutOfMemoryError(trouble)
    if cache_bytes is None and summary.architecture.endswith(_GENERATIVE):
        return say_needs(needed, _most_bytes(summary, max_num_seqs, num_executors))
    return say_needs(needed)


def _most_bytes(summary: ModelSummary, max_num_seqs: int, num_executors: int) -> int | None:
    """Return what executors take when KV caches without a limit are full; None: it is not known."""
    available, total = available_memory_bytes(), total_memory_bytes()
    if available is None or total is None:
        return None
    others = num_executors * summary.needed_bytes(0, max_num_seqs=max_num_seqs)
    return others + num_executors * cache_share_bytes(max(1, available - others), total)


def say_needs(needed_bytes: int, most_bytes: int | None = None) -> str:
    """Return what is needed and what there is: needs 3.1 GB, up to 7.4 GB with full KV caches, 21 GB free."""
    available = available_memory_bytes()
    grows = most_bytes is not None and most_bytes > needed_bytes
    most = f", up to {_gb(most_bytes or 0)} with full KV caches" if grows else ""
    return f"needs {_gb(needed_bytes)}{most}" + ("" if available is None else f", {_gb(available)} free")


def summarize_model(
    model: Path | GGUFModel,
    quantization: Quantization = "none",
    *,
    float_bytes: Literal[2, 4] = 4,
    allow_requantization: bool = False,
    has_mtp: bool = False,
) -> ModelSummary:
    """Return what the headers of a model say.

    Args:
        model: A directory, a GGUF file, or the header of one.
        quantization: What weights become as they are loaded.
        float_bytes: Of a number of the KV cache, and of a weight that is not quantized.
        allow_requantization: Whether types that no format holds are rounded.
        has_mtp: Whether a head of the model's own drafts; GGUF files are read without one.

    Raises: ModelLoadError: it is damaged, or of a kind that is not read.
    """
    if isinstance(model, Path) and model.is_dir():
        return _summarize_directory(model, quantization, float_bytes, has_mtp)
    metadata, tensors = read_files(model) if isinstance(model, Path) else model.header
    config = build_config(metadata, tensors)
    weights: dict[FileType, int] = {}
    matrices: dict[str, int] = {}
    for tensor in tensors.values():
        check_type(tensor, allow_requantization=allow_requantization)
        size = math.prod(tensor.shape)
        weights[tensor.type] = weights.get(tensor.type, 0) + size
        if len(tensor.shape) > 1:
            matrices[tensor.type.name] = matrices.get(tensor.type.name, 0) + size
    # As in `_from_gguf` of selection.py: a quantization is for files of plain numbers, but for int8.
    is_plain = all(kind in (FileType.F32, FileType.F16, FileType.BF16) for kind in weights)
    in_dtype = 16 if float_bytes == 2 and is_plain else None
    told = _BITS.get(quantization, in_dtype) if is_plain or quantization == "int8" else None
    bits = sum(count * _held_bits(kind, told) for kind, count in weights.items())
    files = {metadata.path, *(tensor.path for tensor in tensors.values())}
    summary = _summary(config, matrices, sum(weights.values()), files, bits, float_bytes, is_gguf=True)
    told_type = metadata.values.get("general.file_type")
    if told_type in _FILE_TYPES:  # as people name the file: Q4_K_M has three types
        summary = replace(summary, formats=(_FILE_TYPES[told_type],))
    return summary


def _held_bits(kind: FileType, told: float | None) -> float:
    held = HELD_BITS.get(kind, _ROUNDED_BITS)
    return held if told is None else told


def _summarize_directory(path: Path, quantization: Quantization, float_bytes: int, has_mtp: bool) -> ModelSummary:
    config = ModelDirectory(path).config()
    source = path / "config.json"
    codes = scaled_codes.read_codes(config, source)
    if codes is None:
        refuse_quantized(config, source)
    sizes: dict[str, int] = {}
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        for name, number_format, count in _stored_weights(file):
            if name.startswith("mtp.") and not has_mtp:
                continue
            if codes is not None and codes.is_code(name, number_format):
                number_format, count = codes.kind.name, count * codes.codes_of_element
            elif codes is not None and codes.is_companion(name):
                continue  # they are counted with their codes
            sizes[number_format] = sizes.get(number_format, 0) + count
    told = _BITS.get(quantization, 8 * float_bytes if float_bytes == 2 else None)
    in_dtype = {each: told or _STORED_BITS.get(each, 32) for each in sizes}
    if codes is not None:
        in_dtype[codes.kind.name] = codes.kind.held_bits
    bits = sum(count * in_dtype[each] for each, count in sizes.items())
    return _summary(config, sizes, sum(sizes.values()), files, bits, float_bytes, has_mtp=has_mtp)


def _stored_weights(path: Path) -> Iterable[tuple[str, str, int]]:
    """Yield name, number format and size of each tensor. Source: https://huggingface.co/docs/safetensors/index#format."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ModelLoadError(f"{path} is truncated, or damaged")
            header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                yield name, str(tensor["dtype"]), math.prod(tensor["shape"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{path} has a damaged header") from error


def _summary(
    config: Mapping[str, object],
    sizes: Mapping[str, int],
    num_weights: int,
    files: Iterable[Path],
    bits: float,
    float_bytes: int,
    *,
    is_gguf: bool = False,
    has_mtp: bool = False,
) -> ModelSummary:
    architectures = config.get("architectures")
    text = config.get("text_config")
    of_text = {**config, **text} if isinstance(text, dict) else config

    def number(name: str, default: int = 0) -> int:
        value = of_text.get(name)
        return value if isinstance(value, int) and value > 0 else default

    num_heads = number("num_attention_heads")
    head_dim = number("head_dim", number("hidden_size") // max(1, num_heads))
    num_kv_heads = number("num_key_value_heads", num_heads)
    kinds = _layer_kinds(of_text)
    num_layers = number("num_hidden_layers", len(kinds))
    num_states = _num_states(of_text, kinds, num_layers)
    num_attending = num_layers - num_states - sum(kinds.count(kind) for kind in ("mlp", "moe", "-", "E"))
    num_attending -= number("num_kv_shared_layers")
    # Gemma 4's layers without a window: what they have more, or less, than the others.
    sizes_of_whole = _heads_of_whole(of_text, num_kv_heads, head_dim)
    num_whole = kinds[: num_layers - number("num_kv_shared_layers")].count("full_attention")
    of_whole = num_whole * (math.prod(sizes_of_whole) - num_kv_heads * head_dim)
    values = number("linear_num_value_heads") * number("linear_value_head_dim")
    keys = number("linear_num_key_heads") * number("linear_key_head_dim")
    convolved = (number("linear_conv_kernel_dim", 1) - 1) * (2 * keys + values)
    convolved += (number("conv_L_cache", 1) - 1) * number("hidden_size")
    heads = number("mamba_n_heads", number("mamba_num_heads"))  # of Granite, or of Nemotron-H
    state_size = number("mamba_d_state", number("ssm_state_size"))
    head_size = number("mamba_head_dim", number("mamba_expand", 2) * number("hidden_size") // max(1, heads))
    outputs = heads * number("mamba_d_head", head_size)
    num_groups = number("mamba_n_groups", number("n_groups", 1))
    convolved += (number("mamba_d_conv", number("conv_kernel", 1)) - 1) * (outputs + 2 * num_groups * state_size)
    cached = 2 * ((num_attending + has_mtp) * num_kv_heads * head_dim + of_whole)
    if rank := number("kv_lora_rank"):  # keys and values are one vector
        cached = num_attending * (rank + number("qk_rope_head_dim"))
    return ModelSummary(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        formats=tuple(sorted(sizes, key=lambda name: -sizes[name])),
        num_weights=num_weights,
        file_bytes=sum(file.stat().st_size for file in files),
        held_bytes=int(bits / 8),
        token_bytes=cached * float_bytes,
        state_bytes=4 * num_states * (convolved + values * number("linear_key_head_dim") + outputs * state_size)
        + 4 * has_mtp * number("hidden_size"),
        max_model_len=number("max_position_embeddings", _CACHED_TOKENS),
        is_gguf=is_gguf,
    )


def _heads_of_whole(config: Mapping[str, object], num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return KV heads and head_dim of layers without a window, where they have others; see `read_gemma4`."""
    own: Mapping[object, object] = {
        "head_dim": config.get("global_head_dim"),
        "num_key_value_heads": config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None,
    }
    per_layer = config.get("per_layer_config")
    if isinstance(per_layer, dict):
        own = next((each for each in per_layer.values() if isinstance(each, dict)), {})
    sizes = own.get("num_key_value_heads"), own.get("head_dim")
    found = [size if isinstance(size, int) and size > 0 else None for size in sizes]
    return found[0] or num_kv_heads, found[1] or head_dim


def _layer_kinds(config: Mapping[str, object]) -> list[object]:
    """Return the kind of each layer, as config.json calls it; empty if it does not say."""
    names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    found = next((value for value in map(config.get, names) if isinstance(value, list | str)), ())
    return list(found)


def _num_states(config: Mapping[str, object], kinds: list[object], num_layers: int) -> int:
    """Return how many layers have a state, of a family in which some have one."""
    interval, attending = config.get("full_attention_interval"), config.get("full_attn_idxs")
    names = ("linear_num_value_heads", "conv_L_cache", "mamba_n_heads", "mamba_num_heads")
    if not any(config.get(name) for name in names):
        return 0
    if kinds:
        return sum(kinds.count(kind) for kind in ("linear_attention", "mamba", "conv", "M"))
    if config.get("conv_L_cache"):
        return max(0, num_layers - len(attending)) if isinstance(attending, list) else 0
    return num_layers - num_layers // (interval if isinstance(interval, int) and interval > 0 else 4)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes < 10e9 else f"{num_bytes / 1e9:.0f} GB"
