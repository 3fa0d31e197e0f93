"""The states of all live sequences, at their slots of the batch table; the worker owns them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from executor_svc.states.interface import LayerState, StateRows, make_layer_state
from octavo_shared.step_wire.step import Fork, Int32Array
from octavo_shared.step_wire.step_layout import StepLayout

if TYPE_CHECKING:  # models stand on this package
    from executor_svc.models.state_config import SlotState


@dataclass(frozen=True, slots=True)
class StepStates:
    """What a step needs of the states."""

    rows: StateRows
    # Of the layers with a state, in their order; behind them the last hidden state, if a head drafts.
    layers: Sequence[LayerState]
    # What each of them has taken for the tokens that are not committed, [num_drafts, projected_dim].
    draft_inputs: list[torch.Tensor] = field(default_factory=list)

    def keep(self, projected: torch.Tensor) -> None:
        """Keep what the next layer takes for the tokens that are not committed, of [num_tokens, projected_dim]."""
        rows = self.rows
        if rows.commits is not None:
            places = np.arange(len(projected)) - (rows.lengths.cumsum() - rows.lengths).repeat(rows.lengths)
            drafts = (places >= rows.commits.repeat(rows.lengths)).nonzero()[0]
            self.draft_inputs.append(projected[torch.from_numpy(drafts).to(projected.device)])


@dataclass(frozen=True, slots=True)
class AcceptedDrafts:
    """The drafts of a step that were right."""

    rows: StateRows  # that have some: the position of the first one, and how many they are
    first_drafts: Int32Array  # [num_rows] which of the drafts of the step that is
    num_drafts: int  # of the step

    @classmethod
    def of(cls, step: StateRows, num_accepted: Int32Array) -> AcceptedDrafts:
        """Return the first drafts of each row.

        Args:
            step: The rows of the step that computed them.
            num_accepted: How many of each row were right, [num_rows].
        """
        assert step.commits is not None, "the step has drafts"
        num_drafts, index = step.lengths - step.commits, num_accepted.nonzero()[0]
        rows = StateRows(step.slots[index], (step.starts + step.commits)[index], num_accepted[index])
        first_drafts = (num_drafts.cumsum() - num_drafts)[index].astype(np.int32)
        return cls(rows, first_drafts, int(num_drafts.sum()))

    def inputs_of(self, draft_inputs: torch.Tensor) -> torch.Tensor:
        """Return those of a layer, [num_accepted, projected_dim], of those of all drafts."""
        begins = self.rows.lengths.cumsum() - self.rows.lengths
        index = np.arange(self.rows.lengths.sum()) + (self.first_drafts - begins).repeat(self.rows.lengths)
        return draft_inputs[torch.from_numpy(index).to(draft_inputs.device)]


def state_rows(layout: StepLayout) -> StateRows:
    """Return the rows of a step; of decodes the last token is certain, what is behind it are drafts."""
    commits = None
    if (layout.lengths[: layout.num_decodes] > 1).any():
        commits = layout.lengths.copy()
        commits[: layout.num_decodes] = 1
    return StateRows(layout.slots, layout.starts, layout.lengths, commits)


class LiveStates:
    """One state a slot and layer.

    Nothing else clears them: a row that begins at position 0 begins anew, and one that begins behind it has loaded a
    saved state, so whatever a slot held, of an earlier sequence or of a step that failed half way, is never read.

    Args:
        configs: Of the layers with a state, of this rank.
        max_num_seqs: Slots of the batch table.
        device: Where the model runs.
    """

    def __init__(self, configs: Iterable[SlotState], max_num_seqs: int, device: torch.device) -> None:
        self.layers = [make_layer_state(config, max_num_seqs, device) for config in configs]

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of all of them."""
        return [tensor.untyped_storage() for layer in self.layers for tensor in (layer.conv, layer.recurrent)]

    def of_step(self, layout: StepLayout) -> StepStates:
        """Return what a step needs."""
        return StepStates(state_rows(layout), self.layers)

    def fork(self, forks: Iterable[Fork]) -> None:
        """Copy the state of each parent, as it is now, to its child."""
        for fork in forks:
            for layer in self.layers:
                layer.conv[fork.slot] = layer.conv[fork.parent_slot]
                layer.recurrent[fork.slot] = layer.recurrent[fork.parent_slot]
