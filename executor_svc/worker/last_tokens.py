"""The token that was sampled last for each slot, kept where the model runs.

A step may be launched before the ids that it feeds to the model have reached the host: in the batch table they are
`UNKNOWN_TOKEN`. The work of a device is done in order, so that here they are known when the step reads them.
"""

import numpy as np
import torch

from executor_svc.device.transfer import index_to_device
from octavo_shared.step_wire.step import UNKNOWN_TOKEN, Int32Array


class LastTokens:
    """One token id a slot.

    Args:
        max_num_seqs: Slots of the batch table.
        device: Where the model runs.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self.token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def store(self, slots: Int32Array, token_ids: torch.Tensor) -> None:
        """Keep the tokens that a step sampled, [num_samples] int64 on the device; beams' tokens mean nothing."""
        self.token_ids[index_to_device(slots, self.device)] = token_ids

    def fill_in(self, token_ids: Int32Array, slots: Int32Array) -> torch.Tensor:
        """Return tokens from the batch table, on the device, with the unknown ones known, [num_tokens] int64.

        Args:
            token_ids: [num_tokens].
            slots: The slot of each, [num_tokens].
        """
        on_device = index_to_device(token_ids, self.device)
        if not np.count_nonzero(token_ids == UNKNOWN_TOKEN):
            return on_device
        return self.choose(on_device, index_to_device(slots, self.device))

    def choose(self, token_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Do what `fill_in` does with tensors on the device, and nothing on the host."""
        return torch.where(token_ids == UNKNOWN_TOKEN, self.token_ids[slots], token_ids)
