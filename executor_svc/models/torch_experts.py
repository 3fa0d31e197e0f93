"""MLPs and experts in plain torch operations; see `executor_svc.models.torch_dense`."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

from executor_svc.models.config import Activation, ExpertsConfig
from executor_svc.models.dense import Experts, MatrixT, Mlp

ACTIVATIONS: Final[Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}


def activate(activation: Activation, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """Return activation(gate) * up, or without a gate activation(up)."""
    if activation == "swiglu_oai":
        assert gate is not None, "it has a gate"
        gate = gate.clamp(max=7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)
    return ACTIVATIONS[activation](up) if gate is None else ACTIVATIONS[activation](gate).mul_(up)


def gate_and_up(mlp: Mlp[MatrixT], x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return both products of [num_rows, hidden_size]; the first is None without a gate."""
    up = mlp.up(x)
    if mlp.is_merged:
        gate, up = up.chunk(2, -1)
        return gate, up
    return None if mlp.gate is None else mlp.gate(x), up


def run_mlp(mlp: Mlp[MatrixT], x: torch.Tensor) -> torch.Tensor:
    """Map [num_rows, hidden_size] to the same shape."""
    return mlp.down(activate(mlp.activation, *gate_and_up(mlp, x)))


def run_experts(mixture: Experts[MatrixT], x: torch.Tensor) -> torch.Tensor:
    """Map [num_rows, hidden_size] to the same shape by the experts of each row, and by the shared one."""
    return add_shared(mixture, x, run_chosen(mixture, x, x), run_mlp)


def add_shared(
    mixture: Experts[MatrixT],
    x: torch.Tensor,
    result: torch.Tensor,
    run: Callable[[Mlp[MatrixT], torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return `result` with what the expert for every row gives, if there is one; `run` runs an MLP."""
    if mixture.shared is not None:
        shared = run(mixture.shared, x)
        result += shared if mixture.shared_gate is None else mixture.shared_gate(x).sigmoid() * shared
    return result


def run_chosen(mixture: Experts[MatrixT], scored: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Send each row of `x` to the experts that the router chooses for that of `scored`; return their weighted sum.

    All are [num_rows, hidden_size].
    """
    config, scores = mixture.config, mixture.router(scored).float()
    scores = scores.sigmoid() if config.scoring == "sigmoid" else scores.softmax(-1)
    corrected = scores if mixture.correction_bias is None else scores + mixture.correction_bias
    if config.num_groups > config.num_chosen_groups:
        corrected = _in_best_groups(corrected, config)
    chosen = corrected.topk(config.num_chosen).indices  # [num_rows, num_chosen]
    weights = scores.gather(1, chosen)
    if config.is_normalized:
        weights /= weights.sum(-1, keepdim=True) + config.sum_epsilon
    if mixture.scales is not None:
        weights = weights * mixture.scales[chosen]
    weights = (weights * config.scale).to(x.dtype)
    result = torch.zeros_like(x)
    for expert in np.unique(chosen.cpu().numpy()).tolist():
        rows, choices = (chosen == expert).nonzero(as_tuple=True)
        result.index_add_(0, rows, run_mlp(mixture.experts[expert], x[rows]) * weights[rows, choices, None])
    return result


def _in_best_groups(scores: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
    """Return scores for the choice of experts, [num_rows, num_experts], -inf in all groups but the best ones."""
    groups = scores.view(len(scores), config.num_groups, -1)
    best = groups.topk(2 if config.scoring == "sigmoid" else 1).values.sum(-1)
    chosen = best.topk(config.num_chosen_groups).indices
    is_other = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
    return groups.masked_fill(is_other[..., None], -torch.inf).view(scores.shape)
