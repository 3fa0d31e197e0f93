"""The kernels between matrix products, and the segments that they make, equal the torch ones."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 -- the name that everybody knows

from executor_svc.adapters.files import Adapter, LowRankPair
from executor_svc.adapters.products import AdaptedPart
from executor_svc.adapters.slots import AdapterSlots, using
from executor_svc.adapters.step_rows import StepRows
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.models.config import Activation, LayerConfig, ModelConfig
from executor_svc.models.decoder_weights import DecoderWeights
from executor_svc.models.dense import EmbeddingWeights
from executor_svc.models.families import parse_config
from executor_svc.models.sharding import Shard
from executor_svc.models.torch_dense import TorchDense, TorchMatrix
from executor_svc.models.torch_experts import ACTIVATIONS, activate
from executor_svc.models.triton_dense import TritonDense, sum_in_rank_order
from executor_svc.native.structs import NumberFormat
from executor_svc.parallel.group import SINGLE_RANK, SingleRank
from executor_svc.triton_kernels.dense import add_layer_norm, add_rms_norm, gated_activation, plain_activation
from tests.kernels.device import APPROXIMATION, DEVICE, IS_APPROXIMATE, SLOW_IF_INTERPRETED
from tests.kernels.products import add_up_rows_alike
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.support.each_row import each_row

# What a value may be off after one rounding to the format.
ROUNDING: Final[Mapping[torch.dtype, float]] = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(ROUNDING)
SIZES = [1, 7, 64, 300]
NUM_ROWS = 4  # the least that gives column-major products on a CPU


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_sum(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare sums, which are rounded to the nearest; the interpreter cuts bfloat16 off."""
    is_cut = actual.dtype == torch.bfloat16 and DEVICE.type == "cpu"
    torch.testing.assert_close(actual, expected, rtol=2.0**-7 if is_cut else 0.0, atol=0.0)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with a result in float64, or one of the same format."""
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected.double(), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@each_row(*product([True, False], SIZES, DTYPES))
def test_add_and_rms_norm(has_addend: bool, size: int, dtype: torch.dtype) -> None:
    residual, addend = random(5, size, dtype=dtype), random(5, size, dtype=dtype, seed=1)
    weight, former = random(size, dtype=dtype, seed=2), residual.clone()

    normed = add_rms_norm(residual, addend if has_addend else None, weight, 1e-5)

    assert_sum(residual, former + addend if has_addend else former)
    assert_near(normed, F.rms_norm(residual.double(), (size,), weight.double(), 1e-5), dtype)


@each_row(*product([True, False], SIZES, DTYPES))
def test_add_and_layer_norm(has_bias: bool, size: int, dtype: torch.dtype) -> None:
    residual, addend = random(5, size, dtype=dtype), random(5, size, dtype=dtype, seed=1)
    residual += 3.0
    weight, former = random(size, dtype=dtype, seed=2), residual.clone()
    bias = random(size, dtype=dtype, seed=3) if has_bias else None

    normed = add_layer_norm(residual, addend, weight, bias, 1e-5)

    assert_sum(residual, former + addend)
    exact = F.layer_norm(residual.double(), (size,), weight.double(), None if bias is None else bias.double(), 1e-5)
    assert normed.dtype == dtype
    # The mean is a quotient: what it is off, every element is.
    variance, mean = torch.var_mean(residual.double(), -1, correction=0, keepdim=True)
    off = APPROXIMATION * mean.abs() * (variance + 1e-5).rsqrt() * weight.double().abs()
    assert ((normed.double() - exact).abs() <= off + (ROUNDING[dtype] + APPROXIMATION) * (1 + exact.abs())).all()


@each_row(torch.float16, torch.bfloat16)
def test_a_weight_in_float32_is_not_rounded(dtype: torch.dtype) -> None:
    """The weight of Gemma. Rounded to the format of the input it would be 1, and the results smaller."""
    step = torch.finfo(dtype).eps
    residual, weight = random(20, 300, dtype=dtype), torch.full((300,), 1.0 + 0.49 * step, device=DEVICE)

    normed = add_rms_norm(residual, None, weight, 1e-6)

    exact = F.rms_norm(residual.double(), (300,), weight.double(), 1e-6)
    assert abs(float((normed / exact).mean()) - 1.0) < 0.45 * step


@each_row(add_rms_norm, partial(add_layer_norm, bias=None))
def test_rows_of_any_layout_are_added(norm: Callable[..., torch.Tensor]) -> None:
    """A part of wider rows, and a product that is column-major."""
    wide, addend, weight = random(6, 50), random(30, 6, seed=1).t(), random(30, seed=2)
    residual = wide[:, 10:40]
    before, total = wide.clone(), residual + addend

    normed = norm(residual, addend, weight, epsilon=1e-5)

    assert torch.equal(residual, total)
    assert torch.equal(wide[:, :10], before[:, :10])
    assert torch.equal(wide[:, 40:], before[:, 40:])
    assert torch.equal(normed, norm(total, None, weight, epsilon=1e-5))


@each_row(*product((*ACTIVATIONS, "swiglu_oai"), DTYPES))
def test_activations(activation: Activation, dtype: torch.dtype) -> None:
    gate, up = 3 * random(3, 1500, dtype=dtype), 3 * random(3, 1500, dtype=dtype, seed=1)  # two tiles

    assert_near(gated_activation(gate, up, activation), activate(activation, gate.double(), up.double()), dtype)
    if activation in ACTIVATIONS:
        assert_near(plain_activation(gate, activation), activate(activation, None, gate.double()), dtype)


@each_row(1, 5, 130)
def test_gate_and_up_may_be_halves_of_one_product(size: int) -> None:
    both, before = random(4, 2 * size), random(4, 2 * size)
    gate, up = both.chunk(2, dim=1)

    output = gated_activation(gate, up, "silu")

    assert output.is_contiguous()
    assert torch.equal(both, before)
    assert_near(output, F.silu(gate.double()) * up.double(), torch.float32)
    gate, up = both.t().contiguous().t().chunk(2, dim=1)
    assert torch.equal(gated_activation(gate, up, "silu"), output)


@each_row(*ACTIVATIONS)
def test_inputs_far_from_zero(activation: Activation) -> None:
    x = torch.tensor([[1e4, -1e4, 100.0, -100.0, 0.0, torch.nan]], device=DEVICE)

    torch.testing.assert_close(plain_activation(x, activation), ACTIVATIONS[activation](x), equal_nan=True)
    bounded = activate("swiglu_oai", x, x.flip(1))
    torch.testing.assert_close(gated_activation(x, x.flip(1), "swiglu_oai"), bounded, equal_nan=True)


def test_no_rows_are_no_error() -> None:
    nothing = torch.empty(0, 8, device=DEVICE)

    assert add_rms_norm(nothing, nothing.clone(), random(8), 1e-5).shape == (0, 8)
    assert gated_activation(nothing, nothing, "silu").shape == (0, 8)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """Tiny models of the families."""
    folder, result = tmp_path_factory.mktemp("families"), {}
    with torch.no_grad():
        for name, settings in FAMILY_ARCHITECTURES.items():
            save_tiny_architecture(folder / name, name, settings)
            result[name] = parse_config(ModelDirectory(folder / name).config(), folder / name)
    return result


class Doubling(SingleRank):
    """One of two ranks; that the other one has equal parts makes no difference to what is compared."""

    size = 2

    def __init__(self) -> None:
        self.num_reduced = 0

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        self.num_reduced += 1
        return partial.add_(partial.clone())


def attended_size(layer: LayerConfig) -> int:
    """Return how many numbers a layer attends for a token, or returns with its state."""
    if layer.latent is not None:
        return layer.num_heads * layer.latent.value_dim
    return layer.num_heads * layer.head_dim if layer.state is None else layer.state.output_dim


def run_segments(
    config: ModelConfig, kernels: TorchDense | TritonDense, group: SingleRank, rows: slice = slice(None)
) -> list[torch.Tensor]:
    """Return what each segment and latent of a model gives, and the residual stream; weights are random, of one seed.

    Of `NUM_ROWS` tokens some are in the step.
    """
    weights = DecoderWeights[Any](config, kernels, Shard.of(config, group.rank, group.size))
    generator = torch.Generator().manual_seed(5)
    for name, target in sorted(weights.map.targets.items()):  # kernels make them in orders of their own
        is_norm = len(target.shape) == 1 and name.endswith("weight")
        target.fill(torch.randn(target.shape, generator=generator) * 0.2 + float(is_norm))
    width = config.num_hidden_layers * config.per_layer_size
    weights.layer_inputs.values = random(NUM_ROWS, width, dtype=kernels.dtype, seed=7)[rows]
    sizes = [attended_size(layer) // group.size for layer in config.layers]
    residual, results = random(NUM_ROWS, config.hidden_size, dtype=kernels.dtype)[rows].clone(), []
    for index, segment in enumerate(weights.segments):
        attended = random(NUM_ROWS, sizes[index - 1], dtype=kernels.dtype, seed=index)[rows]
        result = segment(attended if index else None, residual)
        results += [residual.clone() if result is None else result, residual.clone()]
        if (latent := weights.latents[index]) is not None:
            assert result is not None, "it attends"
            queries = latent.queries(result)
            results += [queries, latent.values(queries[:, :-1, config.layers[index].value_begin :].flatten(1))]
    weights.last_segment(random(NUM_ROWS, sizes[-1], dtype=kernels.dtype, seed=99)[rows], residual)
    return [*results, residual.clone(), weights.head(None, residual)]


def check_segments(
    config: ModelConfig,
    dtype: torch.dtype,
    groups: tuple[SingleRank, SingleRank],
    *,
    number_format: NumberFormat = NumberFormat.FLOAT32,
) -> None:
    ours = run_segments(config, TritonDense(dtype, DEVICE, number_format=number_format, group=groups[0]), groups[0])

    theirs = run_segments(config, TorchDense(dtype, DEVICE, number_format=number_format, group=groups[1]), groups[1])
    assert len(ours) == len(theirs) >= 2 * config.num_hidden_layers + 2
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == dtype
        # Errors add up over the layers; relative to the largest, for what is near 0 is a sum of large parts.
        tolerance = 10 * ROUNDING[dtype] * float(their.abs().max())
        torch.testing.assert_close(our, their, rtol=0, atol=tolerance)


# Name and number_format. On a GPU torch takes those by torchao, which need not be there.
SEGMENTS: list[tuple[str, NumberFormat]] = [(name, NumberFormat.FLOAT32) for name in FAMILY_ARCHITECTURES]
if not IS_APPROXIMATE:  # an input that rounds to another number of 8 bits is another input
    SEGMENTS.append(("LlamaForCausalLM", NumberFormat.INT8))


@pytest.mark.parametrize(("name", "number_format"), SEGMENTS)
def test_segments_equal_those_of_torch(name: str, number_format: NumberFormat, configs: dict[str, ModelConfig]) -> None:
    check_segments(configs[name], torch.float32, (SINGLE_RANK, SINGLE_RANK), number_format=number_format)


QUICK_INVARIANT = ("Qwen3ForCausalLM", "MixtralForCausalLM")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK_INVARIANT else SLOW_IF_INTERPRETED) for n in FAMILY_ARCHITECTURES]
)
def test_invariant_segments_are_those_of_torch_and_of_a_token_alone(
    name: str, configs: dict[str, ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_up_rows_alike(monkeypatch)
    kernels = TritonDense(torch.float32, DEVICE, is_invariant=True)

    ours = run_segments(configs[name], kernels, SINGLE_RANK)

    theirs = run_segments(configs[name], TorchDense(torch.float32, DEVICE), SINGLE_RANK)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-5 * float(their.abs().max()))
    for rows in (slice(0, 1), slice(2, 4)):
        some = run_segments(configs[name], kernels, SINGLE_RANK, rows)
        assert all(torch.equal(few, our[rows]) for few, our in zip(some, ours, strict=True))


def test_invariant_adapters_are_those_of_torch_and_of_a_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up_rows_alike(monkeypatch)
    weight, x, of_rows = (
        random(40, 32, seed=1),
        random(9, 32, seed=2),
        np.array([1, -1, 0, 1, 1, 0, -1, 0, 1], np.int32),
    )
    pairs = [{"q": LowRankPair(random(r, 32, seed=r).cpu(), random(40, r, seed=r + 1).cpu(), 0.5)} for r in (4, 16)]
    results = []
    for kernels in (TritonDense(torch.float32, DEVICE, is_invariant=True), TorchDense(torch.float32, DEVICE)):
        matrix, slots = kernels.matrix(32, [40]), AdapterSlots(2, 16, DEVICE)
        matrix.weights[0].copy_(weight)
        part = AdaptedPart("q", (40, 32), ((0, 40),), None)
        (matrix,) = kernels.adapted([matrix], [[part]], slots, of_wanted=False)
        for slot, own in enumerate(reversed(pairs)):
            slots.load(1 - slot, Adapter("", pairs[1]))  # what it leaves is not seen
            slots.load(1 - slot, Adapter("", own))

        def run(rows: slice, matrix: TorchMatrix = matrix, slots: AdapterSlots = slots) -> torch.Tensor:
            own = of_rows[rows]
            with using(slots, StepRows.of(own, np.ones(len(own), np.int32), np.arange(len(own)))):
                return matrix(x[rows])

        results.append([run(slice(0, 9)), *(run(slice(row, row + 1)) for row in range(9))])

    (ours, *alone), (theirs, *_) = results
    assert torch.equal(ours, torch.cat(alone))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    expected = x @ weight.t()
    for row, slot in enumerate(of_rows):
        if slot >= 0:
            pair = pairs[slot]["q"]
            expected[row] += 0.5 * (pair.b @ pair.a).to(DEVICE) @ x[row]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


class FourRanks(SingleRank):
    """Ranks whose parts are given; ours is the second."""

    rank, size = 1, 4

    def __init__(self, *parts: float) -> None:
        self.parts = parts

    def gather(self, part: torch.Tensor, parts: torch.Tensor) -> None:
        for rank, value in enumerate(self.parts):
            parts[rank] = part if rank == self.rank else value


@each_row(((1e8, 1.0, -1e8, 1.0), 1.0), ((1e8, -1e8, 1.0, 1.0), 2.0), ((1.0, 1e8, 1.0, -1e8), 0.0))
def test_ranks_are_added_up_in_their_order(parts: tuple[float, ...], expected: float) -> None:
    """In float32 1e8 + 1 is 1e8."""
    ours = torch.full((2, 3), parts[1], device=DEVICE)
    assert torch.equal(sum_in_rank_order(FourRanks(*parts), ours), torch.full_like(ours, expected))
    assert sum_in_rank_order(SINGLE_RANK, ours) is ours


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "OPTForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_segments_in_short_formats(dtype: torch.dtype, name: str, configs: dict[str, ModelConfig]) -> None:
    check_segments(configs[name], dtype, (SINGLE_RANK, SINGLE_RANK))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "BloomForCausalLM"])
def test_segments_of_several_ranks_add_up_both_products_of_a_layer(name: str, configs: dict[str, ModelConfig]) -> None:
    ours, theirs = Doubling(), Doubling()

    check_segments(configs[name], torch.float32, (ours, theirs))

    assert ours.num_reduced == theirs.num_reduced == 2 * configs[name].num_hidden_layers


def test_embeddings_are_looked_up() -> None:
    kernels = TritonDense(torch.bfloat16, DEVICE)
    embedding = kernels.matrix(6, [10], role="vocabulary")
    embedding.weights[0].copy_(random(10, 6))
    token_ids = torch.tensor([3, 9, 3], device=DEVICE)

    rows = kernels.embedding(EmbeddingWeights(embedding, (0, 10), None, None, 0, None))(token_ids, token_ids)

    assert torch.equal(rows, random(10, 6)[token_ids].to(torch.bfloat16))
    assert (kernels.dtype, kernels.device) == (torch.bfloat16, DEVICE)
