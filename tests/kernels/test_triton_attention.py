"""The Triton attention equals a naive one in float64, on a cache that is NaN where nobody wrote.

Shapes are small, because the interpreter is slow: a tile has 32 keys, and 16 queries of one token or more.
"""

import itertools

import numpy as np
import pytest
import torch

from executor_svc.attention import triton_backend
from executor_svc.attention.interface import AttentionLayer, LayerCache
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.attention.triton_backend import TritonAttentionBackend
from executor_svc.models.families.common import alibi_slopes
from executor_svc.triton_kernels import tiles
from tests.kernels.device import DEVICE, RANDOM_CASES, SLOW_IF_INTERPRETED
from tests.kernels.random_shapes import shape_of_case
from tests.numerics.attention import LayerInput, Rows, Step, biases_of, sinks_of
from tests.support.each_row import each_row

MIXED: Rows = [(3, 1), (0, 2), (70, 1), (30, 7)]


def check(
    inputs: LayerInput, layer: AttentionLayer, *, num_multiprocessors: int = 1, rtol: float = 1e-5, atol: float = 5e-6
) -> None:
    ours, our_cache = inputs.attend(TritonAttentionBackend(num_multiprocessors), layer)
    naive, naive_cache = inputs.attend_naively(layer)
    assert ours.dtype == inputs.dtype
    torch.testing.assert_close(ours.cpu().double(), naive, rtol=rtol, atol=atol)
    for ours, naive in zip(our_cache.pools, (naive_cache.keys, naive_cache.values), strict=False):
        torch.testing.assert_close(ours.cpu().double(), naive, rtol=rtol, atol=atol, equal_nan=True)


def on_device(rows: Rows, block_size: int, gone_window: int | None = None) -> Step:
    return Step(rows, block_size, gone_window, DEVICE)


# Each value of each option with each value of the others; the random steps have every three together.
PAIRS = {(None, None, False, True), (None, 1.5, True, False), (1, None, True, False), (1, 1.5, False, True)}
PAIRS |= {(33, None, False, False), (33, 1.5, True, True), (1_000, None, True, True), (1_000, 1.5, False, False)}


@pytest.mark.parametrize(
    ("window", "soft_cap", "has_alibi", "has_sinks"),
    [
        pytest.param(*options, marks=() if options in PAIRS else SLOW_IF_INTERPRETED)
        for options in itertools.product((None, 1, 33, 1_000), (None, 1.5), (False, True), (False, True))
    ],
)
def test_every_combination(window: int | None, soft_cap: float | None, has_alibi: bool, has_sinks: bool) -> None:
    slopes, sinks = alibi_slopes(6) if has_alibi else None, sinks_of(6, DEVICE) if has_sinks else None
    layer = AttentionLayer(0.7, window, soft_cap, slopes, sinks)
    check(LayerInput(on_device(MIXED, 16, window), (6, 2), 16, is_rotated=has_alibi), layer)


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 256])
def test_every_block_size(block_size: int) -> None:
    check(LayerInput(on_device(MIXED, block_size), (2, 1), 16), AttentionLayer(0.25))
    layer = AttentionLayer(0.25, 20, 1.5, alibi_slopes(2))
    check(LayerInput(on_device(MIXED, block_size, 20), (2, 1), 16), layer)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 3), pytest.param((20, 1), marks=SLOW_IF_INTERPRETED), (71, 1)])
def test_every_number_of_query_heads_for_a_kv_head(heads: tuple[int, int]) -> None:
    layer = AttentionLayer(0.5, 20, 1.5, alibi_slopes(heads[0]), sinks_of(heads[0], DEVICE))
    check(LayerInput(on_device(MIXED, 16, 20), heads, 16), layer)


@pytest.mark.parametrize("num_distances", [1, 41])
@pytest.mark.parametrize(("heads", "num_multiprocessors"), [((6, 2), 1), ((5, 1), 24)])
def test_distance_biases(num_distances: int, heads: tuple[int, int], num_multiprocessors: int) -> None:
    biases = biases_of(heads[0], num_distances, DEVICE)
    layer = AttentionLayer(1.0, distance_biases=biases)
    check(LayerInput(on_device(MIXED, 16), heads, 16), layer, num_multiprocessors=num_multiprocessors)
    layer = AttentionLayer(0.5, 33, 1.5, alibi_slopes(heads[0]), sinks_of(heads[0], DEVICE), biases)
    check(LayerInput(on_device(MIXED, 16, 33), heads, 16), layer, num_multiprocessors=num_multiprocessors)


@each_row(16, 18, 64, 72, 80, 96, 128, 160, 256)
def test_every_head_dim(head_dim: int) -> None:
    check(LayerInput(on_device([(0, 1), (40, 1), (20, 5)], 16), (2, 1), head_dim), AttentionLayer(head_dim**-0.5))


