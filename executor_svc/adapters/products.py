"""What adapters add to the products of a model, in torch and in C."""

from collections.abc import Callable, Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from executor_svc.adapters.step_rows import CurrentRows
from executor_svc.checkpoint.weight_map import Range, WeightTarget
from executor_svc.native.binding import WeightMemory
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import AdaptedStruct, LowRankStruct, NumberFormat


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """Outputs of this rank that one tensor of the model makes."""

    tensor: str  # without .weight
    shape: tuple[int, int]  # of all of it, outputs and inputs
    rows: tuple[Range, ...]  # the outputs, in their order
    columns: Range | None  # the inputs; None: all

    @property
    def num_inputs(self) -> int:
        """Number of inputs here."""
        begin, end = self.columns or (0, self.shape[1])
        return end - begin

    @property
    def num_outputs(self) -> int:
        """Number of outputs here."""
        return sum(end - begin for begin, end in self.rows)


@dataclass(frozen=True, slots=True)
class LowRankWeights:
    """An adapter's part of a product: y += (x @ a.T) @ b.T."""

    a: torch.Tensor  # [num_shrunk, num_inputs] float32
    b: torch.Tensor  # [num_outputs, num_shrunk] float32, with the scale
    spans: Sequence[tuple[int, int, int]]  # outputs of each part, and which of the shrunk they take; others are 0 in b


class AdaptedProduct(Protocol):
    """A product, which has a place for the part of each adapter."""

    @property
    def num_bytes(self) -> int:
        """Memory of one slot."""

    def put(self, slot: int, weights: LowRankWeights | None, memory: WeightMemory | None = None) -> None:
        """Take over an adapter's part, for a slot that no step uses. None: it has none.

        `memory` is for the parts of all products of an adapter; None: each has its own.
        """


Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Numbers that a row is shrunk to at once: TILE of adapters.c.
_SHRUNK_TOGETHER = 4


class TorchMatrix(Protocol):
    """A matrix that maps tensors."""

    @property
    def weights(self) -> Sequence[WeightTarget]:
        """See `Matrix`."""

    @property
    def biases(self) -> Sequence[torch.Tensor]:
        """See `Matrix`."""

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [num_ids, num_inputs]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""


