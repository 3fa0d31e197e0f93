"""The dense part of every family in C equals torch's, and a row has the same bits whatever is computed beside it."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.config import ExpertsConfig, MlpConfig, RopeConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.dense import DenseKernels, Experts, LayerEnd, Mlp, Norm
from executor_svc.models.families import parse_config
from executor_svc.models.native_dense import NativeDense
from executor_svc.models.rotary_embedding import inverse_frequencies
from executor_svc.models.sharding import Shard
from executor_svc.models.state_config import Mamba2Config
from executor_svc.models.torch_dense import TorchDense
from executor_svc.native.library import NativeLibrary
from executor_svc.native.structs import NormStruct, NumberFormat
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.native import FORMATS, LANES, library_path, native_library
from tests.numerics.threaded_group import run_ranks
from tests.support.each_row import each_row

NUM_ROWS = 130  # more than one task takes of a panel
# The rows of one call and of its parts, [begin, end).
PARTS = [(0, 1), (129, 130), (0, 3), (20, 44), (0, 130)]

DENSE_ONE, EXPERTS_ONE = "Gemma2ForCausalLM", "Qwen3MoeForCausalLM"
formats = pytest.mark.parametrize("number_format", FORMATS, ids=lambda one: one.name)
vectors = pytest.mark.parametrize("lanes", LANES)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    for name, settings in FAMILY_ARCHITECTURES.items():
        save_tiny_architecture(folder / name, name, settings)
    return {name: folder / name for name in FAMILY_ARCHITECTURES}


@cache
def library_of(lanes: str, num_threads: int) -> NativeLibrary:
    return NativeLibrary(library_path(lanes), num_threads)


def torch_kernels(number_format: NumberFormat = NumberFormat.FLOAT32) -> TorchDense:
    return TorchDense(torch.float32, torch.device("cpu"), number_format=number_format)


class DensePart:
    """All that is not attention: embedding and rotations, the second segment, the last one and the head."""

    def __init__(self, directory: Path, kernels: DenseKernels[Any], group: TensorParallelGroup = SINGLE_RANK) -> None:
        path = directory / "config.json"
        self.config = parse_config(json.loads(path.read_text(encoding="utf-8")), path)
        # What the output matrices take; delta nets and short convolutions return as much as attention.
        (self._num_heads, self._dim), (_, self._last_dim) = (
            (shape.num_heads, layer.latent.value_dim if layer.latent else shape.head_dim)
            for layer in (self.config.layers[0], self.config.layers[-1])
            for shape in (layer.state if isinstance(layer.state, Mamba2Config) else layer,)
        )
        self._heads = slice(*Shard.of(self.config, group.rank, group.size).even_part(self._num_heads))
        self._model = Decoder(self.config, kernels, group)
        self._model.load(Checkpoint(directory))

    def __call__(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return all results for the rows [begin, end) of NUM_ROWS random ones, the logits at rank 0 only."""
        token_ids, positions, heads, residual = (values[begin:end].clone() for values in self._inputs())
        attended, last_attended = (
            heads[:, self._heads, :dim].reshape(end - begin, -1).contiguous() for dim in (self._dim, self._last_dim)
        )
        weights, model = self._model.weights, self._model
        rotations = [model._kernels.rotations(positions, f) for f in model.frequencies.values()]
        embedded = weights.embed(token_ids, positions)
        if weights.token_inputs is not None:
            rows, projection = weights.token_inputs
            values = projection(None, embedded)
            assert values is not None, "it has a projection"
            weights.layer_inputs.values = (values + rows(token_ids, positions)).contiguous()
        projected = weights.segments[1](attended, residual)
        assert projected is not None, "the second layer of every family here mixes tokens"
        projected = projected.clone()
        latents: list[torch.Tensor] = []
        if (latent := weights.latents[1]) is not None:
            latents = [latent.queries(projected.clone())]
            latents.append(latent.values(latents[0][:, :-1, self.config.layers[1].value_begin :].flatten(1)))
        between = residual.clone()
        weights.last_segment(last_attended, residual)
        logits = model.logits(residual)
        turned = [values for rotation in rotations for values in (rotation.cos, rotation.signed_sin)]
        return [embedded, between, residual, *turned, projected, *latents, *([] if logits is None else [logits])]

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        generator, config = torch.Generator().manual_seed(1), self.config
        return (
            torch.randint(config.vocab_size, (NUM_ROWS,), generator=generator),
            torch.randint(config.max_position_embeddings, (NUM_ROWS,), generator=generator),
            torch.randn(NUM_ROWS, self._num_heads, max(self._dim, self._last_dim), generator=generator),
            torch.randn(NUM_ROWS, config.hidden_size, generator=generator),
        )