@pytest.mark.parametrize(
    ("value_begin", "head_dim", "num_heads", "num_multiprocessors", "layer"),
    [
        (16, 48, 3, 1, AttentionLayer(0.3)),
        (2, 35, 2, 8, AttentionLayer(0.3)),
        (10, 26, 6, 2, AttentionLayer(0.3, 20, 1.5, alibi_slopes(6), sinks_of(6, DEVICE))),  # two groups
    ],
)
def test_latent_caches(
    value_begin: int,
    head_dim: int,
    num_heads: int,
    num_multiprocessors: int,
    layer: AttentionLayer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values are a part of the keys, and groups share the one KV head."""
    monkeypatch.setattr(tiles, "MAX_LATENT_GROUP", 3)
    step = on_device([(3, 1), (40, 1), (30, 3)], 16, layer.window_tokens)
    inputs = LayerInput(step, (num_heads, 1), head_dim, rotary_dim=value_begin, value_begin=value_begin)
    check(inputs, layer, num_multiprocessors=num_multiprocessors)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_multiprocessors", [2, 8, 16])
def test_keys_are_split(num_multiprocessors: int, window: int | None) -> None:
    """Into 4 to 29 parts, of rows of one to seven tiles: some parts have no keys, in some rows all but one."""
    step = on_device([(0, 1), (33, 1), (200, 1)], 16, window)
    for sinks in (None, torch.tensor([0.5, 3.0], device=DEVICE)):
        layer = AttentionLayer(0.25, window, sinks=sinks)
        check(LayerInput(step, (2, 1), 16), layer, num_multiprocessors=num_multiprocessors)


@pytest.mark.parametrize("value_begin", [0, 16])
@pytest.mark.parametrize("num_multiprocessors", [24, 90])
def test_keys_of_chunks_are_split(num_multiprocessors: int, value_begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside decodes, with windows that begin where some queries of a tile see nothing of a split."""
    monkeypatch.setattr(triton_backend, "MIN_SPLIT_KEYS", 8)
    numbers: list[int] = []
    number_of = triton_backend.number_of_prefill_splits

    def recorded(*given: int) -> int:
        numbers.append(number_of(*given))
        return numbers[-1]

    monkeypatch.setattr(triton_backend, "number_of_prefill_splits", recorded)
    slopes, sinks = alibi_slopes(2), sinks_of(2, DEVICE)
    for layer in (
        AttentionLayer(0.25),
        AttentionLayer(0.25, sinks=sinks),
        AttentionLayer(0.25, 20, 1.5, slopes, sinks),
        AttentionLayer(0.25, 70),
    ):
        step = on_device([(200, 30), (5, 1), (0, 3)], 16, layer.window_tokens)
        inputs = LayerInput(step, (2, 1), 16 + 2 * value_begin, rotary_dim=16, value_begin=value_begin)
        check(inputs, layer, num_multiprocessors=num_multiprocessors)
    assert min(numbers) > 1


@pytest.mark.parametrize("window", [None, 129, 250])
def test_long_contexts(window: int | None) -> None:
    check(LayerInput(on_device([(450, 1), (300, 20)], 16, window), (2, 1), 16), AttentionLayer(0.5, window))


def test_a_window_begins_anywhere_in_a_tile() -> None:
    rows = [(position, 1) for position in (62, 63, 64, 65)] + [(position, 2) for position in (62, 63, 64, 65)]
    for window in (31, 32, 33):
        check(LayerInput(on_device(rows, 16, window), (1, 1), 16), AttentionLayer(0.25, window))


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        ((20, 1.5, True), torch.float16, 4e-3),
        ((None, None, False), torch.bfloat16, 3e-2),
        pytest.param((None, None, False), torch.float16, 4e-3, marks=SLOW_IF_INTERPRETED),
        pytest.param((20, 1.5, True), torch.bfloat16, 3e-2, marks=SLOW_IF_INTERPRETED),
    ],
)
def test_half_precision_is_as_close_as_that_of_torch(
    options: tuple[int | None, float | None, bool], dtype: torch.dtype, tolerance: float
) -> None:
    window, soft_cap, has_options = options
    slopes, sinks = (alibi_slopes(4), sinks_of(4, DEVICE)) if has_options else (None, None)
    layer = AttentionLayer(0.125, window, soft_cap, slopes, sinks)
    for head_dim in (16, 80):
        inputs = LayerInput(on_device([*MIXED, (140, 1)], 16, window), (4, 2), head_dim, dtype=dtype)
        ours, our_cache = inputs.attend(TritonAttentionBackend(3), layer)
        theirs, their_cache = inputs.attend(TorchAttentionBackend(), layer)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(our_cache.keys, their_cache.keys, rtol=tolerance, atol=tolerance, equal_nan=True)
        torch.testing.assert_close(our_cache.values, their_cache.values, rtol=0, atol=0, equal_nan=True)


