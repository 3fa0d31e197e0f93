"""Groups of weights in int4, in torch: the search of pack.c for a scale and a minimum, with the same bits."""

from dataclasses import dataclass

import torch

LARGEST_CODE = 15
# Steps of the search up and down, each such a part of the scale; as in pack.c.
FIT_STEPS, FIT_STEP = 5, 1 / 32


def quantize_int4(groups: torch.Tensor, num_padded: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales and minima of [num_rows, num_groups, size]; the last group ends with so many zeros."""
    weights = groups.permute(2, 0, 1).contiguous()  # [size, num_rows, num_groups]
    is_padding = torch.zeros(weights.shape[0], 1, weights.shape[2], dtype=torch.bool)
    is_padding[weights.shape[0] - num_padded :, :, -1:] = num_padded > 0
    is_padding = is_padding.to(weights.device)
    importance = weights.abs() + _sum(weights.abs()) / (~is_padding).sum(0)
    searched = _Groups(weights, importance.masked_fill(is_padding, 0))
    smallest = weights.masked_fill(is_padding, torch.inf).amin(0)
    largest = weights.masked_fill(is_padding, -torch.inf).amax(0)
    fit = searched.fit(smallest, largest)
    codes = _codes(weights, fit.minimum, _inverse(fit.scale))
    return codes.permute(1, 2, 0), fit.scale[..., None], fit.minimum[..., None]


@dataclass(frozen=True, slots=True)
class _Fit:
    """What weights of a group become: code * scale + minimum, both as float16 has them; all [num_rows, num_groups]."""

    scale: torch.Tensor
    minimum: torch.Tensor
    error: torch.Tensor  # sum of importance * square


@dataclass(frozen=True, slots=True)
class _Groups:
    """Both [size, num_rows, num_groups]; the importance of padding is 0."""

    weights: torch.Tensor
    importance: torch.Tensor

    def fit(self, smallest: torch.Tensor, largest: torch.Tensor) -> _Fit:
        """Return the best one: of the whole range, or by least squares of nearby codes."""
        best = self._try((largest - smallest) / LARGEST_CODE, smallest)
        inverse = _inverse(best.scale)
        total, weighted_sum = _sum(self.importance), _sum(self.importance * self.weights)
        for step in range(-FIT_STEPS, FIT_STEPS + 1):
            codes = _codes(self.weights, smallest, inverse * (1 + FIT_STEP * step))
            parts = self.importance * codes
            sums, squares, products = _sum(parts), _sum(parts * codes), _sum(parts * self.weights)
            determinant = total * squares - sums * sums
            fit = self._try(
                (total * products - sums * weighted_sum) / determinant,
                (squares * weighted_sum - sums * products) / determinant,
            )
            is_better = fit.error < best.error
            best = _Fit(
                torch.where(is_better, fit.scale, best.scale),
                torch.where(is_better, fit.minimum, best.minimum),
                torch.where(is_better, fit.error, best.error),
            )
        return best

    def _try(self, scale: torch.Tensor, minimum: torch.Tensor) -> _Fit:
        scale, minimum = scale.half().float(), minimum.half().float()
        error = _codes(self.weights, minimum, _inverse(scale)) * scale + minimum - self.weights
        return _Fit(scale, minimum, _sum(self.importance * error * error))


def _codes(weights: torch.Tensor, minimum: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return ((weights - minimum) * inverse).round().clamp(0, LARGEST_CODE)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, 1 / scale, 0)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Add up [size, ...] from the first to the last: torch's own sums have another order."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total
