"""Weight matrices in the panels of the C library, filled part by part while a model is loaded."""

import ctypes
import itertools
from collections.abc import Sequence

import torch

from executor_svc.native.binding import WeightMemory
from executor_svc.native.library import NativeLibrary
from executor_svc.native.structs import MatrixStruct, NumberFormat


class PackedMatrix:
    """A linear map [sum of sizes, num_inputs]; its weight exists in panels only.

    Args:
        library: What packs and multiplies.
        num_inputs: Inputs of the map.
        formats: Number formats that take the same inputs; each with the outputs of its parts, since a checkpoint holds
            the parts apart.
        has_bias: Whether a bias is added.
        memory: Where the weight lies.
    """

    def __init__(
        self,
        library: NativeLibrary,
        num_inputs: int,
        formats: Sequence[tuple[NumberFormat, Sequence[int]]],
        *,
        has_bias: bool,
        memory: WeightMemory,
    ) -> None:
        sizes = [size for _, of_format in formats for size in of_format]
        self._library = library
        self.num_inputs = num_inputs
        self.num_outputs = sum(sizes)
        self._bias = torch.empty(self.num_outputs) if has_bias else None
        self.biases = () if self._bias is None else torch.split(self._bias, sizes)
        self._blocks: list[_Block] = []
        self.weights: tuple[PackedPart, ...] = ()
        first_output = 0
        for number_format, of_format in formats:
            bias = None if self._bias is None else self._bias[first_output:]
            block = _Block(library, number_format, sum(of_format), num_inputs, bias, memory)
            self._blocks.append(block)
            ends = itertools.accumulate(of_format)
            self.weights += tuple(
                PackedPart(block, end - size, size) for size, end in zip(of_format, ends, strict=True)
            )
            first_output += sum(of_format)
        self.struct = self._blocks[0].struct
        for block, rest in itertools.pairwise(self._blocks):
            block.struct.rest = ctypes.addressof(rest.struct)

    @property
    def structs(self) -> Sequence[MatrixStruct]:
        """The structs of all number formats; the first one is `struct`."""
        return [block.struct for block in self._blocks]

    @property
    def num_bytes(self) -> int:
        """Memory of the weight, scales and padding included."""
        return sum(block.num_bytes for block in self._blocks)

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, which has one number format, [num_ids, num_inputs] float32."""
        assert len(self._blocks) == 1, "no matrix whose rows are looked up has several"
        return self._blocks[0].rows(row_ids)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] of any floating dtype to [num_rows, num_outputs] of the same."""
        out = torch.empty(x.shape[0], self.num_outputs)
        self._library.linear(self.struct, x.to(torch.float32).contiguous(), out)
        return out.to(x.dtype)


class _Block:
    """Outputs of one number format: panels of their own."""

    def __init__(
        self,
        library: NativeLibrary,
        number_format: NumberFormat,
        num_outputs: int,
        num_inputs: int,
        bias: torch.Tensor | None,
        memory: WeightMemory,
    ) -> None:
        self._library = library
        panels_bytes, scales_bytes = library.matrix_bytes(number_format, num_outputs, num_inputs)
        self._panels = memory.take(panels_bytes)
        self._scales = memory.take(scales_bytes) if scales_bytes else None
        self.struct = MatrixStruct(
            number_format,
            num_outputs,
            num_inputs,
            self._panels.data_ptr(),
            None if self._scales is None else self._scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
        )

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return (self._panels,) if self._scales is None else (self._panels, self._scales)

    @property
    def num_bytes(self) -> int:
        return self._panels.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [num_ids, num_inputs] float32."""
        out = torch.empty(len(row_ids), self.struct.num_inputs)
        self._library.read_rows(self.struct, row_ids.long().contiguous(), out)
        return out

    def pack_blocks(self, first_row: int, blocks: torch.Tensor, block_type: int, order: torch.Tensor | None) -> bool:
        """Copy codes into the rows from `first_row`; see `NativeLibrary.pack_blocks`."""
        return self._library.pack_blocks(self.struct, first_row, blocks, block_type, order)

    def pack(self, first_row: int, weight: torch.Tensor) -> None:
        """Write [num_rows, num_inputs] of any floating dtype into the rows from `first_row`."""
        self._library.pack(self.struct, first_row, weight.to(torch.float32).contiguous())


class PackedPart:
    """Rows of a packed matrix as the loader sees them: like a tensor that can only be written."""

    def __init__(self, block: _Block, first_row: int, num_rows: int) -> None:
        self._block = block
        self._first_row = first_row
        self.shape = torch.Size((num_rows, block.struct.num_inputs))
        self.nbytes = block.num_bytes * num_rows // block.struct.num_outputs

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """The panels, and scales."""
        return self._block.memory

    def copy_(self, source: torch.Tensor, /) -> None:
        """Pack `source`, a tensor of this shape."""
        self._block.pack(self._first_row, source)

    def round_rows(self, first_row: int, source: torch.Tensor) -> torch.Tensor:
        """Pack some rows, and return what they are held as; see `executor_svc.checkpoint.weight_map.RoundingTarget`."""
        self._block.pack(self._first_row + first_row, source)
        return self._block.rows(torch.arange(len(source)) + self._first_row + first_row)

    def copy_blocks(self, blocks: torch.Tensor, block_type: int, order: torch.Tensor | None) -> bool:
        """Take over codes; see `executor_svc.checkpoint.weight_map.BlockTarget`."""
        return self._block.pack_blocks(self._first_row, blocks, block_type, order)
