"""Weight matrices in the panels of the C library, filled part by part while a model is loaded."""

from collections.abc import Sequence

import torch

from executor_svc.native.library import NativeLibrary
from executor_svc.native.structs import MatrixStruct, NumberFormat
from executor_svc.native.weight_memory import WeightMemory


class PackedMatrix:
    """A linear map [sum of sizes, num_inputs] whose weight exists in panels only.

    Args:
        library: What packs and multiplies.
        num_inputs: Inputs of the map.
        sizes: Outputs of each part; a checkpoint holds the parts apart.
        has_bias: Whether a bias is added.
        number_format: Of the weight.
        memory: Where the weight lies.
    """

    def __init__(
        self,
        library: NativeLibrary,
        num_inputs: int,
        sizes: Sequence[int],
        has_bias: bool,
        number_format: NumberFormat,
        memory: WeightMemory,
    ) -> None:
        num_outputs = sum(sizes)
        self._library = library
        self.num_inputs = num_inputs
        self.num_outputs = num_outputs
        panels_bytes, scales_bytes = library.matrix_bytes(number_format, num_outputs, num_inputs)
        self._panels = memory.take(panels_bytes)
        self._scales = memory.take(scales_bytes) if scales_bytes else None
        bias = torch.empty(num_outputs) if has_bias else None
        self.biases = () if bias is None else torch.split(bias, list(sizes))
        self.struct = MatrixStruct(
            number_format,
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
        self.nbytes = matrix.num_bytes * num_rows // matrix.num_outputs

    def copy_(self, source: torch.Tensor, /) -> None:
        """Pack `source`, a tensor of this shape."""
        self._matrix.pack(self._first_row, source)
