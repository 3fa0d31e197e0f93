"""The tensors of GGUF files for a decoder, which asks for them by the names of a Hugging Face checkpoint.

A quantized tensor is handed over as it lies in the file, which is mapped into memory; the place copies its codes.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    TensorNameMap,
    get_tensor_name_map,
)
from gguf.quants import dequantize

from executor_svc.checkpoint.gguf.config import has_interleaved_heads
from executor_svc.checkpoint.gguf.decoder_config import ROPE_FACTORS
from executor_svc.checkpoint.gguf.header import GGUFTensor
from executor_svc.checkpoint.gguf.rounding import HELD_BITS, RoundingErrors
from executor_svc.checkpoint.weight_map import BlockRows, TensorSource, TensorTarget
from executor_svc.checkpoint.weights import loading
from executor_svc.checkpoint.weights_digest import StoredTensor, WeightsDigest
from octavo_shared.errors import ModelLoadError
from octavo_shared.process.events import Event

_logger = logging.getLogger(__name__)

# Types that are numbers, as torch and safetensors call them.
FLOATS: Mapping[GGMLQuantizationType, tuple[torch.dtype, str]] = {
    GGMLQuantizationType.F32: (torch.float32, "F32"),
    GGMLQuantizationType.F16: (torch.float16, "F16"),
    GGMLQuantizationType.BF16: (torch.bfloat16, "BF16"),
}

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Of experts in one tensor: rows of the gates, then of what they gate.
_GATE_OR_UP = re.compile(r"(.*\.experts\.\d+\.)(gate|up)_proj\.weight")
# Of a layer that reads the cache of another: llama.cpp does not read them.
_KEYS = re.compile(r"blk\.(\d+)\.attn_(k|v|k_norm)\.weight")
# Of a delta net of Qwen3-Next: rows of b and a, key head by key head.
_KEY_HEAD_PART = re.compile(r"(.*\.linear_attn\.in_proj_)([ba])\.weight")
_INTERLEAVED = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of a Hugging Face checkpoint is: a whole one of a file, or of its experts one, or some rows."""

    tensor: GGUFTensor
    expert: int | None = None
    rows: torch.Tensor | None = None  # in this order; None: all, as they lie

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        if self.tensor.name.endswith(".ssm_norm.weight"):  # of Mamba-2 group by group
            shape = (math.prod(shape),)
        if self.tensor.name.endswith((".attn_k_b.weight", ".attn_v_b.weight")):  # one map of a head behind the other
            shape = (math.prod(shape[:-1]), shape[-1])
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it has a shape, but for dimensions of 1."""
        return [size for size in self.shape if size != 1] == [size for size in shape if size != 1]


class GGUFCheckpoint:
    """The weights of a model; stands for `executor_svc.checkpoint.weights.Checkpoint`.

    Args:
        path: The file, the first of several.
        architecture: As the file names it.
        config: What config.json would say.
        tensors: Of all files.
        allow_requantization: Whether weights that no format holds exactly are rounded.
        restores_codes: Whether codes become the numbers that they stand for.

    Attributes:
        rounding: What that has changed, once they are loaded.
    """

    def __init__(
        self,
        path: Path,
        architecture: str,
        config: Mapping[str, object],
        tensors: Mapping[str, GGUFTensor],
        *,
        allow_requantization: bool = False,
        restores_codes: bool = False,
    ) -> None:
        self._path = path
        self._architecture = architecture
        self._config = config
        self.tensors = tensors
        self.rounding = RoundingErrors()
        self._allow_requantization = allow_requantization
        self._restores_codes = restores_codes
        kind = next(kind for kind in MODEL_ARCH if MODEL_ARCH_NAMES[kind] == architecture)
        num_layers = config["num_hidden_layers"]
        assert isinstance(num_layers, int)
        self._names: TensorNameMap = get_tensor_name_map(kind, num_layers)
        self._maps = {file: _map(file) for file in sorted({tensor.path for tensor in tensors.values()})}

    @property
    def has_codes(self) -> bool:
        """Whether a tensor is quantized."""
        return any(tensor.type not in FLOATS for tensor in self.tensors.values())

    def type_of(self, name: str) -> GGMLQuantizationType:
        """Return the type of a tensor by its Hugging Face name. Raises: ModelLoadError: there is none."""
        return self._place(name).tensor.type

    def describe(self, name: str) -> str:
        """Return file and tensor, for a message, of a Hugging Face name."""
        return str(self._place(name).tensor)

    def load_into(
        self, targets: Mapping[str, TensorTarget], is_redundant: Callable[[str], bool], optional_prefix: str = ""
    ) -> None:
        """Fill `targets`; see `Checkpoint.load_into`. All shapes are checked before the first tensor is copied."""
        places = {name: self._place(name) for name in targets}
        used = {place.tensor.name for place in places.values()} | {*ROPE_FACTORS.values()}
        for tensor in self.tensors.values():
            if tensor.name not in used and not self._is_of_shared_cache(tensor.name):
                raise ModelLoadError(f"{tensor}, which the model does not have")
        for name, place in places.items():
            if not place.fits(targets[name].shape):
                raise ModelLoadError(
                    f"{place.tensor} has the shape {list(place.shape)}; its metadata require "
                    f"{list(targets[name].shape)}"
                )
        with loading(self._path, targets) as advance:
            for name in sorted(targets, key=lambda name: (places[name].tensor.path, places[name].tensor.begin)):
                source = self._source(places[name], targets[name].shape)
                for piece in targets[name].pieces:
                    # What families of Hugging Face add to a norm, llama.cpp has added when it wrote the file.
                    replace(piece, offset=0.0).copy_from(source)
                advance(targets[name].nbytes)
        if self.rounding.squares:
            _logger.warning(Event("weights_rounded", to="int8-a8", **self.rounding.describe()))

    def model_hash(self, quantization: str = "none") -> str:
        """Return a digest of what the header says, and the first row of each tensor; see `Checkpoint.model_hash`."""
        hasher = hashlib.sha256(self._config_bytes())
        for name, tensor in sorted(self.tensors.items()):
            hasher.update(f"{name} {tensor.type.name} {list(tensor.shape)}\n".encode())
            num_rows = max(1, len(self._bytes(tensor)) // max(1, tensor.num_bytes // tensor.shape[0]))
            hasher.update(self._bytes(tensor)[: tensor.num_bytes // num_rows].tobytes())
        if quantization != "none":
            hasher.update(quantization.encode())
        return hasher.hexdigest()

    def digest(self) -> WeightsDigest:
        """Return what hashes what the header says of the model, and all bytes of the tensors, in the background."""
        tensors = [
            StoredTensor(
                json.dumps([tensor.name, tensor.type.name, tensor.shape]).encode(),
                tensor.path,
                tensor.begin,
                tensor.begin + tensor.num_bytes,
            )
            for tensor in sorted(self.tensors.values(), key=lambda each: (each.path, each.begin))
        ]
        return WeightsDigest(self._config_bytes(), tensors)

    def holds_other_values(self, name: str, other: str) -> bool:
        """A head that is stored is the head: `tie_word_embeddings` says whether there is one."""
        return False

    def number_formats(self) -> set[str]:
        """Return the types of all tensors, as GGUF names them."""
        return {tensor.type.name for tensor in self.tensors.values()}

    def matrix_formats(self, besides: Sequence[str] = ()) -> set[str]:
        """Return the types of matrices."""
        return {tensor.type.name for tensor in self.tensors.values() if len(tensor.shape) > 1}

    def _config_bytes(self) -> bytes:
        return json.dumps([self._architecture, self._config], sort_keys=True).encode()

    def _place(self, name: str) -> _Place:
        """Return where a tensor is; experts are slices of one tensor, or in older files tensors of their own."""
        if (part := _KEY_HEAD_PART.fullmatch(name)) is not None and self._architecture == "qwen3next":
            return self._part_of_key_heads(self._place(f"{part[1]}ba.weight").tensor, part[2])
        if (part := _GATE_OR_UP.fullmatch(name)) is not None and self._architecture == "gemma4":
            return self._part_of_experts(name, part)
        name = name.replace(".router.scale", ".router.proj.scale")
        name = name.replace(".router.per_expert_scale", ".experts.down_proj.scale")
        name = (
            f"{name}.weight"
            if name.endswith((".sinks", ".A_log", ".D", ".layer_scalar"))
            else name.replace(".dt_bias", ".dt_proj.bias")
        )
        name = f"{name}.bias" if name.endswith(".expert_bias") else name
        name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
        match = _EXPERT.search(name)
        expert = None if match is None else int(match[1])
        merged, suffix = _EXPERT.sub(".experts.", name).rsplit(".", 1)
        of_mlp = merged.replace("backbone.", "model.").replace(".mixer.experts.", ".mlp.experts.")
        tried = (merged, merged.removeprefix("model."), of_mlp)
        found = next(filter(None, map(self._names.get_name, tried)), None)
        if found is None:
            raise ModelLoadError(f"{self._path} has the architecture {self._architecture}, which has no {name}")
        suffix = "" if found.endswith((".ssm_a", ".ssm_d")) else f".{suffix}"
        alone = f"{found.removesuffix('_exps')}.{expert}{suffix}"
        if expert is not None and alone in self.tensors:
            return _Place(self.tensors[alone])
        tensor = self.tensors.get(f"{found}{suffix}")
        if tensor is None:
            raise ModelLoadError(f"the tensor {found}{suffix} is missing from {self._path}")
        if expert is not None and (len(tensor.shape) < 2 or expert >= tensor.shape[0]):  # of a bias two
            raise ModelLoadError(
                f"{tensor} has the shape {list(tensor.shape)}; it must have {expert + 1} experts or more"
            )
        return _Place(tensor, expert, self._row_order(tensor))

    def _is_of_shared_cache(self, name: str) -> bool:
        num_layers, num_shared = self._config["num_hidden_layers"], self._config.get("num_kv_shared_layers", 0)
        assert isinstance(num_layers, int)
        assert isinstance(num_shared, int)
        match = _KEYS.fullmatch(name)
        return match is not None and int(match[1]) >= num_layers - num_shared

    def _part_of_experts(self, name: str, part: re.Match[str]) -> _Place:
        """Return the gate of an expert, or what it gates: half of the rows of one tensor, or one of its own."""
        merged = self._place(f"{part[1]}gate_up_proj.weight")
        num_rows = merged.shape[0] // 2
        first = num_rows * ("gate", "up").index(part[2])
        return replace(merged, rows=torch.arange(first, first + num_rows))

    def _part_of_key_heads(self, tensor: GGUFTensor, part: str) -> _Place:
        """Return the rows of b or a of each key head, which has both, one behind the other."""
        num_keys, num_values = (self._config[f"linear_num_{part}_heads"] for part in ("key", "value"))
        assert isinstance(num_keys, int)
        assert isinstance(num_values, int)
        if tensor.shape[0] != 2 * num_values:
            raise ModelLoadError(f"{tensor} has {tensor.shape[0]} rows; its metadata require {2 * num_values}")
        rows = torch.arange(2 * num_values).view(num_keys, 2, -1)[:, "ba".index(part)]
        return _Place(tensor, rows=rows.reshape(-1))

    def _bytes(self, tensor: GGUFTensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        return self._maps[tensor.path][tensor.begin : tensor.begin + tensor.num_bytes]

    def _source(self, place: _Place, shape: tuple[int, ...]) -> TensorSource:
        tensor, order = place.tensor, place.rows
        values = self._bytes(tensor)
        if place.expert is not None:
            size = len(values) // tensor.shape[0]
            values = values[place.expert * size : (place.expert + 1) * size]
        if tensor.type in FLOATS:
            floats = torch.from_numpy(values).view(FLOATS[tensor.type][0]).view(-1, *shape[1:])
            floats = floats if order is None else floats[order]
            return _logarithms(tensor, floats) if tensor.name.endswith(".ssm_a") else floats
        num_rows = shape[0] if order is None else tensor.shape[-2]
        if self._restores_codes:
            numbers = torch.from_numpy(dequantize(values.reshape(num_rows, -1), tensor.type)).view(-1, *shape[1:])
            return numbers if order is None else numbers[order]
        rounding = self.rounding if self._allow_requantization and tensor.type not in HELD_BITS else None
        return Blocks(tensor, torch.from_numpy(values).view(num_rows, -1), order, rounding)

    def _row_order(self, tensor: GGUFTensor) -> torch.Tensor | None:
        """Return which row each row of queries or keys is. None: they lie as transformers has them."""
        field = next((field for part, field in _INTERLEAVED.items() if part in tensor.name), None)
        if field is None or not has_interleaved_heads(self._architecture):
            return None
        num_heads = self._config[field]
        assert isinstance(num_heads, int)
        # [head, pair, member of the pair] -> [head, member of the pair, pair]
        return torch.arange(tensor.shape[0]).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantized matrix in its file; indexing returns where a part lies."""

    tensor: GGUFTensor
    blocks: torch.Tensor  # [num_rows, num_bytes] uint8
    order: torch.Tensor | None
    rounding: RoundingErrors | None = None  # see `BlockRows`

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> BlockRows:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        blocks, order = self.blocks, self.order
        if columns:
            block_inputs, block_bytes = GGML_QUANT_SIZES[self.tensor.type]
            begin, end = (place // block_inputs * block_bytes for place in (columns[0].start, columns[0].stop))
            if columns[0].start % block_inputs or columns[0].stop % block_inputs:
                raise ModelLoadError(
                    f"{self.tensor} cannot be shared among so many ranks: one would have inputs "
                    f"{columns[0].start} to {columns[0].stop}, which are not whole blocks of {block_inputs}; lower --tp"
                )
            blocks = blocks[:, begin:end]
        if order is None:
            blocks = blocks[rows]
        else:
            order = order[rows].contiguous()
        kind = self.tensor.type
        return BlockRows(str(self.tensor), blocks, int(kind), order, self.rounding, kind in HELD_BITS)


def _logarithms(tensor: GGUFTensor, speeds: torch.Tensor) -> torch.Tensor:
    """Return the A_log of a layer with a state, of which llama.cpp has -exp(A_log)."""
    if not bool((speeds < 0).all()):
        raise ModelLoadError(f"{tensor} has a value that is not below 0")
    return speeds.double().neg().log().float()


def _map(path: Path) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    try:
        # "c": nothing here writes, but torch warns of memory that could not be written.
        return np.memmap(path, np.uint8, mode="c")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be mapped into memory: {error}") from error
