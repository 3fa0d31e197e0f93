"""A LoRA adapter in a folder, as peft writes it: adapter_config.json and adapter_model.safetensors.

The folder comes from a third party. Nothing is read of a tensor before its name, number format and shape are known to
fit the model, so memory and time are bounded by what the model can take.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.model_file import read_model_file, real_model_file

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_MOST_CONFIG_BYTES: Final = 2**20
_MOST_PATTERNS: Final = 10_000
_FORMATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TENSOR: Final = re.compile(r"base_model\.model\.([\w.]{1,500})\.lora_(A|B)\.weight")
_PATTERN: Final = re.compile(r"\^?[\w.]{1,500}")

# What changes more than the products of linear layers, by the field that says so.
_REFUSED: Final = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "lora_bias",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
)
# These write other base weights beside the adapter; their adapters have to be converted.
_CHANGED_BASES: Final = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What an adapter adds to one tensor of a model: scale * B @ A."""

    a: torch.Tensor  # [rank, num_inputs]
    b: torch.Tensor  # [num_outputs, rank]
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on the host.

    Attributes:
        digest: SHA-256 of its configuration and its tensors, 64 hexadecimal digits: whatever file held them, and in
            whatever order, equal digests are equal adapters.
        pairs: By the tensor of the model that they change, without `.weight`.
    """

    digest: str
    pairs: Mapping[str, LowRankPair]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(len(pair.a) for pair in self.pairs.values())


def read_adapter(directory: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> Adapter:
    """Read an adapter for a model.

    Args:
        directory: With the two files.
        shapes: Outputs and inputs of each tensor of the model that can have an adapter, without `.weight`.
        max_rank: The largest rank that is taken.

    Raises: ModelLoadError: a file is missing or damaged, or the adapter is not for this model, or does more than add
        products of low rank to linear layers.
    """
    config_path = directory / CONFIG_FILE
    config = _read_config(config_path)
    scales = _Scales(config, config_path)
    path = directory / WEIGHTS_FILE
    hasher = hashlib.sha256(b"octavo adapter 1")
    _add(hasher, json.dumps(config, sort_keys=True).encode())
    halves: dict[str, dict[str, torch.Tensor]] = {}
    with _opened(path) as file:
        names = sorted(file.keys())  # type: ignore[no-untyped-call]  # the library has no types
        for name in names:
            target, half = _target_of(name, path, shapes)
            tensor = file.get_slice(name)  # type: ignore[no-untyped-call]
            shape, number_format = list(tensor.get_shape()), tensor.get_dtype()
            rank = scales.rank_of(target)
            if rank > max_rank:
                raise ModelLoadError(f"{config_path}: {target} has rank {rank}; max_adapter_rank is {max_rank}")
            outputs, inputs = shapes[target]
            expected = [rank, inputs] if half == "A" else [outputs, rank]
            if shape != expected:
                raise ModelLoadError(f"{path}: the tensor {name} has shape {shape}; the model and rank need {expected}")
            if number_format not in _FORMATS:
                raise ModelLoadError(f"{path}: the tensor {name} has the number format {shown(number_format)}")
            values = tensor[:].contiguous()
            if not bool(torch.isfinite(values).all()):
                raise ModelLoadError(f"{path}: the tensor {name} holds a value that is not finite")
            _add(hasher, json.dumps([name, number_format, shape]).encode())
            _add(hasher, values.view(torch.uint8).numpy().data)
            halves.setdefault(target, {})[half] = values
    if not halves:
        raise ModelLoadError(f"{path} contains no tensor")
    pairs = {}
    for target, found in halves.items():
        if len(found) < 2:
            raise ModelLoadError(f"{path} has one of the two tensors of {target} only")
        pairs[target] = LowRankPair(found["A"], found["B"], scales.of(target))
    return Adapter(hasher.hexdigest(), pairs)


def _add(hasher: "hashlib._Hash", part: bytes | memoryview) -> None:
    size = part.nbytes if isinstance(part, memoryview) else len(part)
    hasher.update(size.to_bytes(8, "little"))
    hasher.update(part)


def _target_of(name: str, path: Path, shapes: Mapping[str, tuple[int, int]]) -> tuple[str, str]:
    match = _TENSOR.fullmatch(name)
    if match is None:
        kinds = {
            "lora_embedding_": "embeddings",
            ".base_layer.weight": "embeddings or a head",  # peft saves their base beside what it adds
            "lora_magnitude_vector": "magnitudes (DoRA)",
            ".bias": "biases",
        }
        what = next((kind for mark, kind in kinds.items() if mark in name), "what is no half of a low-rank pair")
        raise ModelLoadError(f"{path} contains the tensor {shown(name)}: {what} of an adapter cannot be served")
    target, half = match.groups()
    if target not in shapes:
        raise ModelLoadError(
            f"{path} changes {shown(target)}, which this model does not have or which no adapter can change here: only "
            "linear layers of attention and of dense MLPs can be"
        )
    return target, half


@contextmanager
def _opened(path: Path) -> "Iterator[safe_open]":
    try:
        real = real_model_file(path)
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}; only adapters in safetensors are served") from error
    try:
        with safe_open(real, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read as safetensors: {error}") from error


def _read_config(path: Path) -> dict[str, object]:
    try:
        if path.stat().st_size > _MOST_CONFIG_BYTES:
            raise ModelLoadError(f"{path} is larger than {_MOST_CONFIG_BYTES} bytes")
        config = json.loads(read_model_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} does not contain a JSON object")
    if config.get("peft_type") != "LORA":
        raise ModelLoadError(f"{path}: peft_type is {shown(str(config.get('peft_type')))}; only LORA is served")
    for field in _REFUSED:
        if config.get(field):
            raise ModelLoadError(f"{path} sets {field}, which is not served")
    if config.get("bias", "none") != "none":
        raise ModelLoadError(f"{path}: bias is {shown(str(config['bias']))}; only none is served")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGED_BASES):
        raise ModelLoadError(
            f"{path}: init_lora_weights is {shown(start)}, which changes the base too; convert the adapter with peft's "
            "path_initial_model_for_weight_conversion"
        )
    return config


class _Scales:
    """The rank and the scale of each tensor, as the configuration says them.

    A pattern names a module by the end of its name, as in peft; expressions beyond that are refused.
    """

    def __init__(self, config: Mapping[str, object], path: Path) -> None:
        self._path = path
        self._rank = self._number("r", config.get("r"))
        self._alpha = self._number("lora_alpha", config.get("lora_alpha", 8))
        self._ranks = self._patterns(config, "rank_pattern")
        self._alphas = self._patterns(config, "alpha_pattern")
        self._is_stabilized = bool(config.get("use_rslora"))

    def rank_of(self, target: str) -> int:
        rank = _find(self._ranks, target, self._rank)
        if rank != int(rank) or rank < 1:
            raise ModelLoadError(f"{self._path}: the rank of {target} is {rank}; it must be a whole number from 1 on")
        return int(rank)

    def of(self, target: str) -> float:
        rank = self.rank_of(target)
        return _find(self._alphas, target, self._alpha) / (math.sqrt(rank) if self._is_stabilized else rank)

    def _patterns(self, config: Mapping[str, object], field: str) -> dict[str, tuple[int, float]]:
        """Return the number of each pattern, with its place in the file."""
        patterns = config.get(field) or {}
        if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
            raise ModelLoadError(f"{self._path}: {field} is not an object of at most {_MOST_PATTERNS} names")
        for pattern in patterns:
            if not _PATTERN.fullmatch(pattern):
                raise ModelLoadError(f"{self._path}: {field} has {shown(pattern)}, which is no name of a module")
        return {pattern: (place, self._number(field, value)) for place, (pattern, value) in enumerate(patterns.items())}

    def _number(self, field: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            raise ModelLoadError(f"{self._path}: {field} is {shown(str(value))}; it must be a number above 0")
        return float(value)


def _find(patterns: Mapping[str, tuple[int, float]], target: str, default: float) -> float:
    """Return the number of the first pattern that `target` ends with, or, with ^, that it is."""
    parts = target.split(".")
    names = [f"^{target}", *(".".join(parts[begin:]) for begin in range(len(parts)))]
    found = [patterns[name] for name in names if name in patterns]
    return min(found)[1] if found else default