class TorchAdapted:
    """A matrix in torch with the parts of adapters beside it, in memory that is taken at once.

    Args:
        matrix: Of the model.
        shape: Outputs and inputs of it.
        num_slots: How many adapters there may be.
        num_shrunk: Most numbers that one of them shrinks a row to.
        current: The rows of the step.
        dtype, device: Of activations.
        multiply: Maps [num_rows, num_inputs] by a weight, [num_outputs, num_inputs], one of memory of its own; None: as
            torch does.
    """

    def __init__(
        self,
        matrix: TorchMatrix,
        shape: tuple[int, int],
        num_slots: int,
        num_shrunk: int,
        current: CurrentRows,
        dtype: torch.dtype,
        device: torch.device,
        multiply: Multiply | None = None,
    ) -> None:
        self._matrix = matrix
        self._multiply = multiply
        self._current = current
        self.weights, self.biases, self.rows = matrix.weights, matrix.biases, matrix.rows
        self._a = torch.zeros((num_slots, num_shrunk, shape[1]), dtype=dtype, device=device)
        self._b = torch.zeros((num_slots, shape[0], num_shrunk), dtype=dtype, device=device)
        self._num_shrunk = [0] * num_slots

    @property
    def num_bytes(self) -> int:
        """Memory of one slot."""
        return self._a[0].nbytes + self._b[0].nbytes

    def put(self, slot: int, weights: LowRankWeights | None, memory: WeightMemory | None = None) -> None:
        """Take over an adapter's part; see `AdaptedProduct`. The memory is there already."""
        del memory
        self._num_shrunk[slot] = size = 0 if weights is None else len(weights.a)
        self._a[slot].zero_()
        self._b[slot].zero_()
        if weights is not None:
            self._a[slot, :size].copy_(weights.a)
            self._b[slot, :, :size].copy_(weights.b)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs], each row with its adapter."""
        out = self._matrix(x)
        for slot, rows in self._current.groups:
            size = self._num_shrunk[slot]
            if size and self._multiply is not None:
                shrunk = self._multiply(x[rows], self._a[slot])  # what the adapter does not have is 0
                out.index_add_(0, rows, self._multiply(shrunk, self._b[slot]))
            elif size:
                shrunk = x[rows] @ self._a[slot, :size].t()
                out.index_add_(0, rows, shrunk @ self._b[slot, :, :size].t())
        return out


class NativeAdapted:
    """Matrices in C with the same inputs; the parts of adapters lie beside them.

    Args:
        library: What packs.
        matrices: Of the model; a part of an adapter is cut as they are.
        num_slots, num_shrunk, current: See `TorchAdapted`.
    """

    def __init__(
        self,
        library: NativeLibrary,
        matrices: Sequence[PackedMatrix],
        num_slots: int,
        num_shrunk: int,
        current: CurrentRows,
    ) -> None:
        self._library = library
        self._current = current
        self._num_inputs = matrices[0].num_inputs
        self._num_padded = -(-self._num_inputs // library.num_lanes) * library.num_lanes
        structs = [struct for matrix in matrices for struct in matrix.structs]
        self._sizes = [int(struct.num_outputs) for struct in structs]
        self._slots = [(LowRankStruct * num_slots)() for _ in structs]
        self._adapted = [AdaptedStruct(addressof(slots), current.address) for slots in self._slots]
        for struct, adapted in zip(structs, self._adapted, strict=True):
            struct.adapted = addressof(adapted)
        self._kept: list[object] = [None] * num_slots  # what the structs point into
        shapes = [(size, num_shrunk) for size in self._sizes]
        expand_bytes = sum(library.matrix_bytes(NumberFormat.FLOAT32, *shape)[0] for shape in shapes)
        self.num_bytes = 4 * num_shrunk * self._num_padded + expand_bytes

    def put(self, slot: int, weights: LowRankWeights | None, memory: WeightMemory | None = None) -> None:
        """Take over an adapter's part; see `AdaptedProduct`."""
        empty = LowRankStruct()
        if weights is None:
            for slots in self._slots:
                slots[slot] = empty
            self._kept[slot] = None
            return
        memory = WeightMemory() if memory is None else memory
        num_shrunk = -(-len(weights.a) // _SHRUNK_TOGETHER) * _SHRUNK_TOGETHER
        shrink = memory.take(num_shrunk * self._num_padded * 4).view(torch.float32)
        lanes = self._library.num_lanes
        rows = torch.zeros(num_shrunk, self._num_padded)
        rows[: len(weights.a), : self._num_inputs] = weights.a
        vectors = rows.view(-1, _SHRUNK_TOGETHER, self._num_padded // lanes, lanes)
        shrink.copy_(vectors.transpose(1, 2).flatten())
        self._current.make_room(slot, num_shrunk)
        kept: list[object] = [shrink]
        begin = 0
        for index, (slots, size) in enumerate(zip(self._slots, self._sizes, strict=True)):
            expand = self._packed(weights.b[begin : begin + size], memory)
            ranges = self._ranges(begin, size, weights.spans)
            slots[slot] = LowRankStruct(expand=expand.struct, ranges=ranges.ctypes.data)
            if index == 0:
                slots[slot].shrink, slots[slot].num_shrunk = shrink.data_ptr(), num_shrunk
            kept += [expand, ranges]
            begin += size
        self._kept[slot] = kept

    def _packed(self, weight: torch.Tensor, memory: WeightMemory) -> PackedMatrix:
        num_outputs, num_inputs = weight.shape
        formats = [(NumberFormat.FLOAT32, [num_outputs])]
        matrix = PackedMatrix(self._library, num_inputs, formats, has_bias=False, memory=memory)
        matrix.weights[0].copy_(weight)
        return matrix

    def _ranges(
        self, begin: int, size: int, spans: Sequence[tuple[int, int, int]]
    ) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
        """Return which of the shrunk each panel of outputs [begin, begin + size) takes, [num_panels, 2]."""
        width = self._library.panel_columns
        ranges = np.zeros((-(-size // width), 2), np.int32)
        for panel, own in enumerate(ranges):
            first, last = begin + panel * width, begin + min(size, (panel + 1) * width)
            place, found = 0, []
            for num_outputs, low, high in spans:
                if place < last and place + num_outputs > first and low < high:
                    found.append((low, high))
                place += num_outputs
            if found:
                own[:] = min(low for low, _ in found), max(high for _, high in found)
        return ranges
