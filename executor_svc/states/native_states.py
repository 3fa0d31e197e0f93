"""Gated delta nets in C, float32 on a CPU: the same bits in any chunks, beside any neighbours, on any threads.

See `executor_svc/native/csrc/delta_net.c`.
"""

import numpy as np
import torch

from executor_svc.native.library import NativeLibrary
from executor_svc.native.structs import DeltaNetStruct, NormStruct, StepRowsStruct
from executor_svc.states.interface import DeltaNetWeights, LayerState, StateRows


class NativeStateBackend:
    """Gated delta nets in C; see `StateBackend`."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def delta_net(
        self, projected: torch.Tensor, rows: StateRows, state: LayerState, weights: DeltaNetWeights
    ) -> torch.Tensor:
        """Run a gated delta net over the tokens of a step."""
        config = weights.config
        assert projected.shape[1] == config.projected_dim, "what C takes for a token"
        columns = [np.ascontiguousarray(column, np.int32) for column in (rows.slots, rows.starts, rows.lengths)]
        row_struct = StepRowsStruct(len(rows.slots), *(column.ctypes.data for column in columns))
        out = torch.empty(projected.shape[0], config.output_dim)
        self._library.delta_net(delta_net_struct(weights), row_struct, projected, state.conv, state.recurrent, out)
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
