"""Linear maps with int8 weights by torchao, for a GPU.

torchao restores a weight to the number format of the model before each product, so int8 saves memory and no time.
"""

from collections.abc import Sequence

import torch

from octavo_shared.errors import ModelLoadError


class TorchaoLinear:
    """A linear map [sum of sizes, num_inputs] of parts, each quantized as it is loaded, a scale an output.

    Raises: ModelLoadError: torchao is not installed.
    """

    def __init__(
        self, num_inputs: int, sizes: Sequence[int], *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        _require_torchao()
        self.weights = tuple(_TorchaoPart(num_inputs, size, dtype, device) for size in sizes)
        self._bias = torch.empty(sum(sizes), dtype=dtype, device=device) if has_bias else None
        self.biases = () if self._bias is None else torch.split(self._bias, list(sizes))

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Never called: `TorchDense` keeps the vocabulary, where rows are looked up, as it is."""
        raise AssertionError("the embedding is not quantized")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""
        parts = [part(x) for part in self.weights]
        result = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return result if self._bias is None else result + self._bias


class _TorchaoPart:
    """Some outputs of a map, and their weight as the loader sees it."""

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = torch.Size((num_outputs, num_inputs))
        self.nbytes = num_outputs * num_inputs * dtype.itemsize
        self._dtype = dtype
        self._device = device
        self._linear: torch.nn.Module | None = None

    def copy_(self, source: torch.Tensor, /) -> None:
        """Quantize `source`, a tensor of this shape."""
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        num_outputs, num_inputs = self.shape
        linear = torch.nn.Linear(num_inputs, num_outputs, bias=False, dtype=self._dtype, device=self._device)
        linear.weight.data.copy_(source)
        linear.requires_grad_(False)
        quantize_(linear, Int8WeightOnlyConfig())
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""
        assert self._linear is not None, "the weights are loaded"
        mapped: torch.Tensor = self._linear(x)
        return mapped


def _require_torchao() -> None:
    try:
        import torchao.quantization  # noqa: F401 -- seconds, and only where it is wanted
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            "quantization is int8 and the device is cuda, which requires torchao; install the extra gpu-int8"
        ) from error
