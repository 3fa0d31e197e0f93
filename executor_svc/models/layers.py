"""The matrix product that all layers share."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- the name that everybody knows

# Between these numbers of rows, MKL's x @ W.T runs at half the speed of W @ x.T or less, for every
# weight shape of SmolLM2-135M (30 gate_up products of 32 rows: 73.7 against 32.4 ms; the lm_head:
# 37.6 against 16.7 ms). Outside of them it is as fast or faster. Measured: Intel Xeon 2.5 GHz with
# 2 cores, torch 2.13.0, float32, 2026-11-21; an AMD Milan shows the same at 32 rows.
MIN_ROWS_TRANSPOSED = 4
MAX_ROWS_TRANSPOSED = 63


@dataclass(frozen=True, slots=True)
class Linear:
    """An affine map; its weights are filled in by the loader."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None  # [out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, in_features] to [num_rows, out_features]; the result may be column-major."""
        if not (MIN_ROWS_TRANSPOSED <= len(x) <= MAX_ROWS_TRANSPOSED and x.is_cpu and x.dtype == torch.float32):
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(self.weight, x.t()).t()
        return torch.addmm(self.bias[:, None], self.weight, x.t()).t()