def test_layers_of_one_plan_attend_each_in_its_own_way() -> None:
    step = on_device(MIXED, 16)
    layers = [
        AttentionLayer(0.25, 16),
        AttentionLayer(1.0, None, 1.5),
        AttentionLayer(0.5, 40, None, alibi_slopes(4)),
        AttentionLayer(0.5, 16, 2.5, (0.3, 0.2, 0.1, 0.0)),
        AttentionLayer(0.25, 16, sinks=sinks_of(4, DEVICE)),
        AttentionLayer(0.25, 16, sinks=sinks_of(4, DEVICE).flip(0)),
    ]
    inputs = [LayerInput(step, (4, 2), 16, is_rotated=seed % 2 == 0, seed=seed) for seed in range(len(layers))]
    caches = [LayerCache(each.keys.clone(), each.values.clone()) for each in inputs]

    plan = TritonAttentionBackend(1).plan(step.metadata, caches[0])

    for each, cache, layer in zip(inputs, caches, layers, strict=True):
        ours = plan.attend(each.qkv.clone(), each.rotation, cache, layer)
        torch.testing.assert_close(ours.cpu().double(), each.attend_naively(layer)[0], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("soft_cap", [None, 50.0])
def test_large_scores_do_not_overflow(soft_cap: float | None) -> None:
    inputs = LayerInput(on_device(MIXED, 16), (4, 2), 16)
    inputs.qkv.mul_(100)

    check(inputs, AttentionLayer(0.25, soft_cap=soft_cap), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("soft_cap", [1e-3, 0.1, 1.0, 10.0, 1e4])
def test_soft_caps_of_every_size(soft_cap: float) -> None:
    """Scores of about 4: from all at the cap to none near it."""
    inputs = LayerInput(on_device([(40, 1), (5, 3)], 16), (2, 1), 16)
    check(inputs, AttentionLayer(1.0, soft_cap=soft_cap), rtol=2e-5, atol=1e-5)


def test_pools_may_have_more_elements_than_fit_into_32_bits() -> None:
    """On a CPU only the pages that are used take memory."""
    dtype, head_dim, block_size = torch.float16, 256, 256
    num_blocks = 2**31 // (block_size * head_dim) + 40
    inputs = LayerInput(on_device([(20, 1), (0, 3)], block_size), (1, 1), head_dim, dtype=dtype)
    layer = AttentionLayer(0.06)
    expected, _ = inputs.attend(TorchAttentionBackend(), layer)
    keys, values = (torch.empty(num_blocks, block_size, 1, head_dim, dtype=dtype, device=DEVICE) for _ in range(2))
    cache = LayerCache(keys, values)
    shift = num_blocks - inputs.step.num_blocks
    cache.keys[shift:], cache.values[shift:] = inputs.keys, inputs.values
    metadata = inputs.step.metadata
    far = type(metadata)(
        metadata.starts, metadata.lengths, metadata.block_tables + shift, metadata.slot_mapping + shift * block_size
    )

    ours = TritonAttentionBackend(1).plan(far, cache).attend(inputs.qkv.clone(), inputs.rotation, cache, layer)

    torch.testing.assert_close(ours, expected, rtol=5e-3, atol=5e-3)


# Cases in a test: few enough that one that fails is found soon.
CASES_OF_A_TEST = 10


@pytest.mark.parametrize("first_seed", range(0, RANDOM_CASES, CASES_OF_A_TEST))
def test_random_steps(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + CASES_OF_A_TEST):
        rng = np.random.default_rng(seed)
        num_rows = int(rng.integers(1, 4))
        starts = rng.integers(0, 70, num_rows) * rng.integers(0, 2, num_rows)
        lengths = 1 + rng.integers(0, 8, num_rows) * (rng.random(num_rows) < 0.4)
        rows = list(zip(starts.tolist(), lengths.tolist(), strict=True))
        shape = shape_of_case(seed)
        layer = shape.random_layer(rng)
        step = on_device(rows, shape.block_size, layer.window_tokens)
        inputs = LayerInput(step, shape.heads, shape.head_dim, is_rotated=shape.is_rotated, seed=seed)

        check(inputs, layer, num_multiprocessors=int(rng.integers(1, 3)))


def test_random_kinds_are_all_there() -> None:
    """What the random steps cover, counted: no kind of layer is left to chance."""
    shapes = [shape_of_case(seed) for seed in range(RANDOM_CASES)]
    kinds = {(shape.has_window, shape.has_soft_cap, shape.has_alibi) for shape in shapes}
    assert kinds == set(itertools.product((False, True), repeat=3))
    assert {(shape.has_window, shape.has_sinks) for shape in shapes} == set(itertools.product((False, True), repeat=2))
