"""Which rows of a step have which adapter: the rows of each adapter, side by side, in runs."""

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.native.structs import AdapterRowsStruct
from octavo_shared.step_wire.step import Int32Array

NO_ADAPTER: Final = -1

# Most rows of a run, RUN_ROWS of adapters.h, and rows that no run goes beyond, TASK_ROWS of mlp.h: a multiple.
RUN_ROWS: Final = 32
TASK_ROWS: Final = 128


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows that have an adapter, of some rows of a step."""

    order: Int32Array  # [num_places] rows, those of an adapter side by side, in ascending order
    runs: npt.NDArray[np.int64]  # [num_runs, 3] slot of the adapter, and begin and end of its places

    @classmethod
    def of(cls, slots: Int32Array) -> "AdapterRows":
        """Lay out rows by the slot of the adapter of each, [num_rows]; NO_ADAPTER: it has none."""
        order = np.argsort(slots, kind="stable").astype(np.int32)
        order = order[np.count_nonzero(slots == NO_ADAPTER) :]
        own = slots[order].astype(np.int64)
        # A run ends where the adapter or the task of the row changes, and behind RUN_ROWS rows.
        begins = np.flatnonzero(np.diff(own * (len(slots) // TASK_ROWS + 1) + order // TASK_ROWS, prepend=-1))
        ends = [*begins[1:], len(own)]
        cuts = [np.arange(begin, end, RUN_ROWS) for begin, end in zip(begins, ends, strict=False)]
        bounds = np.concatenate([*cuts, [len(own)]]).astype(np.int64)
        return cls(order, np.stack([own[bounds[:-1]], bounds[:-1], bounds[1:]], axis=1))

    def groups(self) -> Sequence[tuple[int, Int32Array]]:
        """Return the slot of each adapter with its rows."""
        slots, begins = np.unique(self.runs[:, 0], return_index=True)
        ends = [*self.runs[begins[1:], 1], len(self.order)]
        firsts = self.runs[begins, 1]
        return [(int(slot), self.order[first:end]) for slot, first, end in zip(slots, firsts, ends, strict=False)]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows with adapters of all tokens of a step, and of the tokens that are wanted behind its last layer."""

    tokens: AdapterRows
    wanted: AdapterRows

    @classmethod
    def of(cls, slots: Int32Array, lengths: Int32Array, wanted: npt.NDArray[np.integer]) -> "StepRows | None":
        """Lay out the tokens of a step; None: none has an adapter.

        Args:
            slots: Of the adapter of each sequence, [num_rows], or NO_ADAPTER.
            lengths: Tokens of each, [num_rows].
            wanted: The wanted tokens, [num_wanted].
        """
        if not (slots != NO_ADAPTER).any():
            return None
        of_tokens = np.repeat(slots, lengths)
        return cls(AdapterRows.of(of_tokens), AdapterRows.of(of_tokens[wanted]))


class CurrentRows:
    """The rows of the step that runs, or of its wanted tokens, where products find them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shrunk = np.empty(0, np.float32)
        self._rows: AdapterRows | None = None  # the struct points into it
        self._widths: dict[int, int] = {}
        self.struct = AdapterRowsStruct()
        self._groups: Sequence[tuple[int, torch.Tensor]] | None = ()  # None: nobody has asked for them yet

    @property
    def address(self) -> int:
        """Where the struct is."""
        return addressof(self.struct)

    @property
    def groups(self) -> Sequence[tuple[int, torch.Tensor]]:
        """The slot of each adapter with its rows, for products of PyTorch."""
        if self._groups is None:
            assert self._rows is not None
            self._groups = [(slot, torch.from_numpy(own).to(self._device).long()) for slot, own in self._rows.groups()]
        return self._groups

    def make_room(self, slot: int, num_shrunk: int) -> None:
        """Let a product shrink a row with the adapter of a slot, which no step uses, to so many numbers."""
        self._widths[slot] = max(self._widths.get(slot, 0), num_shrunk)

    def set(self, rows: AdapterRows | None) -> None:
        """Take the rows of the next step; None: none has an adapter."""
        if rows is self._rows:
            return
        self._rows = rows
        if rows is None:
            self._groups, self.struct.num_runs = (), 0
            return
        self._groups = None
        self.struct.stride = max((self._widths.get(int(slot), 0) for slot in rows.runs[:, 0]), default=0)
        if len(self._shrunk) < len(rows.order) * self.struct.stride:
            self._shrunk = np.empty(len(rows.order) * self.struct.stride * 5 // 4, np.float32)
        self.struct.runs, self.struct.order = rows.runs.ctypes.data, rows.order.ctypes.data
        self.struct.shrunk, self.struct.num_runs = self._shrunk.ctypes.data, len(rows.runs)
