"""ctypes bindings of dense work and attention: tensors in, pointers out."""

import ctypes
import logging
from collections.abc import Callable, Sequence
from ctypes import byref
from functools import partial
from pathlib import Path

import numpy as np
import torch

from executor_svc.native.binding import FLOAT, INT, LONG, POINTER, Function, ScratchMemory, bind
from executor_svc.native.build import find_library
from executor_svc.native.structs import (
    AcceptedDraftsStruct,
    BatchStruct,
    DeltaNetStruct,
    EmbeddingStruct,
    LatentStruct,
    LayerCacheStruct,
    Mamba2Struct,
    MatrixStruct,
    ModelStruct,
    NormStruct,
    NumberFormat,
    SegmentStruct,
    ShortConvStruct,
    StepRowsStruct,
    StepStruct,
)
from octavo_shared.process.events import Event
from octavo_shared.step_wire.step import Int32Array

_logger = logging.getLogger(__name__)


class TeamStruct(ctypes.Structure):
    """`Team` of team.h."""

    _fields_ = (
        ("num_threads", LONG),
        ("size", LONG),
        ("pause_ns", LONG),
        ("grows_at_ns", LONG),
        ("elapsed_ns", LONG),
        ("worked_ns", LONG),
        ("lost_ns", LONG),
    )


_FUNCTIONS: Sequence[Function] = (
    ("octavo_panel_columns", LONG, ()),
    ("octavo_lanes", LONG, ()),
    ("octavo_panels_bytes", LONG, (LONG, LONG, LONG)),
    ("octavo_scales_bytes", LONG, (LONG, LONG, LONG)),
    ("octavo_pack", None, (POINTER, LONG, LONG, POINTER, INT)),
    ("octavo_pack_blocks", LONG, (POINTER, LONG, LONG, LONG, POINTER, LONG, POINTER, INT)),
    ("octavo_read_rows", None, (POINTER, LONG, LONG, POINTER, POINTER, INT)),
    ("octavo_finish_embedding", None, (POINTER, LONG, POINTER, POINTER, INT)),
    ("octavo_rotations", None, (LONG, POINTER, POINTER, LONG, FLOAT, POINTER, POINTER, INT)),
    ("octavo_soft_cap", None, (LONG, FLOAT, POINTER, INT)),
    ("octavo_scale", None, (LONG, FLOAT, POINTER, INT)),
    ("octavo_linear_scratch_bytes", LONG, (POINTER, LONG)),
    ("octavo_linear", None, (POINTER, LONG, POINTER, POINTER, POINTER, POINTER)),
    ("octavo_segment_scratch_bytes", LONG, (POINTER, LONG)),
    ("octavo_segment", None, (POINTER, LONG, POINTER, POINTER, POINTER, POINTER, POINTER)),
    ("octavo_mlp", None, (POINTER, LONG, POINTER, POINTER, POINTER, POINTER)),
    ("octavo_end_layer", None, (POINTER, LONG, POINTER, POINTER, POINTER)),
    ("octavo_add_parts", None, (POINTER, FLOAT, LONG, LONG, LONG, POINTER, POINTER, INT)),
    ("octavo_plan_attention", LONG, (POINTER, LONG, POINTER, POINTER, POINTER, INT, POINTER)),
    ("octavo_attention_scratch_bytes", LONG, (POINTER,)),
    ("octavo_attention", None, (POINTER,) * 7),
    ("octavo_latent_scratch_bytes", LONG, (POINTER, LONG)),
    ("octavo_latent_queries", None, (POINTER, LONG, POINTER, POINTER, POINTER, POINTER)),
    ("octavo_latent_values", None, (POINTER, LONG, POINTER, POINTER, POINTER, POINTER)),
    ("octavo_gate_rows", None, (LONG, LONG, POINTER, POINTER, LONG)),
    ("octavo_delta_net_scratch_bytes", LONG, (POINTER, LONG)),
    ("octavo_delta_net", None, (POINTER,) * 8),
    ("octavo_short_conv", None, (POINTER,) * 6),
    ("octavo_mamba2_scratch_bytes", LONG, (POINTER, LONG)),
    ("octavo_mamba2", None, (POINTER,) * 8),
    ("octavo_forward", LONG, (POINTER, POINTER, POINTER, LONG, POINTER)),
    ("octavo_accept_drafts", LONG, (POINTER, POINTER, POINTER, LONG, POINTER)),
)


