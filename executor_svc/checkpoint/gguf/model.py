"""A GGUF file, or several that are one model, as an executor sees it: like a directory of Hugging Face."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType

from executor_svc.checkpoint.gguf.config import build_config
from executor_svc.checkpoint.gguf.decoder_config import ROPE_FACTORS
from executor_svc.checkpoint.gguf.files import read_files
from executor_svc.checkpoint.gguf.header import GGUFTensor
from executor_svc.checkpoint.gguf.metadata import Metadata
from executor_svc.checkpoint.gguf.tokenizer import end_token_ids, tokenizer_files
from executor_svc.checkpoint.gguf.weights import GGUFCheckpoint
from executor_svc.checkpoint.model_directory import ModelDirectory, sampling_defaults
from executor_svc.checkpoint.pooling_modules import PoolingMode, PoolingModules
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.executor_info import TokenizerFile

# What `general.sampling` calls what a request may have.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# By the numbers of `pooling_type`.
_POOLING: Final[Mapping[int, PoolingMode | None]] = {0: None, 1: "mean", 2: "cls", 3: "last"}


class GGUFModel:
    """A model in GGUF files; the part of `ModelDirectory`.

    Raises: ModelLoadError: a file is damaged, or one of several is missing.
    """

    def __init__(self, path: Path) -> None:
        self._metadata, self._tensors = read_files(path)
        self.path = self._metadata.path
        self.source = self.path

    @property
    def header(self) -> tuple[Metadata, Mapping[str, GGUFTensor]]:
        """What `read_files` returns."""
        return self._metadata, self._tensors

    @cached_property
    def _config(self) -> dict[str, object]:
        config = build_config(self._metadata, self._tensors)
        rope = config["rope_parameters"]
        if isinstance(rope, dict) and "full_attention" in rope:  # of layers with a window there are none
            rope = rope["full_attention"]
        if isinstance(rope, dict) and rope.get("rope_type") in ("factors", "longrope"):
            found = {name: self._tensors[tensor] for name, tensor in ROPE_FACTORS.items() if tensor in self._tensors}
            rope |= {name: _read_factors(tensor) for name, tensor in found.items()}
        return config

    def config(self) -> dict[str, object]:
        """Return what config.json would say. Raises: ModelLoadError: a value is missing, wrong, or not supported."""
        return dict(self._config)

    def checkpoint(self, *, allow_requantization: bool = False, restores_codes: bool = False) -> GGUFCheckpoint:
        """Return the weights."""
        num_layers, num_blocks = self._config["num_hidden_layers"], self._metadata.integer("block_count")
        assert isinstance(num_layers, int)
        drafting = tuple(f"blk.{block}." for block in range(num_layers, num_blocks))  # layers that drafts need
        return GGUFCheckpoint(
            self.path,
            self._metadata.architecture,
            self._config,
            {name: tensor for name, tensor in self._tensors.items() if not name.startswith(drafting)},
            allow_requantization=allow_requantization,
            restores_codes=restores_codes,
        )

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a sequence: the ids that the file names, and the ends of turns that are tokens."""
        return end_token_ids(self._metadata)

    def pooling(self) -> PoolingModules | None:
        """Return how the file says that texts become vectors, which llama.cpp normalizes; None: it says nothing.

        Raises: ModelLoadError: that is not supported.
        """
        kind = self._metadata.integer("pooling_type", 0)
        if kind not in _POOLING:
            key = self._metadata.key("pooling_type")
            raise self._metadata.wrong(key, kind, "0, 1, 2 or 3 (none, mean, first or last token)")
        mode = _POOLING[kind]
        return None if mode is None else PoolingModules(mode, is_normalized=True)

    def sampling_defaults(self) -> dict[str, float]:
        """Return the sampling parameters that the file sets; the rest comes from a generation_config.json beside it.

        Raises: ModelLoadError: generation_config.json is damaged.
        """
        prefix = "general.sampling."
        found = {ours: self._metadata.values.get(f"{prefix}{theirs}") for theirs, ours in _SAMPLING.items()}
        # A float32 as the decimal that was written.
        written = {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}
        return ModelDirectory(self.path.parent).sampling_defaults() | sampling_defaults(written, self.path)

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return tokenizer.json and its companions. Raises: ModelLoadError: the tokenizer cannot be expressed."""
        return tokenizer_files(self._metadata)


def _read_factors(tensor: GGUFTensor) -> list[float]:
    """Return what divides the rotary frequencies."""
    if tensor.type != GGMLQuantizationType.F32 or len(tensor.shape) != 1:
        raise ModelLoadError(f"{tensor} is {tensor.type.name} {list(tensor.shape)}; it must be a vector of F32")
    values: list[float] = np.fromfile(tensor.path, "<f4", tensor.shape[0], offset=tensor.begin).tolist()
    return values
