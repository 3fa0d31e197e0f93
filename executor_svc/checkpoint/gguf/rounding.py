"""Types of GGUF files that no format holds exactly: refused by name, or rounded as they are loaded, and by how much.

Imports no torch: `octavo list` asks too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from executor_svc.checkpoint.scaled_codes import KINDS, restore_codes
from octavo_shared.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

    from executor_svc.checkpoint.gguf.header import GGUFTensor
    from executor_svc.checkpoint.weight_map import RoundingTarget


from types import MappingProxyType
from typing import Final

from gguf import GGMLQuantizationType as FileType

# Bits of a weight, with its scales, in memory. `HOLDERS` of executor_svc/models/file_formats.py has the formats;
# tests/unit/executor_svc/models/test_memory_needs.py compares them with the formats that hold them.
HELD_BITS: Final[Mapping[FileType, float]] = MappingProxyType(
    {
        FileType.F32: 32,
        FileType.F16: 32,
        FileType.BF16: 16,
        FileType.Q8_0: 8.5,
        FileType.Q5_0: 8.5,
        FileType.IQ4_NL: 8.5,
        FileType.Q4_0: 5,
        FileType.Q4_1: 5,
        FileType.Q5_1: 9,
        FileType.MXFP4: 4.25,
        **{
            kind: 8 * GGML_QUANT_SIZES[kind][1] / GGML_QUANT_SIZES[kind][0]
            for kind in (FileType.Q2_K, FileType.Q3_K, FileType.Q4_K, FileType.Q5_K, FileType.Q6_K)
        },
    }
)


_OTHERS = "use a file in another quantization, such as Q4_K_M or Q8_0"
# Numbers that are restored at a time.
_CHUNK = 1 << 22


def check_type(tensor: GGUFTensor, *, allow_requantization: bool) -> None:
    """Raise ModelLoadError if the type of a tensor is neither held exactly nor to be rounded."""
    if tensor.type in HELD_BITS:
        return
    if not _can_be_read(tensor.type):
        raise ModelLoadError(f"{tensor} is {tensor.type.name}, which is not supported; {_OTHERS}")
    if not allow_requantization:
        raise ModelLoadError(
            f"{tensor} is {tensor.type.name}, which is not held exactly; set --allow-requantization to round it to "
            f"int8-a8, or {_OTHERS}"
        )


def _can_be_read(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@dataclass(slots=True)
class RoundingErrors:
    """What rounding has changed: of each tensor the sum of the squares of all errors, and of all weights."""

    squares: dict[str, tuple[float, float]] = field(default_factory=dict)
    types: set[str] = field(default_factory=set)

    def round_rows(
        self,
        name: str,
        block_type: int,
        blocks: torch.Tensor,
        order: torch.Tensor | None,
        destination: RoundingTarget,
    ) -> None:
        """Restore rows of blocks, let `destination` quantize them, and measure what that has changed.

        Raises: ModelLoadError: a weight is not finite.
        """
        import torch

        num_rows = len(blocks) if order is None else len(order)
        block_inputs, block_bytes = block_size(block_type)
        step = max(1, _CHUNK // (blocks.shape[1] // block_bytes * block_inputs))
        error, total = self.squares.get(name, (0.0, 0.0))
        for begin in range(0, num_rows, step):
            rows = blocks[begin : begin + step] if order is None else blocks[order[begin : begin + step]]
            # A damaged scale overflows; what comes of it is refused below.
            with np.errstate(all="ignore"):
                restored = restore_rows(block_type, rows.numpy())[:, : destination.shape[1]]
            values = torch.from_numpy(np.ascontiguousarray(restored, np.float32))
            if not values.isfinite().all():
                raise ModelLoadError(f"{name} has a weight that is not finite")
            held = destination.round_rows(begin, values)
            error += float((held - values).double().square().sum())
            total += float(values.double().square().sum())
        self.squares[name] = (error, total)
        self.types.add(KINDS[block_type].name if block_type in KINDS else GGMLQuantizationType(block_type).name)

    def describe(self) -> Mapping[str, str | int | float]:
        """Return the relative root mean square error of all weights, and of the matrix where it is largest."""
        worst = max(self.squares, key=lambda name: _relative(*self.squares[name]))
        return {
            "types": ",".join(sorted(self.types)),
            "tensors": len(self.squares),
            "rms_error": round(_relative(*map(sum, zip(*self.squares.values(), strict=True))), 6),
            "largest_rms_error": round(_relative(*self.squares[worst]), 6),
            "largest_tensor": worst,
        }

    def sentence(self) -> str:
        """Return the same for people; "": nothing was rounded."""
        if not self.squares:
            return ""
        told = self.describe()
        return (
            f"weights in {told['types']} were rounded to int8-a8: their relative RMS error is {told['rms_error']:.2%}, "
            f"at most {told['largest_rms_error']:.2%}, in {told['largest_tensor']}"
        )


def block_size(block_type: int) -> tuple[int, int]:
    """Return inputs and bytes of a block, by ggml's numbers or those of KINDS."""
    if block_type in KINDS:
        return KINDS[block_type].block_inputs, KINDS[block_type].block_bytes
    return GGML_QUANT_SIZES[GGMLQuantizationType(block_type)]


def restore_rows(block_type: int, rows: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
    """Return the numbers that rows of blocks, [num_rows, num_bytes], stand for."""
    if block_type in KINDS:
        return restore_codes(KINDS[block_type], rows)
    return dequantize(rows, GGMLQuantizationType(block_type))


def _relative(error: float, total: float) -> float:
    return sqrt(error / total) if total else 0.0
