"""States in C, float32 on a CPU: the same bits in any chunks, beside any neighbours, on any threads.

See `delta_net.c`, `short_conv.c` and `mamba2.c` in `executor_svc/native/csrc/`.
"""

import numpy as np
import torch

from executor_svc.native.library import NativeLibrary
from executor_svc.native.structs import DeltaNetStruct, Mamba2Struct, NormStruct, ShortConvStruct, StepRowsStruct
from executor_svc.states.interface import (
    DeltaNetWeights,
    LayerState,
    Mamba2Weights,
    ShortConvWeights,
    StateRows,
    StateWeights,
)
from octavo_shared.step_wire.step import Int32Array


class NativeStateBackend:
    """States in C; see `StateBackend`."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def delta_net(
        self, projected: torch.Tensor, rows: StateRows, state: LayerState, weights: DeltaNetWeights
    ) -> torch.Tensor:
        """Run a gated delta net over the tokens of a step."""
        return self._recur(delta_net_struct(weights), projected, rows, state, weights)

    def short_conv(
        self, projected: torch.Tensor, rows: StateRows, state: LayerState, weights: ShortConvWeights
    ) -> torch.Tensor:
        """Run a short convolution over the tokens of a step."""
        out, columns = _empty_output(projected, weights), _columns(rows)
        self._library.short_conv(short_conv_struct(weights), _rows_struct(columns), projected, state.conv, out)
        return out

    def mamba2(
        self, projected: torch.Tensor, rows: StateRows, state: LayerState, weights: Mamba2Weights
    ) -> torch.Tensor:
        """Run a Mamba-2 layer over the tokens of a step."""
        return self._recur(mamba2_struct(weights), projected, rows, state, weights)

    def _recur(
        self,
        struct: DeltaNetStruct | Mamba2Struct,
        projected: torch.Tensor,
        rows: StateRows,
        state: LayerState,
        weights: StateWeights,
    ) -> torch.Tensor:
        out, columns = _empty_output(projected, weights), _columns(rows)
        self._library.recurrence(struct, _rows_struct(columns), projected, state.conv, state.recurrent, out)
        return out


def delta_net_struct(weights: DeltaNetWeights) -> DeltaNetStruct:
    """Return a gated delta net as C has it, with pointers into `weights`."""
    config = weights.config
    tensors = (weights.conv_weight, weights.a_log, weights.dt_bias, weights.norm_weight)
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in tensors), "C reads float32"
    return DeltaNetStruct(
        num_key_heads=config.num_key_heads,
        num_value_heads=config.num_value_heads,
        key_dim=config.key_dim,
        value_dim=config.value_dim,
        conv_size=config.conv_size,
        is_tiled=config.is_tiled,
        conv_weight=weights.conv_weight.data_ptr(),
        a_log=weights.a_log.data_ptr(),
        dt_bias=weights.dt_bias.data_ptr(),
        norm=NormStruct(weight=weights.norm_weight.data_ptr(), epsilon=weights.epsilon),
    )


def short_conv_struct(weights: ShortConvWeights) -> ShortConvStruct:
    """Return a short convolution as C has it, with pointers into `weights`."""
    bias = weights.conv_bias
    tensors = (weights.conv_weight,) if bias is None else (weights.conv_weight, bias)
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in tensors), "C reads float32"
    return ShortConvStruct(
        size=weights.config.size,
        conv_size=weights.config.conv_size,
        conv_weight=weights.conv_weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
    )


def mamba2_struct(weights: Mamba2Weights) -> Mamba2Struct:
    """Return a Mamba-2 layer as C has it, with pointers into `weights`."""
    config, bias = weights.config, weights.conv_bias
    vectors = (weights.a_log, weights.dt_bias, weights.d, weights.norm_weight)
    tensors = (weights.conv_weight, *vectors, *(() if bias is None else (bias,)))
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in tensors), "C reads float32"
    norm_weight = None if weights.is_normed_apart else weights.norm_weight.data_ptr()
    return Mamba2Struct(
        num_heads=config.num_heads,
        num_groups=config.num_groups,
        head_dim=config.head_dim,
        state_size=config.state_size,
        conv_size=config.conv_size,
        conv_weight=weights.conv_weight.data_ptr(),
        conv_bias=None if bias is None else bias.data_ptr(),
        a_log=weights.a_log.data_ptr(),
        dt_bias=weights.dt_bias.data_ptr(),
        d=weights.d.data_ptr(),
        norm=NormStruct(weight=norm_weight, epsilon=weights.epsilon),
    )


def _empty_output(projected: torch.Tensor, weights: StateWeights) -> torch.Tensor:
    assert projected.shape[1] == weights.config.projected_dim, "what C takes for a token"
    return torch.empty(projected.shape[0], weights.config.output_dim)


def _columns(rows: StateRows) -> list[Int32Array]:
    commits = rows.lengths if rows.commits is None else rows.commits
    return [np.ascontiguousarray(column, np.int32) for column in (rows.slots, rows.starts, rows.lengths, commits)]


def _rows_struct(columns: list[Int32Array]) -> StepRowsStruct:
    """Return the rows of a step as C has them, with pointers into `columns`."""
    return StepRowsStruct(len(columns[0]), *(column.ctypes.data for column in columns))