# Every family in every number format with the widest vectors; narrow ones have the formats of two families.
of_families = pytest.mark.parametrize(
    ("lanes", "name", "number_format"),
    [
        (lanes, name, number_format)
        for lanes in LANES
        for name in FAMILY_ARCHITECTURES
        for number_format in FORMATS
        if lanes == LANES[0] or number_format == NumberFormat.FLOAT32 or name in (DENSE_ONE, EXPERTS_ONE)
    ],
)


@of_families
def test_it_equals_torch(lanes: str, name: str, number_format: NumberFormat, directories: dict[str, Path]) -> None:
    ours = DensePart(directories[name], NativeDense(native_library(lanes), number_format=number_format))
    theirs = DensePart(directories[name], TorchDense(torch.float32, torch.device("cpu"), number_format=number_format))
    # int16 inputs differ from float32 by less than 2 ** -16 of the largest one of their row. An input between two
    # numbers of bfloat16 may become the other one, which a few outputs show.
    tolerances = {NumberFormat.BFLOAT16_A16: 1e-2, NumberFormat.INT8: 2e-3}
    tolerance = (tolerances | {NumberFormat.INT8_A8: 0.1, NumberFormat.INT4: 0.1}).get(number_format, 5e-5)

    for begin, end in ((0, 1), (20, 44)):
        for our, their in zip(ours(begin, end), theirs(begin, end), strict=True):
            torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance)


@of_families
def test_a_row_has_the_same_bits_in_every_company(
    lanes: str, name: str, number_format: NumberFormat, directories: dict[str, Path]
) -> None:
    expected: Sequence[torch.Tensor] | None = None
    for num_threads in (1, 2):
        part = DensePart(directories[name], NativeDense(library_of(lanes, num_threads), number_format=number_format))
        expected = expected or part(0, NUM_ROWS)
        for begin, end in PARTS:
            for our, whole in zip(part(begin, end), expected, strict=True):
                assert torch.equal(our, whole[begin:end])


@pytest.mark.parametrize(
    ("name", "number_format", "tp"),
    [
        *((name, NumberFormat.FLOAT32, tp) for name in FAMILY_ARCHITECTURES for tp in (2, 4)),
        *((name, one, 2) for name in (DENSE_ONE, EXPERTS_ONE) for one in FORMATS if one != NumberFormat.FLOAT32),
    ],
)
def test_ranks_that_share_a_model_give_a_row_the_same_bits(
    name: str, number_format: NumberFormat, tp: int, directories: dict[str, Path]
) -> None:
    def run(group: TensorParallelGroup) -> list[list[torch.Tensor]]:
        library = NativeLibrary(library_path("widest"), num_threads=1)  # each rank has memory of its own
        part = DensePart(directories[name], NativeDense(library, number_format=number_format, group=group), group)
        return [part(begin, end) for begin, end in PARTS]

    ranks = run_ranks(tp, run)

    for *parts, whole in ranks:
        for (begin, end), part in zip(PARTS, parts, strict=False):
            for our, all_rows in zip(part, whole, strict=True):
                assert torch.equal(our, all_rows[begin:end])
    for rank in ranks:
        for our, of_first in zip(rank[-1][:3], ranks[0][-1], strict=False):  # what all ranks have whole
            assert torch.equal(our, of_first)
    if number_format not in (NumberFormat.FLOAT32, NumberFormat.BFLOAT16):
        return  # ranks share out the groups of inputs, so that weights are rounded otherwise
    embedded, between, residual, *_, logits = ranks[0][-1]
    *expected, expected_logits = DensePart(directories[name], torch_kernels(number_format))(0, NUM_ROWS)
    for our, their in zip((embedded, between, residual, logits), (*expected[:3], expected_logits), strict=True):
        torch.testing.assert_close(our, their, rtol=5e-5, atol=5e-5)


@each_row((1, 1.0), (2, 1.0), (5, 0.25))
def test_parts_are_added_in_the_order_of_the_ranks(num_parts: int, scale: float) -> None:
    library = native_library("widest")
    for num_rows in (1, 300):
        parts, residual = 10 ** (4 * torch.rand(num_parts, num_rows, 70)), torch.randn(num_rows, 70)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        expected = residual + scale * total

        library.add_parts(NormStruct(), scale, parts, residual)

        assert torch.equal(residual, expected)


HIDDEN_SIZE, INTERMEDIATE_SIZE, ATTENDED_SIZE = 300, 140, 24  # sums of more inputs than are multiplied at once


