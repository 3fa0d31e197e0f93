"""Experts as grouped products equal the reference, a row at a time, in a number of launches that no expert adds to."""

from dataclasses import replace
from itertools import product
from typing import Any, Final

import pytest
import torch

from executor_svc.models.config import Activation, ExpertsConfig, MlpConfig
from executor_svc.models.dense import Experts, LayerEnd, MatrixStack, Mlp, Norm
from executor_svc.models.torch_experts import run_chosen as run_chosen_in_torch
from executor_svc.models.torch_experts import run_experts as run_experts_in_torch
from executor_svc.models.triton_dense import TritonDense
from executor_svc.models.triton_experts import run_chosen, run_experts
from executor_svc.triton_kernels.expert_products import GroupedChoices, group_choices, rows_of_tile, sum_chosen
from tests.kernels.device import DEVICE, SLOW_IF_INTERPRETED
from tests.kernels.launches import log_kernels
from tests.kernels.products import add_up_rows_alike
from tests.numerics.strict_capture import LaunchLog, NoHostReads
from tests.support.each_row import each_row

HIDDEN, INTERMEDIATE = 40, 72  # neither is whole tiles
# Relative to the largest output. The reference rounds after each expert, and what it adds up.
TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MOST_LAUNCHES_OF_LAYER = 16


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def experts_of(
    num_experts: int,
    num_chosen: int,
    dtype: torch.dtype = torch.float32,
    activation: Activation = "silu",
    *,
    is_gated: bool = True,
    has_bias: bool = False,
    is_invariant: bool = False,
    has_shared: bool = False,
) -> Experts[Any]:
    """Return experts with random weights, as `DecoderWeights` makes them."""
    kernels = TritonDense(dtype, DEVICE, is_invariant=is_invariant)
    sizes = [INTERMEDIATE] * (2 if is_gated else 1)

    def mlp(stacks: tuple[MatrixStack, MatrixStack] | tuple[None, None]) -> Mlp[Any]:
        up = kernels.matrix(HIDDEN, sizes, has_bias=has_bias, stack=stacks[0])
        down = kernels.matrix(INTERMEDIATE, [HIDDEN], has_bias=has_bias, stack=stacks[1])
        return Mlp(None, up, down, activation, is_merged=is_gated)

    stacks = MatrixStack(num_experts), MatrixStack(num_experts)
    config = ExpertsConfig(num_experts, num_chosen, True, MlpConfig(INTERMEDIATE, activation, is_gated, has_bias))
    router = kernels.matrix(HIDDEN, [num_experts], role="router")
    mlps = tuple(mlp(stacks) for _ in range(num_experts))
    shared = mlp((None, None)) if has_shared else None
    shared_gate = kernels.matrix(HIDDEN, [1], role="router") if has_shared else None
    matrices = [router, *(matrix for each in (*mlps, *([shared] if shared else [])) for matrix in (each.up, each.down))]
    for seed, matrix in enumerate([*matrices, *([shared_gate] if shared_gate else [])]):
        for part in (*matrix.weights, *matrix.biases):
            part.copy_(0.3 * random(*part.shape, seed=seed))
    return Experts(router, mlps, config, shared=shared, shared_gate=shared_gate, stacks=stacks)


# Rows, experts, experts of a row: one row, top-1, more rows than a tile, and experts that no row goes to.
SHAPES = [(1, 8, 1), (1, 16, 8), (3, 5, 2), (70, 3, 1), (70, 4, 4), (6, 60, 6)]


@each_row(*product(SHAPES, [torch.float32]), ((33, 8, 3), torch.float16), ((70, 4, 2), torch.bfloat16))
def test_grouped_experts_equal_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, num_experts, num_chosen = shape
    check(experts_of(num_experts, num_chosen, dtype), random(num_rows, HIDDEN, dtype=dtype, seed=99))


@each_row(("swiglu_oai", True, True), ("relu2", False, False), ("gelu_tanh", True, False), ("silu", False, True))
def test_experts_of_every_kind(activation: Activation, is_gated: bool, has_bias: bool) -> None:
    """Those of gpt-oss, of Nemotron, of Gemma, and others."""
    mixture = experts_of(6, 3, activation=activation, is_gated=is_gated, has_bias=has_bias)
    check(mixture, random(9, HIDDEN, seed=99))


def check(mixture: Experts[Any], x: torch.Tensor) -> None:
    scored = random(*x.shape, dtype=x.dtype, seed=98)

    ours = run_chosen(mixture, scored, x)

    theirs = run_chosen_in_torch(mixture, scored, x)
    assert ours.dtype == x.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE[x.dtype] * float(theirs.abs().max()))


