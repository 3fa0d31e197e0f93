"""FP8 tensors of safetensors on their way to the kernels: codes and scales together, in blocks of a row."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

from executor_svc.checkpoint.fp8 import BLOCK_BYTES, BLOCK_INPUTS, FP8_BLOCK, Fp8Config, Sharing
from executor_svc.checkpoint.gguf.rounding import RoundingErrors
from executor_svc.checkpoint.weight_map import BlockRows
from octavo_shared.errors import ModelLoadError

# Of E4M3.
_LARGEST: Final = 448.0
_SCALE_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class _Codes(Protocol):
    """A tensor in a file."""

    def __getitem__(self, index: tuple[slice, slice], /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a tensor, float32 [ceil(num_outputs / outputs), ceil(num_inputs / inputs)].

    `outputs` and `inputs`: how many share a scale.
    """

    values: torch.Tensor
    outputs: int
    inputs: int


def check_scales(
    name: str, shape: Sequence[int], scale: torch.Tensor | None, scale_name: str, config: Fp8Config
) -> Scales:
    """Return the scales of a tensor.

    Args:
        name: File and tensor.
        shape: Of its codes.
        scale: As it is stored; None: it is missing.
        scale_name: Its name.
        config: What shapes it may have.

    Raises: ModelLoadError: it is missing, or not what the format requires.
    """
    if len(shape) != 2:
        raise ModelLoadError(f"{name} is F8_E4M3 with shape {list(shape)}; only a matrix may be")
    if scale is None:
        raise ModelLoadError(f"{name} is F8_E4M3, but its scale {scale_name} is missing")
    if scale.dtype not in _SCALE_TYPES:
        kind = str(scale.dtype).removeprefix("torch.")
        raise ModelLoadError(f"{name} has a scale {scale_name} in {kind}; it must be in float32, bfloat16 or float16")
    layouts = _layouts(shape)
    for sharing in sorted(config.sharings):
        outputs, inputs, shapes = layouts[sharing]
        if list(scale.shape) in shapes:
            values = scale.float().reshape(-(-shape[0] // outputs), -(-shape[1] // inputs))
            break
    else:
        expected = " or ".join(str(layouts[sharing][2][0]) for sharing in sorted(config.sharings))
        raise ModelLoadError(f"{name} has a scale {scale_name} with shape {list(scale.shape)}; it must be {expected}")
    largest = float(values.abs().max()) * _LARGEST  # NaN stays NaN
    if not largest < torch.finfo(torch.float32).max:
        wrong = float(values[~(values.abs() * _LARGEST < torch.finfo(torch.float32).max)][0])
        raise ModelLoadError(f"{name} has {wrong:g} in its scale {scale_name}; weights must be finite")
    return Scales(values, outputs, inputs)


def _layouts(shape: Sequence[int]) -> Mapping[Sharing, tuple[int, int, list[list[int]]]]:
    """Return how many outputs and inputs share a scale, and the shapes that a tensor of scales may have."""
    num_outputs, num_inputs = (max(1, size) for size in shape)
    blocks = [math.ceil(size / BLOCK_INPUTS) for size in shape]
    return {
        "block": (BLOCK_INPUTS, BLOCK_INPUTS, [blocks]),
        "channel": (1, num_inputs, [[num_outputs, 1], [num_outputs]]),
        "tensor": (num_outputs, num_inputs, [[1], [], [1, 1]]),
    }


@dataclass(frozen=True, slots=True)
class Fp8Source:
    """A matrix in FP8, still in its file; indexing returns a part in blocks.

    Attributes:
        name: File and tensor.
        codes: Of all of it.
        shape: The same.
        scales: The same.
        rounding: See `BlockRows`.
    """

    name: str
    codes: _Codes
    shape: Sequence[int]
    scales: Scales
    rounding: RoundingErrors | None

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> BlockRows:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        first, last, _ = rows.indices(self.shape[0])
        begin, end, _ = (columns[0] if columns else slice(None)).indices(self.shape[1])
        scales = self._scales_of(begin, end)[torch.arange(first, last) // self.scales.outputs]
        codes = self.codes[first:last, begin:end].view(torch.uint8)
        if bool(((codes & 127) == 127).any()):
            raise ModelLoadError(f"{self.name} has the code 0x7f or 0xff, which is NaN; weights must be finite")
        num_blocks = scales.shape[1]
        blocks = torch.empty(last - first, num_blocks, BLOCK_BYTES, dtype=torch.uint8)
        blocks[..., :4] = scales.contiguous().view(torch.uint8).view(last - first, num_blocks, 4)
        padded = F.pad(codes, (0, num_blocks * BLOCK_INPUTS - codes.shape[1]))
        blocks[..., 4:] = padded.view(last - first, num_blocks, BLOCK_INPUTS)
        return BlockRows(
            self.name,
            blocks.flatten(1),
            FP8_BLOCK,
            None,
            self.rounding,
            why_not="is F8_E4M3; there it must be F32, F16 or BF16",
        )

    def _scales_of(self, begin: int, end: int) -> torch.Tensor:
        """Return the scales of blocks of some inputs, for all that the tensor has of outputs."""
        num_blocks = math.ceil((end - begin) / BLOCK_INPUTS)
        if self.scales.values.shape[1] == 1:
            return self.scales.values.expand(-1, num_blocks)
        if begin % BLOCK_INPUTS or (end % BLOCK_INPUTS and end != self.shape[1]):
            raise ModelLoadError(
                f"{self.name} cannot be shared among so many ranks: each would have inputs {begin} to {end}, and "
                f"blocks have {BLOCK_INPUTS}"
            )
        return self.scales.values[:, begin // BLOCK_INPUTS :][:, :num_blocks]
