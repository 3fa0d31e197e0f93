"""Which experts a token goes to, and with which weights; a program a token, so no token depends on others.

Torch sums the chosen weights in an order that may follow the number of tokens, and leaves open which of two equally
likely experts it takes.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def route_kernel(
    scores,
    weights,
    chosen,
    correction_bias,
    expert_scales,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    SUM_EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write the experts of a token with the highest scores, highest first, of equal ones the first, and their weights.

    `correction_bias`, [NUM_EXPERTS], is added to the scores for the choice; None: there is none. `expert_scales`,
    [NUM_EXPERTS], multiplies the weights; None: 1.
    """
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS_PADDED)
    places = tl.arange(0, CHOSEN_PADDED)
    is_expert = experts < NUM_EXPERTS
    x = tl.load(scores + row * NUM_EXPERTS + experts, mask=is_expert, other=-float("inf")).to(tl.float32)
    if IS_SIGMOID:
        probabilities = 1.0 / (1.0 + tl.exp(-x))
    else:
        powers = tl.exp(x - tl.max(x, 0))
        probabilities = powers / tl.sum(powers, 0)
    corrected = probabilities
    if correction_bias is not None:
        corrected += tl.load(correction_bias + experts, mask=is_expert, other=0.0)
    left = tl.where(is_expert, corrected, -float("inf"))
    best = tl.full([CHOSEN_PADDED], 0.0, tl.float32)
    best_experts = tl.full([CHOSEN_PADDED], 0, tl.int32)
    total = 0.0
    for place in tl.static_range(NUM_CHOSEN):
        largest = tl.max(left, 0)
        # Of a row of NaN, the last one.
        expert = tl.min(tl.where(left == largest, experts, NUM_EXPERTS - 1), 0)
        weight = largest
        if correction_bias is not None:
            weight = tl.sum(tl.where(experts == expert, probabilities, 0.0), 0)
        best = tl.where(places == place, weight, best)
        best_experts = tl.where(places == place, expert, best_experts)
        total += weight
        left = tl.where(experts == expert, -float("inf"), left)
    if IS_NORMALIZED:
        best = best / (total + SUM_EPSILON)
    best *= SCALE
    is_place = places < NUM_CHOSEN
    if expert_scales is not None:
        best *= tl.load(expert_scales + best_experts, mask=is_place, other=0.0)
    tl.store(weights + row * NUM_CHOSEN + places, best.to(weights.dtype.element_ty), mask=is_place)
    tl.store(chosen + row * NUM_CHOSEN + places, best_experts, mask=is_place)


def route(
    scores: torch.Tensor,
    num_chosen: int,
    *,
    is_normalized: bool,
    is_sigmoid: bool = False,
    correction_bias: torch.Tensor | None = None,
    sum_epsilon: float = 0.0,
    scale: float = 1.0,
    expert_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of each token's experts, of the number format of the scores, and the experts, int32.

    Args:
        scores: Of the router, [num_tokens, num_experts].
        num_chosen: Experts of a token.
        is_normalized: Whether the weights are scaled to a sum of 1.
        is_sigmoid: Whether weights are sigmoids; else the softmax.
        correction_bias: Added for the choice alone, [num_experts] float32; None: there is none.
        sum_epsilon: Added to the sum that the weights are divided by.
        scale: Multiplies the weights at last.
        expert_scales: Multiply the weights too, [num_experts] float32; None: 1.

    Returns:
        [num_tokens, num_chosen] both.
    """
    scores = scores.contiguous()  # products are, on a GPU
    num_tokens, num_experts = scores.shape
    weights = torch.empty((num_tokens, num_chosen), dtype=scores.dtype, device=scores.device)
    chosen = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=scores.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            scores,
            weights,
            chosen,
            correction_bias,
            expert_scales,
            NUM_EXPERTS=num_experts,
            EXPERTS_PADDED=triton.next_power_of_2(num_experts),
            NUM_CHOSEN=num_chosen,
            CHOSEN_PADDED=triton.next_power_of_2(num_chosen),
            IS_NORMALIZED=is_normalized,
            IS_SIGMOID=is_sigmoid,
            SUM_EPSILON=sum_epsilon,
            SCALE=scale,
            num_warps=1,
        )
    return weights, chosen
