"""The kernels with a program a row: experts of a token, totals of logits. Each row is as it is alone."""

from functools import partial

import pytest
import torch

from executor_svc.triton_kernels.log_total import TILE, log_totals_on_device
from executor_svc.triton_kernels.routing import route
from tests.kernels.device import DEVICE


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (5, 5), (60, 4)])
def test_experts_are_the_likeliest(num_experts: int, num_chosen: int, is_normalized: bool) -> None:
    scores = random(3, num_experts)
    expected, experts = scores.softmax(-1).topk(num_chosen)
    if is_normalized:
        expected = expected / expected.sum(-1, keepdim=True)

    weights, chosen = route(scores, num_chosen, is_normalized=is_normalized)

    assert torch.equal(chosen.long(), experts)
    torch.testing.assert_close(weights, expected)
    for row in range(len(scores)):
        alone = route(scores[row : row + 1].clone(), num_chosen, is_normalized=is_normalized)
        assert torch.equal(alone[0][0], weights[row])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (5, 5), (60, 4)])
def test_a_correction_bias_counts_for_the_choice_alone(num_experts: int, num_chosen: int, has_bias: bool) -> None:
    scores, bias = random(3, num_experts), 3 * random(num_experts, seed=1) if has_bias else None
    corrected = partial(
        route,
        num_chosen=num_chosen,
        is_normalized=True,
        is_sigmoid=True,
        correction_bias=bias,
        sum_epsilon=0.1,
        scale=2.5,
    )
    experts = (scores.sigmoid() if bias is None else scores.sigmoid() + bias).topk(num_chosen).indices
    expected = scores.sigmoid().gather(1, experts)
    expected = 2.5 * expected / (expected.sum(-1, keepdim=True) + 0.1)

    weights, chosen = corrected(scores)

    assert torch.equal(chosen.long(), experts)
    torch.testing.assert_close(weights, expected)
    for row in range(len(scores)):
        alone = corrected(scores[row : row + 1].clone())
        assert torch.equal(alone[0][0], weights[row])


def test_of_equally_likely_experts_the_first_are_chosen() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]], device=DEVICE)
    weights, chosen = route(scores, 2, is_normalized=True)
    assert chosen.tolist() == [[1, 2]]
    assert weights[0, 0] == weights[0, 1]
    assert weights[0, 0].item() == pytest.approx(0.5, rel=2.0**-21)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_token_of_nan_goes_to_some_experts() -> None:
    _, chosen = route(torch.full((1, 6), torch.nan, device=DEVICE), 3, is_normalized=True)
    assert bool(((chosen >= 0) & (chosen < 6)).all())


def test_weights_are_rounded_once() -> None:
    scores = random(4, 8, dtype=torch.bfloat16)
    weights, _ = route(scores, 2, is_normalized=False)
    expected = scores.float().softmax(-1).topk(2).values
    assert weights.dtype == torch.bfloat16
    torch.testing.assert_close(weights.float(), expected, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("size", [1, 7, TILE, 3 * TILE + 5])
def test_totals_are_those_of_torch(size: int) -> None:
    logits = 5 * random(6, size)
    totals = log_totals_on_device(logits)
    torch.testing.assert_close(totals, logits.double().logsumexp(-1, keepdim=True), rtol=1e-6, atol=1e-6)
    for begin, end in ((0, 1), (3, 4), (2, 6)):
        assert torch.equal(log_totals_on_device(logits[begin:end]), totals[begin:end])


def test_tokens_that_may_not_come_add_nothing() -> None:
    logits = random(2, 300)
    logits[:, ::3] = -torch.inf
    totals = log_totals_on_device(logits)
    torch.testing.assert_close(totals, logits.double().logsumexp(-1, keepdim=True), rtol=1e-6, atol=1e-6)
    assert log_totals_on_device(logits[:0]).shape == (0, 1)
