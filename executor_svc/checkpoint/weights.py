"""The safetensors files of a model, streamed into memory that the model has allocated.

A tensor is mapped from its file, the part that this rank needs is copied to its place (converted, packed or
quantized as the place wants it), and let go: there are never two copies of the model.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from safetensors import safe_open

from executor_svc.checkpoint.gguf.rounding import RoundingErrors
from executor_svc.checkpoint.model_directory import json_object, read_json_object
from executor_svc.checkpoint.mxfp4 import BLOCKS
from executor_svc.checkpoint.nvfp4 import Fp4Scales, Fp4Source, check_fp4_scales
from executor_svc.checkpoint.packed_codes import GroupScales, GroupSource, check_groups
from executor_svc.checkpoint.scaled_codes import MXFP4, NVFP4, UINT4, read_codes
from executor_svc.checkpoint.scaled_weights import ScaledSource, Scales, check_scales, unpacked_shape
from executor_svc.checkpoint.stacked_experts import (
    CodedStack,
    StackedTarget,
    scales_of,
    stack_experts,
    stack_layout,
    stack_of,
)
from executor_svc.checkpoint.tensor_files import find_tensors, open_tensors
from executor_svc.checkpoint.text_tower import (
    combined_architecture,
    is_of_another_tower,
    possible_names,
    text_config,
)
from executor_svc.checkpoint.weight_map import TensorTarget
from executor_svc.checkpoint.weights_digest import WeightsDigest, read_whole, tensors_in
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError
from octavo_shared.process.events import Event

logger = logging.getLogger(__name__)

# What is read as it is stored, as safetensors name it.
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
# Beside packed codes.
_SHAPE_NAME: Final = "weight_shape"
AnyScales = Scales | GroupScales | Fp4Scales
# Of two matrices that are compared: some MiB.
_ROWS_AT_ONCE = 1024


class Checkpoint:
    """The weights of a model directory: one safetensors file, or shards with an index.

    Args:
        directory: With config.json.
        allow_requantization: Whether codes are rounded where they are not held.
        restores_codes: Whether weights in MXFP4 become the numbers that they stand for.
        config_json: Counts as config.json if the directory has none; then files without an index may have any names.

    Attributes:
        rounding: What that has changed, once they are loaded.
        when_checked: Called by `load_into` once nothing is left to refuse, before the first tensor is copied.
        codes: How some weights are stored in codes; None: none are.

    Raises: ModelLoadError: a file is missing or damaged, or the index does not fit the shards.
    """

    def __init__(
        self,
        directory: Path,
        *,
        allow_requantization: bool = False,
        restores_codes: bool = False,
        config_json: bytes | None = None,
    ) -> None:
        self._directory = directory
        self._file_of, self._table_of_contents = find_tensors(directory, any_names=config_json is not None)
        self.when_checked: Callable[[], None] = lambda: None
        self.rounding = RoundingErrors()
        self._allow_requantization = allow_requantization
        self._restores_codes = restores_codes
        path = directory / "config.json"
        self._config_json = None if path.is_file() else config_json  # None: as the directory has it
        config = read_json_object(path) if path.is_file() else json_object(path, config_json or b"{}")
        of_text = text_config(config)
        self.codes = read_codes(of_text, path)
        self._is_combined = combined_architecture(config) is not None
        if self._is_combined:
            self._file_of = {name: path for name, path in self._file_of.items() if not is_of_another_tower(name)}
        self._stacks = stack_layout(of_text, self._file_of)

    def load_into(
        self, targets: Mapping[str, TensorTarget], is_redundant: Callable[[str], bool], optional_prefix: str = ""
    ) -> None:
        """Fill `targets`; a progress bar shows on standard error if that is a terminal.

        Args:
            targets: Where each tensor belongs, by name. Written in place, converted as it wants.
            is_redundant: Says of a name that is not in `targets` that the model does without it.
            optional_prefix: What checkpoints may leave out at the front of every name.

        Raises:
            ModelLoadError: a tensor is missing, unknown, or has another shape; names tensor and file.
        """
        if (
            optional_prefix
            and not self._is_combined
            and not any(name.startswith(optional_prefix) for name in self._file_of)
        ):
            targets = {name.removeprefix(optional_prefix): target for name, target in targets.items()}
        of_codes = self._names_of_codes()
        if self._stacks is not None:
            targets = stack_experts(targets, self._stacks, of_codes)
        targets = {self._stored(name): target for name, target in targets.items()}
        companions = {companion for name in of_codes for companion in self._companions(name)}
        self._check_names(targets, lambda name: name in companions or is_redundant(name))
        scales = self._read_scales(of_codes & targets.keys(), targets)
        self._check_tensors(targets, scales)
        self.when_checked()
        with loading(self._directory, targets) as advance:
            for path, names in self._names_by_file():
                with open_tensors(path) as file:
                    for name in names:
                        if name in targets:
                            self._copy_tensor(file, path, name, targets[name], scales.get(name))
                            advance(targets[name].nbytes)
        if self.rounding.squares:
            logger.warning(Event("weights_rounded", to="int8-a8", **self.rounding.describe()))

    def model_hash(self, quantization: str = "none") -> str:
        """Return the SHA-256 of config.json, byte for byte, then of every tensor by name, then of `quantization`.

        Executors of one fleet must agree on it, however the files are cut. Of a tensor, name, dtype,
        shape and the first row enter: all of it would double the time to load. So models that were
        trained apart have different hashes, but files that differ only in later rows do not.
        """
        hasher = hashlib.sha256(self.config_json())
        digests = []
        for path, names in self._names_by_file():
            with open_tensors(path) as file:
                digests += [(name, _tensor_digest(file, name)) for name in names]
        for _, digest in sorted(digests):
            hasher.update(digest)
        if quantization != "none":  # other weights
            hasher.update(quantization.encode())
        return hasher.hexdigest()

    def config_json(self) -> bytes:
        """Return config.json, byte for byte. Raises: ModelLoadError: it cannot be read."""
        return read_whole(self._directory / "config.json") if self._config_json is None else self._config_json

    def file_bytes(self) -> int:
        """Return the size of the files, in bytes."""
        return sum(path.stat().st_size for path in set(self._file_of.values()))

    def digest(self) -> WeightsDigest:
        """Return what hashes all bytes of the model, in the background."""
        return WeightsDigest(self.config_json(), tensors_in(self._file_of))

    def has(self, name: str) -> bool:
        """Whether there is a tensor of a name."""
        return self._stored(name) in self._file_of

    def holds_other_values(self, name: str, other: str) -> bool:
        """Whether two matrices are both stored, and differ in shape or in any value, or one is in codes."""
        name, other = self._stored(name), self._stored(other)
        if not {name, other} <= self._file_of.keys():
            return False
        if {name, other} & self._names_of_codes():
            return True
        with open_tensors(self._file_of[name]) as file, open_tensors(self._file_of[other]) as other_file:
            matrix, another = file.get_slice(name), other_file.get_slice(other)  # type: ignore[no-untyped-call]
            if matrix.get_shape() != another.get_shape():
                return True
            starts = range(0, matrix.get_shape()[0], _ROWS_AT_ONCE)
            parts = (slice(start, start + _ROWS_AT_ONCE) for start in starts)
            return any(not torch.equal(matrix[part], another[part]) for part in parts)

    def small_tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor as it is stored; None: there is none of this name."""
        name = self._stored(name)
        if name not in self._file_of:
            return None
        with open_tensors(self._file_of[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
            return tensor

    def number_formats(self) -> set[str]:
        """Return the number formats in which tensors are stored, as safetensors names them: BF16, F32."""
        return set(self.formats.values())

    def format_of(self, name: str) -> str | None:
        """Return the number format of a tensor by the name that the model has for it; None: there is none."""
        if self._stacks is not None and (stack := stack_of(name, self._stacks)) is not None:
            name = f"{stack}{BLOCKS}" if f"{stack}{BLOCKS}" in self._file_of else stack
        names = (name, self._stored(name), self._stored(name.removeprefix("model.")))
        found = next((each for each in names if each in self._file_of), None)
        return None if found is None else self.formats[found]

    @cached_property
    def formats(self) -> Mapping[str, str]:
        """The number format of each tensor by its name in the files."""
        found: dict[str, str] = {}
        for path, names in self._names_by_file():
            with open_tensors(path) as file:
                found |= {name: str(file.get_slice(name).get_dtype()) for name in names}  # type: ignore[no-untyped-call]
        return found

    def first_codes(self) -> str | None:
        """Return file and name of a tensor of codes whose scales config.json has told of; None: there is none."""
        name = min(self._names_of_codes(), default=None)
        return None if name is None else f"{self._file_of[name]}: the tensor {shown(name)}"

    def _names_of_codes(self) -> set[str]:
        codes = self.codes
        return set() if codes is None else {name for name, each in self.formats.items() if codes.is_code(name, each)}

    def _companions(self, name: str) -> Sequence[str]:
        """Return the names of what lies beside codes."""
        assert self.codes is not None, "there are none without a configuration"
        if self.codes.kind == MXFP4:
            return (scales_of(name),)
        return [f"{_parent(name)}.{last}" for last in self.codes.companions]

    def _read_scales(self, names: Set[str], targets: Mapping[str, TensorTarget]) -> Mapping[str, AnyScales]:
        """Return the scales of codes of 8 or 4 bits. Raises: ModelLoadError: one is missing or wrong."""
        if self.codes is None or self.codes.kind == MXFP4:
            return {}
        beside = {each for name in names for each in self._companions(name)} - targets.keys()
        shapes: dict[str, Sequence[int]] = {}
        read: dict[str, torch.Tensor] = {}
        for path, stored in self._names_by_file():
            with open_tensors(path) as file:
                for name in stored:
                    if name in names:
                        shapes[name] = file.get_slice(name).get_shape()  # type: ignore[no-untyped-call]
                    if name in beside:
                        read[name] = file.get_tensor(name)  # type: ignore[no-untyped-call]
        scales: dict[str, AnyScales] = {}
        for name in sorted(names):
            told, shape = f"{self._file_of[name]}: the tensor {shown(name)}", shapes[name]
            scale_name, shape_name = f"{_parent(name)}.{self.codes.scale_name}", f"{_parent(name)}.{_SHAPE_NAME}"
            if self.codes.kind in (*UINT4, NVFP4) or self.codes.packing == "gptq":
                lasts = {last: f"{_parent(name)}.{last}" for last in self.codes.companions}
                found = {last: read[each] for last, each in lasts.items() if each in read}
                if (bias := found.get("bias")) is not None and bool(bias.any()):
                    raise self._is_unknown(lasts["bias"])
                check = check_fp4_scales if self.codes.kind == NVFP4 else check_groups
                scales[name] = check(told, shape, _parent(name), found, self.codes)
                continue
            if self.codes.is_packed:
                shape = unpacked_shape(told, shape, read.get(shape_name), shape_name, self.codes.codes_of_element)
            scales[name] = check_scales(told, shape, read.get(scale_name), scale_name, self.codes)
        return scales

    def matrix_formats(self, besides: Iterable[str] = ()) -> dict[str, str]:
        """Return the number format of each matrix of floats by file and name, except of some names."""
        found: dict[str, str] = {}
        besides = {self._stored(name) for name in besides}
        for path, names in self._names_by_file():
            with open_tensors(path) as file:
                for name in names:
                    is_matrix = name not in besides and len(file.get_slice(name).get_shape()) > 1  # type: ignore[no-untyped-call]
                    if is_matrix and self.formats[name].startswith(("F", "BF")):  # others are masks and counts
                        found[f"{path}: the tensor {shown(name)}"] = self.formats[name]
        return found

    def _stored(self, name: str) -> str:
        """Return what the files call a tensor; its own name if it is in none."""
        names = possible_names(name) if self._is_combined else (name,)
        if self.codes is not None and self.codes.code_name != "weight":
            names += tuple(each.removesuffix("weight") + self.codes.code_name for each in names if ".weight" in each)
        return next((each for each in names if each in self._file_of), name)

    def _check_tensors(self, targets: Mapping[str, TensorTarget], scales: Mapping[str, AnyScales]) -> None:
        """Check shapes and number formats of all tensors. Raises: ModelLoadError: see `load_into`."""
        for path, names in self._names_by_file():
            with open_tensors(path) as file:
                for name in filter(targets.__contains__, names):
                    of_codes = scales.get(name)
                    stored = file.get_slice(name).get_shape() if of_codes is None else of_codes.shape  # type: ignore[no-untyped-call]
                    self._check_tensor(path, name, list(stored), targets[name], has_scales=of_codes is not None)

    def _check_tensor(self, path: Path, name: str, shape: list[int], target: TensorTarget, *, has_scales: bool) -> None:
        if shape != list(target.shape):
            raise ModelLoadError(
                f"{path} contains the tensor {shown(name)} with shape {shape}; config.json requires "
                f"{list(target.shape)}"
            )
        told = f"{path}: the tensor {shown(name)}"
        if self._is_code(name) and isinstance(target, StackedTarget):
            self._read_block_scales(name, told, shape[:-1])
        elif not has_scales and self.formats[name] not in _FLOATS:
            raise ModelLoadError(
                f"{told} is {self.formats[name]}, and config.json does not say what its codes stand for; it must be "
                "F32, F16 or BF16"
            )

    def _is_code(self, name: str) -> bool:
        return self.codes is not None and self.codes.is_code(name, self.formats[name])

    def _copy_tensor(
        self, file: safe_open, path: Path, name: str, target: TensorTarget, scales: AnyScales | None
    ) -> None:
        """Copy a tensor that is checked."""
        tensor = file.get_slice(name)  # type: ignore[no-untyped-call]  # the library has no types
        told = f"{path}: the tensor {shown(name)}"
        if self._is_code(name) and isinstance(target, StackedTarget):
            block_scales = self._read_block_scales(name, told, tensor.get_shape()[:-1])
            target.fill(CodedStack(told, tensor, block_scales, is_restored=self._restores_codes))
        elif scales is not None:
            assert self.codes is not None, "it says what has scales"
            rounding = self.rounding if self._allow_requantization else None
            if isinstance(scales, Fp4Scales):
                target.fill(Fp4Source(told, tensor, scales, self.codes, rounding))
            elif isinstance(scales, GroupScales):
                target.fill(GroupSource(told, tensor, scales, self.codes, rounding))
            else:
                target.fill(ScaledSource(told, tensor, scales, self.codes, rounding))
        else:
            target.fill(tensor)

    def _read_block_scales(self, name: str, what: str, shape: Sequence[int]) -> torch.Tensor:
        """Return the scales beside blocks of MXFP4. Raises: ModelLoadError: they are missing or wrong."""
        scales = self.small_tensor(scales_of(name))
        if scales is None:
            raise ModelLoadError(f"{what} is MXFP4, but its scales {scales_of(name)} are missing")
        if list(scales.shape) != list(shape) or scales.dtype != torch.uint8:
            kind = str(scales.dtype).removeprefix("torch.")
            raise ModelLoadError(
                f"{what} has scales {scales_of(name)} in {kind} with shape {list(scales.shape)}; they must be in "
                f"uint8 with shape {list(shape)}"
            )
        return scales

    def _check_names(self, targets: Mapping[str, TensorTarget], is_redundant: Callable[[str], bool]) -> None:
        for name in targets:
            if name not in self._file_of:
                raise ModelLoadError(f"the tensor {shown(name)} is missing from {self._table_of_contents}")
        for name in self._file_of:
            if name not in targets and not is_redundant(name):
                raise self._is_unknown(name)

    def _is_unknown(self, name: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file_of[name]} contains the tensor {shown(name)}, which the model does not have")

    def _names_by_file(self) -> Iterator[tuple[Path, list[str]]]:
        for path in sorted(set(self._file_of.values())):
            yield path, [name for name, file in self._file_of.items() if file == path]


def _parent(name: str) -> str:
    """Return the module of a tensor."""
    return name.rpartition(".")[0]


def _tensor_digest(file: safe_open, name: str) -> bytes:
    """Return the SHA-256 of a tensor's description and first row."""
    tensor = file.get_slice(name)  # type: ignore[no-untyped-call]  # the library has no types
    shape = list(tensor.get_shape())
    hasher = hashlib.sha256(f"{name} {tensor.get_dtype()} {shape}\n".encode())
    if shape:
        hasher.update(tensor[:1].contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.digest()


@contextmanager
def loading(path: Path, targets: Mapping[str, TensorTarget]) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many bytes are loaded, and log it at the end; yield what advances the bar."""
    begin_s, num_bytes = time.perf_counter(), sum(target.nbytes for target in targets.values())
    console = Console(stderr=True)
    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("loading weights", total=num_bytes)
        yield lambda advanced_bytes: progress.advance(task, advanced_bytes)
    duration_s = time.perf_counter() - begin_s
    speed = round(num_bytes / 1e9 / max(duration_s, 1e-9), 2)
    loaded = {"bytes": num_bytes, "duration_s": round(duration_s, 2), "gb_per_s": speed}
    logger.info(Event("weights_loaded", directory=str(path), **loaded))