@each_row(*product((1, 6), (True, False)))
def test_a_shared_expert_is_added(num_rows: int, has_gate: bool) -> None:
    mixture, x = experts_of(4, 2, has_shared=True), random(num_rows, HIDDEN, seed=99)
    mixture = mixture if has_gate else replace(mixture, shared_gate=None)
    expected = run_experts_in_torch(mixture, x)
    torch.testing.assert_close(run_experts(mixture, x), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_no_rows_are_no_error() -> None:
    nothing = torch.empty(0, HIDDEN, device=DEVICE)
    assert run_chosen(experts_of(4, 2), nothing, nothing).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    "is_invariant", [True, pytest.param(False, marks=SLOW_IF_INTERPRETED)], ids=["invariant", "fast"]
)
def test_a_row_has_the_same_bits_among_any_others(is_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    add_up_rows_alike(monkeypatch)
    mixture, x = experts_of(5, 3, is_invariant=is_invariant), random(20, HIDDEN, seed=99)
    # A library's product of few rows is another one.
    mixture = replace(mixture, router=experts_of(5, 3, is_invariant=True).router)
    together = run_chosen(mixture, x, x)
    for rows in (slice(0, 1), slice(19, 20), slice(3, 10)):
        assert torch.equal(run_chosen(mixture, x[rows], x[rows]), together[rows])


def test_a_row_of_one_expert_alone_adds_up_all_its_choices() -> None:
    """The router chooses so for a row of NaN."""
    chosen = torch.tensor([[3, 1, 2], [4, 4, 4]], dtype=torch.int32, device=DEVICE)
    outputs, weights = random(6, HIDDEN), random(2, 3, seed=1)
    expected = (outputs.view(2, 3, HIDDEN) * weights[..., None]).sum(1)
    torch.testing.assert_close(sum_chosen(outputs, weights, chosen), expected)
    assert tiles_of(group_choices(chosen, 5, 4)) == [(1, [1]), (2, [2]), (3, [0]), (4, [3, 4, 5])]


def test_experts_are_added_up_in_their_order() -> None:
    """In float32 1e8 + 1 is 1e8; experts 1, 2 and 3 are 1e8, -1e8 and 1."""
    chosen = torch.tensor([[3, 1, 2], [2, 3, 1]], dtype=torch.int32, device=DEVICE)
    values = torch.tensor([1.0, 1e8, -1e8, -1e8, 1.0, 1e8], device=DEVICE)
    sums = sum_chosen(values[:, None].expand(6, 8).contiguous(), torch.ones(2, 3, device=DEVICE), chosen)
    assert torch.equal(sums, torch.ones_like(sums))


@each_row((1, 7, 2, 4), (40, 3, 2, 4), (1500, 5, 1, 2), (33, 130, 8, 4), (64, 1, 1, 2))
def test_each_choice_is_in_one_tile_of_its_expert(rows: int, num_experts: int, num_chosen: int, itemsize: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, num_experts, generator=generator).topk(num_chosen).indices.to(DEVICE, torch.int32)
    chosen = chosen.clamp(min=num_experts // 3).contiguous()  # some experts have none, one has many
    groups = group_choices(chosen, num_experts, itemsize)

    expected: list[tuple[int, list[int]]] = []
    for expert in range(num_experts):
        own = (chosen.flatten() == expert).nonzero()[:, 0].tolist()
        size = rows_of_tile(itemsize)
        expected += [(expert, own[begin : begin + size]) for begin in range(0, len(own), size)]
    assert tiles_of(groups) == expected


def tiles_of(groups: GroupedChoices) -> list[tuple[int, list[int]]]:
    """Return the expert and the choices of each tile that has some; those that have none must be behind them."""
    experts = groups.tile_experts.tolist()
    used = [expert for expert in experts if expert >= 0]
    assert experts == used + [-1] * (len(experts) - len(used))
    tiles = groups.tile_choices[: len(used)].tolist()
    return [(expert, [choice for choice in tile if choice >= 0]) for expert, tile in zip(used, tiles, strict=True)]


@pytest.mark.parametrize("num_experts", [8, 128])
def test_a_layer_is_few_launches_and_brings_nothing_to_the_host(
    num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All from attention to attention: output, norm, experts, a shared one, its gate, norm, projection."""
    log_kernels(monkeypatch)
    kernels = TritonDense(torch.float32, DEVICE)
    mixture = experts_of(num_experts, 2, has_shared=True)
    output, projection = kernels.matrix(HIDDEN, [HIDDEN]), kernels.matrix(HIDDEN, [3 * HIDDEN])
    output.weights[0].copy_(random(HIDDEN, HIDDEN))
    projection.weights[0].copy_(random(3 * HIDDEN, HIDDEN))
    norm = Norm(random(HIDDEN), None, 1e-5)
    segment = kernels.segment(LayerEnd(output, None, norm, mixture, None, 1.0), norm, projection)
    attended, residual = random(5, HIDDEN), random(5, HIDDEN, seed=1)
    with torch.inference_mode(), NoHostReads(), LaunchLog() as log:
        segment(attended, residual)
    assert len(log.on_device) <= MOST_LAUNCHES_OF_LAYER, log.on_device