class NativeLibrary:
    """The functions of the library, and the scratch memory that they share: one call at a time.

    Tensors are float32, contiguous and on the CPU, token ids int64; shapes are the caller's to get right.

    Args:
        path: The compiled library.
        num_threads: Most threads of a parallel region; where other work wants the cores too, they become fewer.

    Raises: NativeUnavailableError: the file cannot be loaded.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        self.path = path
        self._library = bind(path, _FUNCTIONS)
        self._scratch = ScratchMemory()
        self._team = TeamStruct(num_threads=num_threads, size=num_threads)
        self.num_threads = num_threads
        self.panel_columns: int = self._library.octavo_panel_columns()
        self.num_lanes: int = self._library.octavo_lanes()
        self.instructions = {16: "AVX-512", 8: "AVX2"}[self.num_lanes]

    def matrix_bytes(self, number_format: NumberFormat, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        """Return the bytes of the panels of a matrix, and of its scales."""
        shape = (number_format, num_outputs, num_inputs)
        return self._library.octavo_panels_bytes(*shape), self._library.octavo_scales_bytes(*shape)

    def pack(self, matrix: MatrixStruct, first_row: int, weight: torch.Tensor) -> None:
        """Write `weight`, [num_rows, num_inputs], into a matrix from `first_row`, in the format of the matrix."""
        self._library.octavo_pack(byref(matrix), first_row, len(weight), weight.data_ptr(), self.num_threads)

    def pack_blocks(
        self, matrix: MatrixStruct, first_row: int, blocks: torch.Tensor, block_type: int, order: torch.Tensor | None
    ) -> bool:
        """Copy the codes of a file into a matrix from `first_row`; return whether it holds all of them exactly.

        Args:
            matrix: In a format of integers.
            first_row: Where they begin.
            blocks: Rows of blocks, [num_rows, num_bytes] uint8.
            block_type: What a block is, by ggml's numbers; blocks.c has to know it.
            order: Which of the rows to take, in this order, int64; None: all.
        """
        num_rows = len(blocks) if order is None else len(order)
        ids = None if order is None else order.data_ptr()
        place = (blocks.data_ptr(), blocks.stride(0), ids, self.num_threads)
        num_inexact: int = self._library.octavo_pack_blocks(byref(matrix), first_row, num_rows, block_type, *place)
        assert num_inexact >= 0, "a load is planned with types that are known here"
        return num_inexact == 0

    def read_rows(self, matrix: MatrixStruct, row_ids: torch.Tensor, out: torch.Tensor, first_id: int = 0) -> None:
        """Copy rows `row_ids - first_id` of a matrix to `out`, [num_ids, num_inputs]; zeros where there is none."""
        ids, num_ids = row_ids.data_ptr(), row_ids.shape[0]
        self._library.octavo_read_rows(byref(matrix), first_id, num_ids, ids, out.data_ptr(), self.num_threads)

    def finish_embedding(self, embedding: EmbeddingStruct, positions: torch.Tensor, residual: torch.Tensor) -> None:
        """Scale, shift and norm the embeddings of tokens, [num_tokens, hidden_size]; see embedding.c."""
        self._library.octavo_finish_embedding(
            byref(embedding), positions.shape[0], positions.data_ptr(), residual.data_ptr(), self.num_threads
        )

    def rotations(
        self,
        positions: torch.Tensor,
        frequencies: torch.Tensor,
        factor: float,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
    ) -> None:
        """Compute the rotation of tokens, both [num_tokens, rotary_dim]; see octavo_rotations in rotation.c."""
        self._library.octavo_rotations(
            positions.shape[0],
            positions.data_ptr(),
            frequencies.data_ptr(),
            frequencies.shape[0],
            factor,
            cos.data_ptr(),
            signed_sin.data_ptr(),
            self.num_threads,
        )

    def soft_cap(self, values: torch.Tensor, cap: float) -> None:
        """Make of each value cap * tanh(value / cap)."""
        assert values.is_contiguous(), "values lie one after the other"
        self._library.octavo_soft_cap(values.numel(), cap, values.data_ptr(), self.num_threads)

    def scale(self, values: torch.Tensor, factor: float) -> None:
        """Multiply each value by a factor."""
        assert values.is_contiguous(), "values lie one after the other"
        self._library.octavo_scale(values.numel(), factor, values.data_ptr(), self.num_threads)

    def linear(self, matrix: MatrixStruct, x: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply the rows of `x`, [num_rows, num_inputs], with a matrix; see octavo_linear in linear.c."""
        assert x.is_contiguous(), "rows lie one after the other"
        num_rows = x.shape[0]
        num_bytes = self._library.octavo_linear_scratch_bytes(byref(matrix), num_rows)
        self._library.octavo_linear(
            byref(matrix),
            num_rows,
            x.data_ptr(),
            out.data_ptr(),
            self._scratch.address(num_bytes),
            byref(self._team),
        )

    def segment(
        self, segment: SegmentStruct, attended: torch.Tensor | None, residual: torch.Tensor, out: torch.Tensor | None
    ) -> None:
        """Run a segment; see octavo_segment in segment.c. `out` is None if it has no projection."""
        assert residual.is_contiguous(), "rows lie one after the other"
        assert attended is None or attended.is_contiguous(), "rows lie one after the other"
        num_rows = residual.shape[0]  # len() of a tensor costs several times as much
        num_bytes = self._library.octavo_segment_scratch_bytes(byref(segment), num_rows)
        self._library.octavo_segment(
            byref(segment),
            num_rows,
            None if attended is None else attended.data_ptr(),
            residual.data_ptr(),
            None if out is None else out.data_ptr(),
            self._scratch.address(num_bytes),
            byref(self._team),
        )

    def mlp(self, segment: SegmentStruct, residual: torch.Tensor, out: torch.Tensor) -> None:
        """Run the MLP of a segment's layer end alone; see octavo_mlp in segment.c. Both tensors have one shape."""
        assert residual.is_contiguous(), "rows lie one after the other"
        num_rows = residual.shape[0]
        num_bytes = self._library.octavo_segment_scratch_bytes(byref(segment), num_rows)
        self._library.octavo_mlp(
            byref(segment),
            num_rows,
            residual.data_ptr(),
            out.data_ptr(),
            self._scratch.address(num_bytes),
            byref(self._team),
        )

    def end_layer(self, segment: SegmentStruct, residual: torch.Tensor) -> None:
        """Do what follows on the MLP of a segment's layer end; see octavo_end_layer in segment.c."""
        num_rows = residual.shape[0]
        num_bytes = self._library.octavo_segment_scratch_bytes(byref(segment), num_rows)
        self._library.octavo_end_layer(
            byref(segment), num_rows, residual.data_ptr(), self._scratch.address(num_bytes), byref(self._team)
        )

    def add_parts(self, norm: NormStruct, scale: float, parts: torch.Tensor, residual: torch.Tensor) -> None:
        """Add the scaled norm of the sum of `parts`, [num_parts, num_rows, size], to `residual`: octavo_add_parts."""
        assert residual.is_contiguous(), "rows lie one after the other"
        self._library.octavo_add_parts(
            byref(norm), scale, *parts.shape, parts.data_ptr(), residual.data_ptr(), self.num_threads
        )

    def plan_attention(
        self, step: StepStruct, tables: Int32Array, starts: Int32Array, lengths: Int32Array
    ) -> ScratchMemory:
        """Fill in the tiles and tasks of a step; see plan.c. Returns where they are: it must live as long as the step.

        Args:
            step: With its heads and its window.
            tables: Rows of the block tables, [num_rows].
            starts: Position of the first token of each, [num_rows].
            lengths: Tokens of each, [num_rows].
        """
        assert all(array.flags.c_contiguous and array.dtype == np.int32 for array in (tables, starts, lengths))
        plan = partial(
            self._library.octavo_plan_attention,
            byref(step),
            len(tables),
            tables.ctypes.data,
            starts.ctypes.data,
            lengths.ctypes.data,
            self.num_threads,
        )
        memory = ScratchMemory()
        plan(memory.address(plan(None)))
        return memory

    def attention(
        self, step: StepStruct, qkv: torch.Tensor, cache: LayerCacheStruct, sinks: int | None, out: torch.Tensor
    ) -> None:
        """Run the attention of a layer; see octavo_attention in attention.c."""
        num_bytes = self._library.octavo_attention_scratch_bytes(byref(step))
        self._library.octavo_attention(
            byref(step),
            qkv.data_ptr(),
            byref(cache),
            sinks,
            out.data_ptr(),
            self._scratch.address(num_bytes),
            byref(self._team),
        )

    def latent_queries(self, latent: LatentStruct, projected: torch.Tensor, out: torch.Tensor) -> None:
        """Make what attention on a latent cache takes; see octavo_latent_queries. `projected` is overwritten."""
        self._run_latent(self._library.octavo_latent_queries, latent, projected, out)

    def latent_values(self, latent: LatentStruct, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Make values of attended latents; see octavo_latent_values."""
        self._run_latent(self._library.octavo_latent_values, latent, attended, out)

    def _run_latent(
        self, run: Callable[..., None], latent: LatentStruct, rows: torch.Tensor, out: torch.Tensor
    ) -> None:
        assert rows.is_contiguous(), "tokens lie one after the other"
        num_bytes = self._library.octavo_latent_scratch_bytes(byref(latent), rows.shape[0])
        addresses = rows.data_ptr(), out.data_ptr(), self._scratch.address(num_bytes)
        run(byref(latent), rows.shape[0], *addresses, byref(self._team))

    def gate_rows(self, values: torch.Tensor, gates: torch.Tensor) -> None:
        """Multiply values in place by the sigmoid of gates, both [num_rows, size]; see octavo_gate_rows."""
        assert values.is_contiguous(), "rows lie one after the other"
        assert gates.stride(1) == 1, "the gates of a row lie side by side"
        self._library.octavo_gate_rows(*values.shape, values.data_ptr(), gates.data_ptr(), gates.stride(0))

    def recurrence(
        self,
        layer: DeltaNetStruct | Mamba2Struct,
        rows: StepRowsStruct,
        projected: torch.Tensor,
        conv_states: torch.Tensor,
        states: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Run a gated delta net or a Mamba-2 layer; see octavo_delta_net in delta_net.c, octavo_mamba2 in mamba2.c."""
        assert projected.is_contiguous(), "tokens lie one after the other"
        library = self._library
        scratch_bytes, run = library.octavo_delta_net_scratch_bytes, library.octavo_delta_net
        if isinstance(layer, Mamba2Struct):
            scratch_bytes, run = library.octavo_mamba2_scratch_bytes, library.octavo_mamba2
        run(
            byref(layer),
            byref(rows),
            projected.data_ptr(),
            conv_states.data_ptr(),
            states.data_ptr(),
            out.data_ptr(),
            self._scratch.address(scratch_bytes(byref(layer), projected.shape[0])),
            byref(self._team),
        )

    def short_conv(
        self,
        conv: ShortConvStruct,
        rows: StepRowsStruct,
        projected: torch.Tensor,
        conv_states: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Run the short convolution of a layer; see octavo_short_conv in short_conv.c."""
        assert projected.is_contiguous(), "tokens lie one after the other"
        self._library.octavo_short_conv(
            byref(conv),
            byref(rows),
            projected.data_ptr(),
            conv_states.data_ptr(),
            out.data_ptr(),
            byref(self._team),
        )

    def forward(self, model: ModelStruct, batch: BatchStruct) -> None:
        """Run a step of a model; see octavo_forward in forward.c."""
        missing = 0
        while True:
            memory = self._scratch.address(missing)
            missing = self._library.octavo_forward(
                byref(model), byref(batch), memory, self._scratch.num_bytes, byref(self._team)
            )
            if not missing:
                return

    def accept_drafts(self, model: ModelStruct, accepted: AcceptedDraftsStruct) -> None:
        """Let the states of a model take drafts of its last step; see octavo_accept_drafts in forward.c."""
        missing = 0
        while True:
            memory = self._scratch.address(missing)
            missing = self._library.octavo_accept_drafts(
                byref(model), byref(accepted), memory, self._scratch.num_bytes, byref(self._team)
            )
            if not missing:
                return


def load_library(num_threads: int) -> NativeLibrary:
    """Return the library, compiled now if it was not built before.

    Raises: NativeUnavailableError: it cannot be had on this machine; the message says why.
    """
    path = find_library()
    _logger.info(Event("kernel_library", path=str(path)))
    return NativeLibrary(path, num_threads)
