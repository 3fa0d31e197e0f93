"""Codes of safetensors on their way to the kernels: codes and scales together, in blocks of a row."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

from executor_svc.checkpoint.gguf.rounding import RoundingErrors
from executor_svc.checkpoint.scaled_codes import BLOCK_BYTES, BLOCK_INPUTS, E4M3, CodeKind, CodesConfig, Sharing
from executor_svc.checkpoint.weight_map import BlockRows, Range
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError

_SCALE_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Codes(Protocol):
    """A tensor in a file."""

    def __getitem__(self, index: tuple[slice, slice], /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a tensor, float32 [ceil(num_outputs / outputs), num_blocks], or [.., 1]: those of whole rows.

    `shape`: of the tensor. `outputs`: how many of them share a scale.
    """

    shape: Sequence[int]
    values: torch.Tensor
    outputs: int


def unpacked_shape(
    name: str, packed: Sequence[int], stored: torch.Tensor | None, shape_name: str, in_word: int
) -> Sequence[int]:
    """Return the shape of codes of which int32 hold several each.

    Args:
        name: File and tensor.
        packed: Its shape.
        stored: The shape of its codes, as it is stored; None: it is missing.
        shape_name: The name of that.
        in_word: Codes of an int32.

    Raises: ModelLoadError: they do not fit.
    """
    if stored is None:
        raise ModelLoadError(f"{name} is packed, but its shape {shape_name} is missing")
    shape = [int(size) for size in stored.flatten()[:3]]
    if len(shape) != 2 or list(packed) != [shape[0], -(-shape[1] // in_word)]:
        raise ModelLoadError(
            f"{name} has the shape {list(packed)}, {'four' if in_word == 4 else 'eight'} codes in each int32, but "
            f"{shape_name} is {shown(repr(shape))}"
        )
    return shape


def check_scales(
    name: str, shape: Sequence[int], scale: torch.Tensor | None, scale_name: str, config: CodesConfig
) -> Scales:
    """Return the scales of a tensor.

    Args:
        name: File and tensor.
        shape: Of its codes, unpacked.
        scale: As it is stored; None: it is missing.
        scale_name: Its name.
        config: What shapes it may have.

    Raises: ModelLoadError: it is missing, or not what the format requires.
    """
    check_matrix(name, shape, config)
    scale = check_scale_type(name, scale, scale_name, config)
    layouts = _layouts(shape, config.group_inputs)
    for sharing in sorted(config.sharings):
        outputs, inputs, shapes = layouts[sharing]
        if list(scale.shape) in shapes:
            values = scale.float().reshape(-(-shape[0] // outputs), -(-shape[1] // inputs))
            if inputs < shape[1]:
                values = values.repeat_interleave(inputs // BLOCK_INPUTS, 1)[:, : -(-shape[1] // BLOCK_INPUTS)]
            break
    else:
        expected = " or ".join(str(layouts[sharing][2][0]) for sharing in sorted(config.sharings))
        raise ModelLoadError(f"{name} has a scale {scale_name} with shape {list(scale.shape)}; it must be {expected}")
    check_numbers(name, values, scale_name, config)
    return Scales(shape, values, outputs)


def check_matrix(name: str, shape: Sequence[int], config: CodesConfig) -> None:
    """Raise ModelLoadError if codes are no matrix."""
    if len(shape) != 2:
        raise ModelLoadError(f"{name} is {config.kind.name} with shape {list(shape)}; only a matrix may be")


def check_scale_type(name: str, scale: torch.Tensor | None, scale_name: str, config: CodesConfig) -> torch.Tensor:
    """Return a scale. Raises: ModelLoadError: it is missing, or in a number format that is not read."""
    if scale is None:
        raise ModelLoadError(f"{name} is {config.kind.name}, but its scale {scale_name} is missing")
    if scale.dtype not in _SCALE_TYPES:
        kind = str(scale.dtype).removeprefix("torch.")
        raise ModelLoadError(f"{name} has a scale {scale_name} in {kind}; it must be in float32, bfloat16 or float16")
    return scale


def check_numbers(name: str, values: torch.Tensor, scale_name: str, config: CodesConfig) -> None:
    """Raise ModelLoadError if a scale makes a weight that float32 does not have."""
    is_wrong = ~(values.double().abs() * config.kind.largest < torch.finfo(torch.float32).max)  # so is NaN
    if is_wrong.any():
        wrong = float(values[is_wrong][0])
        raise ModelLoadError(f"{name} has {wrong:g} in its scale {scale_name}; weights must be finite")


def refuse_cut(name: str, begin: int, end: int, num_inputs: int, block_inputs: int) -> None:
    """Raise ModelLoadError if a rank's inputs are not whole blocks."""
    if begin % block_inputs or (end % block_inputs and end != num_inputs):
        raise ModelLoadError(
            f"{name} cannot be shared among so many ranks: one would have inputs {begin} to {end}, which are not whole "
            f"blocks of {block_inputs}; lower --tp"
        )


def part_of(index: slice | tuple[slice, ...], shape: Sequence[int]) -> tuple[Range, Range]:
    """Return the outputs and the inputs that an index of a matrix means."""
    rows, *columns = index if isinstance(index, tuple) else (index,)
    first, last, _ = rows.indices(shape[0])
    begin, end, _ = (columns[0] if columns else slice(None)).indices(shape[1])
    return (first, last), (begin, end)


def rows_in(blocks: torch.Tensor, name: str, kind: CodeKind, rounding: RoundingErrors | None) -> BlockRows:
    """Return rows in blocks, [num_outputs, num_blocks, bytes of one], as the place for them takes them."""
    why_not = f"is {kind.name}; there it must be F32, F16 or BF16"
    return BlockRows(name, blocks.flatten(1), kind.block_type, None, rounding, why_not=why_not)


def _layouts(shape: Sequence[int], group_inputs: int) -> Mapping[Sharing, tuple[int, int, list[list[int]]]]:
    """Return how many outputs and inputs share a scale, and the shapes that a tensor of scales may have."""
    num_outputs, num_inputs = (max(1, size) for size in shape)
    blocks = [math.ceil(size / BLOCK_INPUTS) for size in shape]
    return {
        "group": (1, group_inputs, [[num_outputs, math.ceil(shape[1] / group_inputs)]]),
        "block": (BLOCK_INPUTS, BLOCK_INPUTS, [blocks]),
        "channel": (1, num_inputs, [[num_outputs, 1], [num_outputs]]),
        "tensor": (num_outputs, num_inputs, [[1], [], [1, 1]]),
    }


@dataclass(frozen=True, slots=True)
class ScaledSource:
    """A matrix of codes, still in its file; indexing returns a part in blocks.

    Attributes:
        name: File and tensor.
        codes: Of all of it, packed or not.
        scales: The same.
        config: What the codes are.
        rounding: See `BlockRows`.
    """

    name: str
    codes: Codes
    scales: Scales
    config: CodesConfig
    rounding: RoundingErrors | None

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> BlockRows:
        (first, last), (begin, end) = part_of(index, self.scales.shape)
        scales = self._scales_of(begin, end)[torch.arange(first, last) // self.scales.outputs]
        codes, kind = self._codes_of(first, last, begin, end), self.config.kind
        if kind == E4M3 and bool(((codes & 127) == 127).any()):
            raise ModelLoadError(f"{self.name} has the code 0x7f or 0xff, which is NaN; weights must be finite")
        num_blocks = scales.shape[1]
        blocks = torch.empty(last - first, num_blocks, BLOCK_BYTES, dtype=torch.uint8)
        blocks[..., :4] = scales.contiguous().view(torch.uint8).view(last - first, num_blocks, 4)
        padded = F.pad(codes, (0, num_blocks * BLOCK_INPUTS - codes.shape[1]))
        blocks[..., 4:] = padded.view(last - first, num_blocks, BLOCK_INPUTS)
        return rows_in(blocks, self.name, kind, self.rounding)

    def _codes_of(self, first: int, last: int, begin: int, end: int) -> torch.Tensor:
        """Return the codes of some outputs and inputs, uint8."""
        if not self.config.is_packed:
            return self.codes[first:last, begin:end].view(torch.uint8)
        words = self.codes[first:last, begin // 4 : -(-end // 4)].contiguous().view(torch.uint8)
        return words[:, begin % 4 :][:, : end - begin] ^ 128

    def _scales_of(self, begin: int, end: int) -> torch.Tensor:
        """Return the scales of blocks of some inputs, for all that the tensor has of outputs."""
        num_blocks = math.ceil((end - begin) / BLOCK_INPUTS)
        if self.scales.values.shape[1] == 1:
            return self.scales.values.expand(-1, num_blocks)
        refuse_cut(self.name, begin, end, self.scales.shape[1], BLOCK_INPUTS)
        return self.scales.values[:, begin // BLOCK_INPUTS :][:, :num_blocks]
