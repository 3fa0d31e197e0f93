"""Which code runs a model: our own, or transformers' on our paged attention."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from executor_svc.adapters.slots import AdapterSlots
from executor_svc.attention.cache_format import CACHE_DTYPES, FP8, choose_cache_dtype
from executor_svc.attention.interface import AttentionBackend
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.attention.rules import AttentionNeeds
from executor_svc.attention.selection import ChosenBackend, choose_backend
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.checkpoint.cache_scales import read_cache_scales
from executor_svc.checkpoint.gguf.model import GGUFModel
from executor_svc.checkpoint.model import Model
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.scaled_codes import MXFP4
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.config import ModelConfig, WeightNames
from executor_svc.models.families import parse_config
from executor_svc.models.file_formats import LONG_INPUTS, CodeFormats, FileFormats, ScaledFormats
from executor_svc.models.kernels import (
    ChosenModel,
    ComputePath,
    compute_path,
    describe_kernels,
    find_library,
    make_attention,
    make_model,
    why_no_products,
)
from executor_svc.models.sharding import Shard
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from octavo_shared.errors import ModelLoadError, UnknownArchitectureError, UnsupportedModelError
from octavo_shared.process.events import Event

if TYPE_CHECKING:  # its rules need pydantic, which a machine that only measures may lack
    from executor_svc.config import ExecutorConfig

_logger = logging.getLogger(__name__)

_LOOK_UP = "set --draft-method prompt-lookup"


def choose_model(
    directory: Model,
    config: ExecutorConfig,
    device: torch.device,
    group: TensorParallelGroup = SINGLE_RANK,
) -> ChosenModel:
    """Return the model of a directory or file: with our own code if that can run it, else with transformers'.

    Raises: ModelLoadError: neither can, or not as `config` wants it.
    """
    chosen, names = _choose_model(directory, config, device, group)
    scales: Sequence[tuple[float, float]] = ()
    if chosen.cache_dtype in FP8 and isinstance(directory, ModelDirectory):
        scales = scales_of_cache(Checkpoint(directory.path), chosen, names)
    return replace(chosen, cache_scales=scales)


def scales_of_cache(checkpoint: Checkpoint, chosen: ChosenModel, names: WeightNames) -> Sequence[tuple[float, float]]:
    """Return the scales that a checkpoint has for an FP8 cache of a model; see `read_cache_scales`."""
    return read_cache_scales(checkpoint, names.qkv[0].rpartition(".")[0], chosen.model.shape.cached_layers)


def _choose_model(
    directory: Model, config: ExecutorConfig, device: torch.device, group: TensorParallelGroup
) -> tuple[ChosenModel, WeightNames]:
    """Return the model, and the names of its tensors."""
    try:
        model_config = read_model_config(directory, config)
    except UnsupportedModelError as reason:
        if isinstance(directory, GGUFModel):
            raise ModelLoadError(f"{reason}; a GGUF file needs Octavo's own decoder") from reason
        return _from_transformers(directory, config, device, reason), WeightNames()
    if isinstance(directory, GGUFModel):
        return _from_gguf(directory, model_config, config, device, group), model_config.names
    model_config = _with_its_own_head(directory, model_config, is_told=group.rank == 0)
    checkpoint = Checkpoint(directory.path)
    if model_config.encoder is not None:
        refuse_other_embeddings(checkpoint, directory.path, model_config)
        if model_config.has_logits_bias and not checkpoint.has(model_config.names.logits_bias):  # it is of zeros
            model_config = replace(model_config, has_logits_bias=False)
    if model_config.uses_mtp and not checkpoint.has(f"{model_config.names.mtp_projection}.weight"):
        raise ModelLoadError(f"draft_method is mtp, but {directory.source.parent} has no head for it: {_LOOK_UP}")
    if codes := checkpoint.first_codes():
        return _from_codes(checkpoint, codes, model_config, config, device, group), model_config.names
    in_bfloat16 = config.quantization == "none" and set(matrix_formats(checkpoint, model_config).values()) == {"BF16"}
    chosen = choose_decoder(model_config, config, device, group, is_stored_in_bfloat16=in_bfloat16)
    return chosen, model_config.names


def has_kernels_for_codes(device: torch.device) -> bool:
    """Return whether a device multiplies with the codes of a GGUF file."""
    return device.type == "cpu"


def _from_gguf(
    model: GGUFModel,
    model_config: ModelConfig,
    config: ExecutorConfig,
    device: torch.device,
    group: TensorParallelGroup,
) -> ChosenModel:
    """Return a model with the formats of its file; files of plain numbers are quantized as any checkpoint is.

    Where there are no kernels for codes, they are restored as they are loaded.
    """
    checkpoint = model.checkpoint()
    has_kernels = has_kernels_for_codes(device)
    if checkpoint.has_codes and config.quantization not in (("none", "int8") if has_kernels else ("none",)):
        can_be_long = has_kernels and {tensor.type for tensor in checkpoint.tensors.values()} <= LONG_INPUTS
        instead = ", or set it to int8 for activations in 16 bits" if can_be_long else ""
        raise ModelLoadError(
            f"quantization is {config.quantization}, but the weights of {model.path} are quantized already; remove "
            f"--quantization{instead}"
        )
    is_rounded = config.quantization != "none" or config.compute_dtype != "float32"
    if not has_kernels or (not checkpoint.has_codes and is_rounded):
        return choose_decoder(model_config, config, device, group)
    stored = FileFormats(
        checkpoint,
        has_long_inputs=checkpoint.has_codes and config.quantization == "int8",
        allow_requantization=config.allow_requantization,
    )
    config = config.model_copy(update={"quantization": "none"})
    return choose_decoder(model_config, config, device, group, stored=stored)


def _from_codes(
    checkpoint: Checkpoint,
    first: str,
    model_config: ModelConfig,
    config: ExecutorConfig,
    device: torch.device,
    group: TensorParallelGroup,
) -> ChosenModel:
    """Return a model with the codes of its checkpoint as they are; `first` names a tensor of them.

    Where there are no kernels for MXFP4, it is restored as it is loaded: float32 and bfloat16 have all its values. So
    it is on a GPU, where experts, which alone have it, are multiplied in floats.
    """
    assert checkpoint.codes is not None, "it has codes"
    kind = checkpoint.codes.kind.name
    if config.quantization != "none":
        raise ModelLoadError(
            f"quantization is {config.quantization}, but {first} is {kind}, which is quantized already; remove "
            "--quantization"
        )
    reason = why_no_products(device, config.cpu_kernels)
    if (reason or device.type != "cpu") and checkpoint.codes.kind == MXFP4:
        return choose_decoder(model_config, config, device, group)
    if reason and (device.type != "cpu" or not config.allow_requantization):
        round_it = "set --allow-requantization to round it to int8-a8, or " if device.type == "cpu" else ""
        needed = "Triton on a GPU" if device.type == "cuda" else "the kernels in C on a CPU"
        raise ModelLoadError(
            f"{first} is {kind}, which needs {needed}, but {reason}; {round_it}use the unquantized checkpoint"
        )
    return choose_decoder(model_config, config, device, group, stored=ScaledFormats(checkpoint, is_held=not reason))


def _with_its_own_head(directory: ModelDirectory, model_config: ModelConfig, *, is_told: bool) -> ModelConfig:
    """Return the configuration with a head that is not the embedding, if the checkpoint has another one.

    config.json may say that they are one: what is stored counts, as in transformers.

    Raises: ModelLoadError: a file is missing or damaged.
    """
    if not (model_config.tie_word_embeddings and model_config.has_head) or not has_head_of_its_own(
        Checkpoint(directory.path), model_config
    ):
        return model_config
    if is_told:
        _logger.warning(
            Event(
                "head_is_not_embedding",
                directory=str(directory.path),
                tensor=f"{model_config.names.head}.weight",
                reason="config.json has tie_word_embeddings, but the stored head differs; the stored head is used",
            )
        )
    return replace(model_config, tie_word_embeddings=False)


def refuse_other_embeddings(checkpoint: Checkpoint, folder: Path, model_config: ModelConfig) -> None:
    """Raise ModelLoadError if an encoder or its decoder has another embedding of tokens than the shared one."""
    shared = f"{model_config.names.embedding}.weight"
    for stack in ("encoder", "decoder"):
        own = shared.replace("shared.weight", f"{stack}.embed_tokens.weight")
        if checkpoint.holds_other_values(shared, own):
            raise ModelLoadError(
                f"{folder} has other values in {own} than in {shared}; an encoder and a decoder with "
                "embeddings of their own are not supported"
            )


def has_head_of_its_own(checkpoint: Checkpoint, model_config: ModelConfig) -> bool:
    """Return whether a checkpoint has a head that is not the embedding. Raises: ModelLoadError: a file is damaged."""
    names = model_config.names
    embeddings = {names.embedding, names.embedding.removeprefix(names.optional_prefix)}
    head = f"{names.head}.weight"
    return any(checkpoint.holds_other_values(f"{embedding}.weight", head) for embedding in embeddings)


def matrix_formats(checkpoint: Checkpoint, model_config: ModelConfig) -> dict[str, str]:
    """Return the number formats of matrices, but for routers, which are kept in float32.

    Raises: ModelLoadError: a file is missing or damaged.
    """
    layers = range(model_config.num_hidden_layers)
    routers = {f"{model_config.names.router.format(layer=layer)}.weight" for layer in layers}
    return checkpoint.matrix_formats(besides=routers)


def _with_drafts(model_config: ModelConfig, directory: Model, config: ExecutorConfig) -> ModelConfig:
    """Return the configuration with a head that drafts in use, if that is asked for.

    Raises: ModelLoadError: it is asked for, and this is no model that has one.
    """
    if config.draft_method != "mtp" or not config.max_draft_tokens:
        return model_config
    if isinstance(directory, GGUFModel):
        raise ModelLoadError(f"draft_method is mtp, which is read of safetensors alone: {_LOOK_UP}")
    if model_config.mtp is None or not model_config.has_head:
        raise ModelLoadError(
            f"draft_method is mtp, but {directory.source} is of no family that has a head for it: {_LOOK_UP}"
        )
    return replace(model_config, uses_mtp=True)


def choose_decoder(
    model_config: ModelConfig,
    config: ExecutorConfig,
    device: torch.device,
    group: TensorParallelGroup = SINGLE_RANK,
    *,
    is_stored_in_bfloat16: bool = False,
    stored: CodeFormats | None = None,
) -> ChosenModel:
    """Return a model of a family, which our own decoder runs; see `make_model`.

    Raises: ModelLoadError: not as `config` wants it.
    """
    dtype = torch_dtype(config.dtype)
    shard = Shard.of(model_config, group.rank, group.size)
    layers = [
        # The sinks and biases themselves come with the weights.
        shard.attention_layer(
            layer,
            torch.empty(shard.num_heads(layer), device="meta") if layer.has_sinks else None,
            None if layer.distance_buckets is None else torch.empty(shard.num_heads(layer), 1, device="meta"),
        )
        for layer in model_config.layers
        if layer.attends
    ]
    first = model_config.layers[0]
    sizes = (shard.num_heads(first), shard.num_kv_heads(first), max(each.head_dim for each in model_config.layers))
    cache = CACHE_DTYPES.get(config.kv_cache_dtype)
    needs = AttentionNeeds(dtype, *sizes, layers, _capability_of(device), cache, first.value_begin)
    chosen = choose_backend(
        config.attention_backend, needs, config.block_size_tokens, is_invariant=config.numerics == "invariant"
    )
    made = make_model(
        model_config,
        dtype,
        device,
        cpu_kernels=config.cpu_kernels,
        quantization=config.quantization,
        compute_dtype=config.compute_dtype,
        is_stored_in_bfloat16=is_stored_in_bfloat16,
        group=group,
        attention=_make_attention(chosen, config),
        numerics=config.numerics,
        stored=stored,
        adapters=AdapterSlots(config.num_adapter_slots, config.max_adapter_rank, device)
        if config.num_adapter_slots
        else None,
    )
    if model_config.uses_mtp and not isinstance(made.attention, NativeAttentionBackend):
        reason = made.path.why_not_c or "they do not attend here"
        raise ModelLoadError(f"draft_method is mtp, which needs the kernels in C, but {reason}: {_LOOK_UP}")
    if group.rank == 0:
        _log_attention(chosen, made.attention)
    made = replace(
        made,
        block_size=chosen.block_size,
        kv_cache_dtype=choose_cache_dtype(config.kv_cache_dtype, dtype, in_bfloat16=config.compute_dtype == "bfloat16"),
    )
    return _checked(made, config)


def torch_dtype(name: str) -> torch.dtype:
    """Return a number format by its name in the settings."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def read_model_config(directory: Model, config: ExecutorConfig) -> ModelConfig:
    """Return what our own code needs to know of a model.

    Raises:
        UnsupportedModelError: our code cannot run it, transformers' might.
        ModelLoadError: nothing can run it as `config` wants it.
    """
    try:
        model_config = parse_config(directory.config(), directory.source)
    except UnsupportedModelError as reason:
        wanted = {
            f"tp is {config.tp}": config.tp > 1,
            f"quantization is {config.quantization}": config.quantization != "none",
            f"compute_dtype is {config.compute_dtype}": config.compute_dtype != "float32",
            f"draft_method is {config.draft_method}": config.draft_method != "prompt-lookup",
            "--lora or --lora-dir is set": config.num_adapter_slots > 0,
        }
        for setting in (setting for setting, is_wanted in wanted.items() if is_wanted):
            raise ModelLoadError(f"{setting}, which needs Octavo's own decoder; but {reason}") from reason
        raise
    model_config = _with_drafts(model_config, directory, config)
    if model_config.encoder is not None:
        _check_encoder(directory, config)
    Shard.of(model_config, rank=0, size=config.tp)
    most = model_config.max_positions
    if most is not None and (config.max_model_len or model_config.max_position_embeddings) > most:
        raise ModelLoadError(
            f"{directory.source} has a rotary embedding of type longrope: all tokens of a sequence would change when "
            f"it becomes longer than {most} tokens; set max_model_len to {most} or less"
        )
    return model_config


