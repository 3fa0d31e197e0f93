"""What comes before and behind an attention on a latent cache, in torch; see `executor_svc.models.dense.Latent`."""

from dataclasses import dataclass
from typing import Any

import torch

from executor_svc.models.dense import LatentWeights


class JoinedMaps:
    """A linear map for each head in one tensor; see `executor_svc.models.dense.HeadMaps`."""

    def __init__(
        self, num_heads: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weight = torch.empty(num_heads, num_outputs, num_inputs, dtype=dtype, device=device)
        self.weights = self._weight.unbind()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_heads, num_inputs] to [num_rows, num_heads, num_outputs]."""
        return torch.bmm(x.transpose(0, 1), self._weight.transpose(1, 2)).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class TorchLatent:
    """See `executor_svc.models.dense.Latent`."""

    weights: LatentWeights[Any]

    def queries(self, projected: torch.Tensor) -> torch.Tensor:
        """Return what attention takes; see `Latent`."""
        weights, config = self.weights, self.weights.config
        num_tokens, width = projected.shape
        queries, of_key, latent = torch.split(
            projected, [width - config.vector_dim, config.rotary_dim, config.rank], -1
        )
        if weights.queries is not None:
            assert weights.query_norm is not None, "both or none"
            queries = weights.queries(weights.query_norm(queries.contiguous()))
        sizes = [weights.num_heads * size for size in (config.key_dim, config.rotary_dim)]
        parts = torch.split(queries, sizes, -1)
        kept, turning = (part.reshape(num_tokens, weights.num_heads, -1) for part in parts)
        vector = torch.cat((of_key, weights.norm(latent.contiguous())), -1)
        return torch.cat((torch.cat((turning, weights.keys(kept)), -1), vector[:, None]), 1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Map attended latents to values; see `Latent`."""
        return self.weights.values(attended.view(attended.shape[0], self.weights.num_heads, -1)).flatten(1)
