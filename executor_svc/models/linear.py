"""Linear maps in torch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

# Between these numbers of rows, MKL's x @ W.T runs at half the speed of W @ x.T or less, for every
# weight shape of SmolLM2-135M (30 gate_up products of 32 rows: 73.7 against 32.4 ms; the lm_head:
# 37.6 against 16.7 ms). Outside of them it is as fast or faster. Measured: Intel Xeon 2.5 GHz with
# 2 cores, torch 2.13.0, float32, 2026-11-21; an AMD Milan shows the same at 32 rows.
MIN_ROWS_TRANSPOSED = 4
MAX_ROWS_TRANSPOSED = 63


class Linear:
    """A linear map [sum of sizes, num_inputs] of parts that are merged; its weights are filled in by the loader."""

    def __init__(
        self, num_inputs: int, sizes: Sequence[int], *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weight = torch.empty((sum(sizes), num_inputs), dtype=dtype, device=device)
        self._bias = torch.empty(sum(sizes), dtype=dtype, device=device) if has_bias else None
        self.weights = torch.split(self._weight, list(sizes))
        self.biases = () if self._bias is None else torch.split(self._bias, list(sizes))

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [num_ids, num_inputs]."""
        return F.embedding(row_ids, self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]; the result may be column-major."""
        if not (MIN_ROWS_TRANSPOSED <= len(x) <= MAX_ROWS_TRANSPOSED and x.is_cpu and x.dtype == torch.float32):
            return F.linear(x, self._weight, self._bias)
        if self._bias is None:
            return torch.mm(self._weight, x.t()).t()
        return torch.addmm(self._bias[:, None], self._weight, x.t()).t()
