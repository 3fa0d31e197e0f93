"""Linear maps in torch: with plain weights, and with weights in int8."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 -- the name that everybody knows

# Between these numbers of rows, MKL's x @ W.T runs at half the speed of W @ x.T or less, for every
# weight shape of SmolLM2-135M (30 gate_up products of 32 rows: 73.7 against 32.4 ms; the lm_head:
# 37.6 against 16.7 ms). Outside of them it is as fast or faster. Measured: Intel Xeon 2.5 GHz with
# 2 cores, torch 2.13.0, float32, 2026-11-21; an AMD Milan shows the same at 32 rows.
MIN_ROWS_TRANSPOSED = 4
MAX_ROWS_TRANSPOSED = 63

# Inputs that share a scale in int8: of a few hundred the largest would rule, fewer cost more scales.
INT8_GROUP = 32


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


class QuantizedLinear:
    """A linear map whose weight is int8 times a scale for each group of INT8_GROUP inputs.

    The weight is restored in each call, which saves memory and costs much time: the reference of kernels that
    multiply int8, and what serves without them for those who ask for it.
    """

    def __init__(
        self, num_inputs: int, sizes: Sequence[int], *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_outputs, num_groups = sum(sizes), -(-num_inputs // INT8_GROUP)
        self._num_inputs = num_inputs
        self._codes = torch.empty((num_outputs, num_groups, INT8_GROUP), dtype=torch.int8, device=device)
        self._scales = torch.empty((num_outputs, num_groups, 1), device=device)
        self._dtype = dtype
        self._bias = torch.empty(num_outputs, dtype=dtype, device=device) if has_bias else None
        parts = zip(torch.split(self._codes, list(sizes)), torch.split(self._scales, list(sizes)), strict=True)
        self.weights = tuple(_QuantizedPart(codes, scales, num_inputs) for codes, scales in parts)
        self.biases = () if self._bias is None else torch.split(self._bias, list(sizes))

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [num_ids, num_inputs]."""
        return self._restore(self._codes[row_ids], self._scales[row_ids])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""
        return F.linear(x, self._restore(self._codes, self._scales), self._bias)

    def _restore(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (codes * scales).flatten(1)[:, : self._num_inputs].to(self._dtype)


class _QuantizedPart:
    """Rows of a quantized weight as the loader sees them."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, num_inputs: int) -> None:
        self._codes = codes
        self._scales = scales
        self.shape = torch.Size((len(codes), num_inputs))
        self.nbytes = len(codes) * num_inputs * 4

    def copy_(self, source: torch.Tensor, /) -> None:
        """Quantize `source`, a tensor of this shape: the largest weight of a group becomes 127 or -127."""
        num_inputs = self.shape[1]
        padded = F.pad(source.to(self._codes.device, torch.float32), (0, -num_inputs % INT8_GROUP))
        groups = padded.view(self._codes.shape)
        self._scales.copy_((groups.abs().amax(-1, keepdim=True) / 127).half())
        self._codes.copy_((groups / self._scales.clamp(min=1e-38)).round().clamp(-127, 127))
