"""The tokens that were sampled last for each slot, kept where the model runs.

A step may be launched before the ids that it reads have reached the host: in the batch table they are `UNKNOWN_TOKEN`.
The work of a device is done in order, so that here they are known when the step reads them.
"""

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.device.transfer import index_to_device
from octavo_shared.step_wire.step import UNKNOWN_TOKEN, Int32Array

# Tokens of a slot that are kept: so many steps may be launched before the first of them is recorded.
MAX_UNKNOWN_TOKENS = 8

IndexArray = npt.NDArray[np.integer]


class LastTokens:
    """The last `MAX_UNKNOWN_TOKENS` token ids of each slot, by their positions.

    Args:
        max_num_seqs: Slots of the batch table.
        device: Where the model runs.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self._token_ids = torch.zeros(max_num_seqs * MAX_UNKNOWN_TOKENS, dtype=torch.int64, device=device)

    def store(self, slots: Int32Array, positions: Int32Array, token_ids: torch.Tensor) -> None:
        """Keep the tokens that a step sampled, [num_samples] int64 on the device; beams' tokens mean nothing."""
        self._token_ids[index_to_device(self.places_of(slots, positions), self.device)] = token_ids

    def places_of(self, slots: IndexArray, positions: IndexArray) -> npt.NDArray[np.int64]:
        """Return where the tokens at some positions are kept, for `choose`."""
        return slots.astype(np.int64) * MAX_UNKNOWN_TOKENS + positions % MAX_UNKNOWN_TOKENS

    def fill_in(self, token_ids: IndexArray, slots: IndexArray, positions: IndexArray) -> torch.Tensor:
        """Return tokens from the batch table, on the device, with the unknown ones known, [num_tokens] int64.

        Args:
            token_ids: [num_tokens].
            slots: The slot of each, [num_tokens].
            positions: The position of each, [num_tokens].
        """
        on_device = index_to_device(token_ids, self.device)  # a copy, on a CPU too
        unknown = np.flatnonzero(token_ids == UNKNOWN_TOKEN)
        if len(unknown):
            both = index_to_device(np.stack((unknown, self.places_of(slots[unknown], positions[unknown]))), self.device)
            on_device[both[0]] = self._token_ids[both[1]]
        return on_device

    def choose(self, token_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Do what `fill_in` does with tensors on the device, and nothing on the host."""
        return torch.where(token_ids == UNKNOWN_TOKEN, self._token_ids[places], token_ids)
