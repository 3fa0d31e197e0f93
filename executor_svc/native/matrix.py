"""Weight matrices in the panels of the C library, filled part by part while a model is loaded."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

from executor_svc.native.library import NativeLibrary
from executor_svc.native.structs import MatrixStruct, NumberFormat

GROUP = 32  # inputs that share a scale in int8; GROUP of dense.h
# What the C library multiplies by now.
BUILT_FORMATS = (NumberFormat.FLOAT32, NumberFormat.INT8)


class PackedMatrix:
    """A linear map [sum of sizes, num_inputs] whose weight exists in panels only.

    Args:
        library: What packs and multiplies.
        num_inputs: Inputs of the map.
        sizes: Outputs of each part; a checkpoint holds the parts apart.
        has_bias: Whether a bias is added.
        number_format: What the weight is stored in.
    """

    def __init__(
        self,
        library: NativeLibrary,
        num_inputs: int,
        sizes: Sequence[int],
        has_bias: bool,
        number_format: NumberFormat,
    ) -> None:
        is_int8 = number_format == NumberFormat.INT8
        num_outputs = sum(sizes)
        padded_outputs = -(-num_outputs // library.panel_columns) * library.panel_columns
        padded_inputs = -(-num_inputs // GROUP) * GROUP if is_int8 else num_inputs
        self._library = library
        self.num_inputs = num_inputs
        self.num_outputs = num_outputs
        self._panels = _zeros(padded_outputs * padded_inputs * (1 if is_int8 else 4))
        self._scales = _zeros(padded_outputs * padded_inputs // GROUP * 4) if is_int8 else None
        bias = torch.empty(num_outputs) if has_bias else None
        self.biases = () if bias is None else torch.split(bias, list(sizes))
        self.struct = MatrixStruct(
            num_outputs,
            num_inputs,
            self._panels.data_ptr(),
            None if self._scales is None else self._scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
        )
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.weights = tuple(PackedPart(self, end - size, size) for size, end in zip(sizes, ends, strict=True))

    @property
    def num_bytes(self) -> int:
        """Memory of the weight, scales and padding included."""
        return self._panels.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def pack(self, first_row: int, weight: torch.Tensor) -> None:
        """Write [num_rows, num_inputs] of any floating dtype into the rows from `first_row`."""
        self._library.pack(self.struct, first_row, weight.to(torch.float32).contiguous())

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [num_ids, num_inputs] float32."""
        out = torch.empty(len(row_ids), self.num_inputs)
        self._library.read_rows(self.struct, row_ids.long().contiguous(), out)
        return out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] of any floating dtype to [num_rows, num_outputs] of the same."""
        out = torch.empty(x.shape[0], self.num_outputs)
        self._library.linear(self.struct, x.to(torch.float32).contiguous(), out)
        return out.to(x.dtype)


class PackedPart:
    """Rows of a packed matrix as the loader sees them: like a tensor that can only be written."""

    def __init__(self, matrix: PackedMatrix, first_row: int, num_rows: int) -> None:
        self._matrix = matrix
        self._first_row = first_row
        self.shape = torch.Size((num_rows, matrix.num_inputs))
        self.nbytes = num_rows * matrix.num_inputs * 4

    def copy_(self, source: torch.Tensor, /) -> None:
        """Pack `source`, a tensor of this shape."""
        self._matrix.pack(self._first_row, source)


def _zeros(num_bytes: int) -> torch.Tensor:
    """Return zeroed memory, in huge pages where the system gives them: all weights are read in every step."""
    # Private: shared memory gets no huge pages, and a mapping for each matrix, of which experts make very many.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
