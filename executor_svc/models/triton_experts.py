"""MLPs and experts on a GPU, by kernels in Triton; see `executor_svc.models.triton_dense`.

Experts whose matrices lie in one tensor take eight launches, however many there are, and no number comes to the host:
the router, the choice, two to put choices in tiles, gate and up, activation, down, and the weighted sum. Experts that
torchao keeps in int8 run one after the other, and the host waits to know which. A shared expert is added with the rest.
"""

import numpy as np
import torch

from executor_svc.models.dense import Experts, Mlp
from executor_svc.models.torch_dense import TorchMatrix
from executor_svc.models.torch_experts import add_shared, gate_and_up
from executor_svc.triton_kernels.dense import gated_activation, plain_activation
from executor_svc.triton_kernels.expert_products import group_choices, multiply_chosen, sum_chosen
from executor_svc.triton_kernels.routing import route


def run_mlp(mlp: Mlp[TorchMatrix], x: torch.Tensor) -> torch.Tensor:
    """Map [num_rows, hidden_size] to the same shape."""
    gate, up = gate_and_up(mlp, x)
    if gate is None:
        return mlp.down(plain_activation(up, mlp.activation))
    return mlp.down(gated_activation(gate, up, mlp.activation))


def run_experts(mixture: Experts[TorchMatrix], x: torch.Tensor) -> torch.Tensor:
    """Map [num_rows, hidden_size] to the same shape by the experts of each row, and by the shared one."""
    if mixture.stacks is None or mixture.shared is None:
        return add_shared(mixture, x, run_chosen(mixture, x, x), run_mlp)
    gates = None if mixture.shared_gate is None else mixture.shared_gate(x)
    return run_chosen(mixture, x, x, run_mlp(mixture.shared, x), gates)


def run_chosen(
    mixture: Experts[TorchMatrix],
    scored: torch.Tensor,
    x: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send each row of `x` to the experts that the router chooses for that of `scored`; return their weighted sum.

    All are [num_rows, hidden_size]. A row adds up its experts in their order, whichever other rows go to them. `shared`
    and `shared_gates`: see `sum_chosen`; for experts in stacks alone.
    """
    config = mixture.config
    weights, chosen = route(
        mixture.router(scored),
        config.num_chosen,
        is_normalized=config.is_normalized,
        is_sigmoid=config.scoring == "sigmoid",
        correction_bias=mixture.correction_bias,
        sum_epsilon=config.sum_epsilon,
        scale=config.scale,
        groups=(config.num_groups, config.num_chosen_groups),
        expert_scales=mixture.scales,
    )
    if mixture.stacks is None:
        assert shared is None, "the caller adds it"
        return _run_one_by_one(mixture, x, weights, chosen)
    if not len(x):
        return torch.empty_like(x)
    (up_weights, up_biases), (down_weights, down_biases) = (stack.tensors for stack in mixture.stacks)
    groups = group_choices(chosen, config.num_experts, x.dtype.itemsize)
    up, activation = multiply_chosen(x, up_weights, up_biases, groups, config.num_chosen), config.mlp.activation
    if config.mlp.is_gated:
        gate, up = up.chunk(2, -1)
        activated = gated_activation(gate, up, activation)
    else:
        activated = plain_activation(up, activation)
    down = multiply_chosen(activated, down_weights, down_biases, groups, config.num_chosen)
    return sum_chosen(down, weights, chosen, shared, shared_gates)


def _run_one_by_one(
    mixture: Experts[TorchMatrix], x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the experts, [num_rows, hidden_size]; the choices are [num_rows, num_chosen]."""
    result = torch.zeros_like(x)
    for expert in np.unique(chosen.cpu().numpy()).tolist():
        rows, choices = (chosen == expert).nonzero(as_tuple=True)
        result[rows] += run_mlp(mixture.experts[expert], x[rows]) * weights[rows, choices, None]
    return result