def _check_encoder(directory: Model, config: ExecutorConfig) -> None:
    """Raise ModelLoadError if settings ask of a model with an encoder what it does not have."""
    wanted = {
        "device is cuda": config.device == "cuda",
        "--lora or --lora-dir is set": config.num_adapter_slots > 0,
        f"pooling is {config.pooling}": config.pooling not in ("auto", "off"),
    }
    for setting in (setting for setting, is_wanted in wanted.items() if is_wanted):
        raise ModelLoadError(
            f"{setting}, but {directory.source} has an encoder and a decoder: it generates on a CPU, without adapters"
        )


def _from_transformers(
    directory: ModelDirectory,
    config: ExecutorConfig,
    device: torch.device,
    reason: UnsupportedModelError,
) -> ChosenModel:
    # Seconds, which most models need not wait.
    from executor_svc.models.transformers_model import load_transformers_model

    _logger.info(Event("model_code", code="transformers", reason=str(reason)))
    dtype = torch_dtype(config.dtype)
    found = find_library(dtype, device, config.cpu_kernels)
    try:
        model = load_transformers_model(directory.path, dtype, device)
    except ModelLoadError as error:
        if isinstance(reason, UnknownArchitectureError):
            raise
        raise ModelLoadError(f"{error}; Octavo's own decoder cannot run it either: {reason}") from error
    facts = model.attention
    sizes = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
    cache = CACHE_DTYPES.get(config.kv_cache_dtype)
    needs = AttentionNeeds(dtype, *sizes, facts.layers, _capability_of(device), cache)
    chosen = choose_backend(config.attention_backend, needs, config.block_size_tokens)
    attention = _make_attention(chosen, config) or make_attention(found.library)
    _log_attention(chosen, attention)
    in_use = replace(found, reason=found.reason or "Octavo's own decoder does not have this model")
    kernels = describe_kernels(in_use, attention, device, others="transformers")
    path = compute_path(device, dtype, "transformers", attention, in_use)
    chosen_model = ChosenModel(
        model,
        attention,
        path,
        lambda _: None,
        kernels,
        library=found.library,
        block_size=chosen.block_size,
        kv_cache_dtype=choose_cache_dtype(config.kv_cache_dtype, dtype),
    )
    return _checked(chosen_model, config)


