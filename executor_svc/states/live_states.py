"""The states of all live sequences, at their slots of the batch table; the worker owns them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from executor_svc.states.interface import LayerState, StateRows, make_layer_state
from octavo_shared.step_wire.step import Fork, StepLayout

if TYPE_CHECKING:  # models stand on this package
    from executor_svc.models.config import StateConfig


@dataclass(frozen=True, slots=True)
class StepStates:
    """What a step needs of the states."""

    rows: StateRows
    layers: Sequence[LayerState]  # of the layers with a state, in their order


class LiveStates:
    """One state a slot and layer.

    Nothing else clears them: a row that begins at position 0 begins anew, and one that begins behind it has loaded a
    saved state, so whatever a slot held, of an earlier sequence or of a step that failed half way, is never read.

    Args:
        configs: Of the layers with a state, of this rank.
        max_num_seqs: Slots of the batch table.
        device: Where the model runs.
    """

    def __init__(self, configs: Iterable[StateConfig], max_num_seqs: int, device: torch.device) -> None:
        self.layers = [make_layer_state(config, max_num_seqs, device) for config in configs]

    def of_step(self, layout: StepLayout) -> StepStates:
        """Return what a step needs."""
        return StepStates(StateRows(layout.slots, layout.starts, layout.lengths), self.layers)

    def fork(self, forks: Iterable[Fork]) -> None:
        """Copy the state of each parent, as it is now, to its child."""
        for fork in forks:
            for layer in self.layers:
                layer.conv[fork.slot] = layer.conv[fork.parent_slot]
                layer.recurrent[fork.slot] = layer.recurrent[fork.parent_slot]
