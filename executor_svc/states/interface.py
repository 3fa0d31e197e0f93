"""What the model, the model runner and the backends of layers with a recurrent state agree on.

A sequence has its state at its slot of the batch table. A row that begins at position 0 begins with a state of zeros,
whatever its slot holds. Convolution and recurrence go token by token, in float32, in an order that depends on the
position alone: so chunks, neighbours and threads change no bit where a backend says so.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from octavo_shared.step_wire.step import Int32Array

if TYPE_CHECKING:  # models stand on this package
    from executor_svc.models.state_config import DeltaNetConfig, Mamba2Config, ShortConvConfig, SlotState


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where the tokens of a step are. Rows are sequences, each in one row; their tokens lie one row after the other."""

    slots: Int32Array  # [num_rows] of the batch table
    starts: Int32Array  # [num_rows] position of the row's first token
    lengths: Int32Array  # [num_rows] tokens of the row in this step, 1 or more
    commits: Int32Array | None = None  # [num_rows] tokens, 1 or more, behind which the state is kept; None: all


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of one layer, float32, contiguous."""

    # [max_num_seqs, conv_size - 1, conv_dim] the last inputs of the convolution, oldest first.
    conv: torch.Tensor
    recurrent: torch.Tensor  # [max_num_seqs, *recurrent_shape]


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """The weights of a gated delta net between its projections, float32, contiguous."""

    config: "DeltaNetConfig"
    conv_weight: torch.Tensor  # [conv_size, conv_dim] the last one is that of the token itself
    a_log: torch.Tensor  # [num_value_heads]
    dt_bias: torch.Tensor  # [num_value_heads]
    norm_weight: torch.Tensor  # [value_dim]
    epsilon: float  # of the norm

    def run_on(
        self, backend: "StateBackend", projected: torch.Tensor, rows: StateRows, state: LayerState
    ) -> torch.Tensor:
        """Run the layer over the tokens of a step; see `StateBackend.delta_net`."""
        return backend.delta_net(projected, rows, state, self)


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """The weights of a short convolution between its projections, float32, contiguous."""

    config: "ShortConvConfig"
    conv_weight: torch.Tensor  # [conv_size, size] the last one is that of the token itself
    conv_bias: torch.Tensor | None  # [size]

    def run_on(
        self, backend: "StateBackend", projected: torch.Tensor, rows: StateRows, state: LayerState
    ) -> torch.Tensor:
        """Run the layer over the tokens of a step; see `StateBackend.short_conv`."""
        return backend.short_conv(projected, rows, state, self)


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The weights of a Mamba-2 layer between its projections, float32, contiguous."""

    config: "Mamba2Config"
    conv_weight: torch.Tensor  # [conv_size, conv_dim] the last one is that of the token itself
    conv_bias: torch.Tensor | None  # [conv_dim]
    a_log: torch.Tensor  # [num_heads]
    dt_bias: torch.Tensor  # [num_heads]
    d: torch.Tensor  # [num_heads]
    norm_weight: torch.Tensor  # [output_dim]
    epsilon: float  # of the norm

    @property
    def is_normed_apart(self) -> bool:
        """Whether several ranks norm what the layer returns, together."""
        return self.config.num_norm_ranks > 1

    def run_on(
        self, backend: "StateBackend", projected: torch.Tensor, rows: StateRows, state: LayerState
    ) -> torch.Tensor:
        """Run the layer over the tokens of a step; see `StateBackend.mamba2`."""
        return backend.mamba2(projected, rows, state, self)


StateWeights = DeltaNetWeights | ShortConvWeights | Mamba2Weights


class StateBackend(Protocol):
    """Computes what stands in place of attention; holds no state of its own."""

    def delta_net(
        self, projected: torch.Tensor, rows: StateRows, state: LayerState, weights: DeltaNetWeights
    ) -> torch.Tensor:
        """Run a gated delta net over the tokens of a step. Source: Yang et al. 2024, "Gated Delta Networks".

        Args:
            projected: Queries, keys, values, gates, b and a side by side, [num_tokens, projected_dim].
            rows: Where the tokens are.
            state: Of this layer; that of the rows is read, and written behind the committed tokens.
            weights: Of this layer.

        Returns:
            [num_tokens, output_dim].
        """

    def short_conv(
        self, projected: torch.Tensor, rows: StateRows, state: LayerState, weights: ShortConvWeights
    ) -> torch.Tensor:
        """Run a short convolution over the tokens of a step. Source: Liquid AI 2025, "LFM2 Technical Report".

        Args:
            projected: b, c and x side by side, [num_tokens, projected_dim].
            rows: Where the tokens are.
            state: Of this layer; that of the rows is read, and written behind the committed tokens.
            weights: Of this layer.

        Returns:
            [num_tokens, output_dim].
        """

    def mamba2(
        self, projected: torch.Tensor, rows: StateRows, state: LayerState, weights: Mamba2Weights
    ) -> torch.Tensor:
        """Run a Mamba-2 layer over the tokens of a step. Source: Dao & Gu 2024, "Transformers are SSMs".

        Args:
            projected: x, B, C, gates and dt side by side, [num_tokens, projected_dim].
            rows: Where the tokens are.
            state: Of this layer; that of the rows is read and written.
            weights: Of this layer.

        Returns:
            [num_tokens, output_dim]; not normed yet where `is_normed_apart`.
        """


def make_layer_state(config: "SlotState", max_num_seqs: int, device: torch.device) -> LayerState:
    """Return the states of a layer, for each slot of the batch table."""
    return LayerState(
        conv=torch.zeros(max_num_seqs, config.conv_size - 1, config.conv_dim, device=device),
        recurrent=torch.zeros(max_num_seqs, *config.recurrent_shape, device=device),
    )