def _checked(chosen: ChosenModel, config: ExecutorConfig) -> ChosenModel:
    """Return the model. Raises: ModelLoadError: it is not invariant, and is to be."""
    if config.numerics == "invariant" and chosen.why_not_invariant is not None:
        settings = _invariant_settings(chosen.path, config)
        change = f"{settings}, or remove --numerics" if settings else "remove --numerics"
        raise ModelLoadError(f"--numerics invariant is not possible: {chosen.why_not_invariant}; {change}")
    return chosen


def _invariant_settings(path: ComputePath, config: ExecutorConfig) -> str:
    """Say which settings keep a model from being invariant, and what to do with them; empty: none is known."""
    is_cpu = path.device.type == "cpu"
    changes = {
        "set --dtype float32": is_cpu and path.dtype != torch.float32,
        "set --cpu-kernels native or auto": is_cpu and config.cpu_kernels == "torch",
        "set --attention-backend auto": config.attention_backend != "auto",
        "remove --quantization": not is_cpu and config.quantization != "none",
    }
    needed = [change for change, is_needed in changes.items() if is_needed]
    return " and ".join(needed) if path.dense != "transformers" else ""


def _capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device; None: it is a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _make_attention(chosen: ChosenBackend, config: ExecutorConfig) -> AttentionBackend | None:
    """Make the attention that was chosen; None: `cpu_kernels` decides. Raises: see `ChosenBackend.make`."""
    if config.device == "cpu" and config.attention_backend == "auto":
        return None
    if config.compute_dtype == "bfloat16":  # that is for a CPU, which has no other
        return TorchAttentionBackend(in_bfloat16=True)
    return chosen.make()


def _log_attention(chosen: ChosenBackend, attention: AttentionBackend) -> None:
    name = "native" if isinstance(attention, NativeAttentionBackend) else chosen.rules.name
    _logger.info(Event("attention_backend", name=name, block_size_tokens=chosen.block_size, reason=chosen.reason))
