"""Whose code runs a model: our own, or that of transformers on our paged attention."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor_svc.attention import AttentionBackend
from executor_svc.config import ExecutorConfig
from executor_svc.errors import ModelLoadError, UnsupportedModelError
from executor_svc.kernels import find_library, make_attention, make_model
from executor_svc.model_directory import ModelDirectory
from executor_svc.models import ModelConfig, parse_config
from executor_svc.models.language_model import LanguageModel
from executor_svc.models.sharding import Shard
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.weights import Checkpoint

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model and its attention. `load` fills the weights, if they are not there yet."""

    model: LanguageModel
    attention: AttentionBackend
    load: Callable[[Checkpoint], None]


def choose_model(
    directory: ModelDirectory,
    config: ExecutorConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorParallelGroup = SINGLE_RANK,
) -> ChosenModel:
    """Return the model of a directory: with our own code if that can run it, else with transformers'.

    Raises: ModelLoadError: neither can, or not as `config` wants it.
    """
    try:
        model_config = read_model_config(directory, config)
    except UnsupportedModelError as reason:
        return _from_transformers(directory, config, dtype, device, reason)
    model, attention = make_model(
        model_config,
        dtype,
        device,
        cpu_kernels=config.cpu_kernels,
        quantization=config.quantization,
        group=group,
    )
    return ChosenModel(model, attention, model.load)


def read_model_config(directory: ModelDirectory, config: ExecutorConfig) -> ModelConfig:
    """Return what our own code needs to know of a model.

    Raises:
        UnsupportedModelError: our code cannot run it, transformers' might.
        ModelLoadError: nothing can run it as `config` wants it.
    """
    try:
        model_config = parse_config(directory.config(), directory.path / "config.json")
    except UnsupportedModelError as reason:
        wanted = {f"tp is {config.tp}": config.tp > 1, "quantization is int8": config.quantization == "int8"}
        for setting in (setting for setting, is_wanted in wanted.items() if is_wanted):
            raise ModelLoadError(f"{setting}, which needs code of our own; but {reason}") from reason
        raise
    Shard.of(model_config, rank=0, size=config.tp)
    return model_config


def _from_transformers(
    directory: ModelDirectory,
    config: ExecutorConfig,
    dtype: torch.dtype,
    device: torch.device,
    reason: UnsupportedModelError,
) -> ChosenModel:
    # Seconds, which most models need not wait.
    from executor_svc.models.transformers_model import load_transformers_model

    _logger.info("event=model_code code=transformers reason=%r", str(reason))
    attention = make_attention(find_library(dtype, device, config.cpu_kernels))
    try:
        model = load_transformers_model(directory.path, dtype, device)
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}; our own code cannot run it either: {reason}") from error
    return ChosenModel(model, attention, lambda _: None)