def make_mixture(
    kernels: DenseKernels[Any], num_experts: int, num_chosen: int, router: torch.Tensor | None = None, **routing: Any
) -> Any:
    """Return the end of a layer that is a mixture of experts; its weights are always the same."""
    generator = torch.Generator().manual_seed(3)

    def matrix(num_inputs: int, num_outputs: int) -> Any:
        made = kernels.matrix(num_inputs, [num_outputs])
        made.weights[0].copy_(torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5)
        return made

    attention_output = matrix(ATTENDED_SIZE, HIDDEN_SIZE)
    up_sizes, down_sizes = (HIDDEN_SIZE, INTERMEDIATE_SIZE), (INTERMEDIATE_SIZE, HIDDEN_SIZE)
    mlps = [Mlp(matrix(*up_sizes), matrix(*up_sizes), matrix(*down_sizes), "silu") for _ in range(num_experts)]
    router_matrix = kernels.matrix(HIDDEN_SIZE, [num_experts], role="router")
    router_matrix.weights[0].copy_(
        torch.randn(num_experts, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5 if router is None else router
    )
    norm = Norm(torch.ones(HIDDEN_SIZE), None, 1e-6)
    mlp, settings = MlpConfig(INTERMEDIATE_SIZE), {"is_normalized": router is not None, **routing}
    bias = torch.randn(num_experts, generator=generator) / 3 if "has_correction_bias" in routing else None
    mixture = Experts(router_matrix, tuple(mlps), ExpertsConfig(num_experts, num_chosen, mlp=mlp, **settings), bias)
    return kernels.last_segment(LayerEnd(attention_output, None, norm, mixture, None))


def run_mixture(segment: Any, num_rows: int, begin: int = 0, end: int | None = None) -> torch.Tensor:
    """Return what becomes of the rows [begin, end) of so many random ones."""
    generator = torch.Generator().manual_seed(num_rows)
    residual = torch.randn(num_rows, HIDDEN_SIZE, generator=generator)[begin:end].clone()
    segment(torch.randn(num_rows, ATTENDED_SIZE, generator=generator)[begin:end].clone(), residual)
    return residual


CORRECTED = {"scoring": "sigmoid", "has_correction_bias": True, "is_normalized": True, "sum_epsilon": 0.1, "scale": 2.5}


@pytest.mark.parametrize("routing", [{}, {"scoring": "sigmoid"}, CORRECTED], ids=["softmax", "sigmoid", "corrected"])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (4, 4), (17, 3), (33, 8)])
@vectors
def test_every_number_of_experts(lanes: str, num_experts: int, num_chosen: int, routing: dict[str, Any]) -> None:
    ours = make_mixture(NativeDense(native_library(lanes)), num_experts, num_chosen, **routing)
    theirs = make_mixture(torch_kernels(), num_experts, num_chosen, **routing)

    for num_rows in (0, 1, 9, 130, 300):
        torch.testing.assert_close(run_mixture(ours, num_rows), run_mixture(theirs, num_rows), rtol=5e-5, atol=5e-5)


@formats
@vectors
def test_the_experts_of_a_row_do_not_depend_on_the_other_rows(lanes: str, number_format: NumberFormat) -> None:
    for num_threads in (1, 2):
        mixture = make_mixture(NativeDense(library_of(lanes, num_threads), number_format=number_format), 6, 3)
        together = run_mixture(mixture, NUM_ROWS)

        for begin, end in PARTS:
            assert torch.equal(run_mixture(mixture, NUM_ROWS, begin, end), together[begin:end])


@vectors
def test_of_equal_scores_the_first_expert_is_chosen(lanes: str) -> None:
    kernels, router = NativeDense(native_library(lanes)), torch.zeros(6, HIDDEN_SIZE)

    of_six = run_mixture(make_mixture(kernels, 6, 2, router), 5)

    assert torch.equal(of_six, run_mixture(make_mixture(kernels, 2, 2, router[:2]), 5))


@pytest.mark.parametrize("head_dim", [2, 20, 64])
@vectors
def test_rotations_are_those_of_real_numbers(lanes: str, head_dim: int) -> None:
    kernels = NativeDense(native_library(lanes))
    positions = torch.cat((torch.arange(300), torch.tensor([4_095, 131_071, 1_048_575, 10_000_000])))
    frequencies = inverse_frequencies(RopeConfig(10_000.0), head_dim)

    rotation = kernels.rotations(positions, frequencies)

    angles = (positions[:, None].float() * frequencies).double()
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    torch.testing.assert_close(rotation.cos.double(), torch.cat((angles.cos(),) * 2, -1), rtol=6e-8, atol=1e-15)
    torch.testing.assert_close(rotation.signed_sin.double(), sin, rtol=6e-8, atol=1e-15)


@vectors
def test_a_soft_cap_of_every_size(lanes: str) -> None:
    for count in (0, 1, 15, 16, 17, 100_003):
        logits = 60 * torch.randn(1, count)
        capped = 30 * (logits.double() / 30).tanh()

        ours = NativeDense(native_library(lanes)).cap_logits(logits.clone(), 30.0)

        torch.testing.assert_close(ours.double(), capped, rtol=6e-7, atol=0)
