"""The torch attention equals a naive one in float64 that sees whole sequences, on a cache full of NaN."""

import itertools
from itertools import product

import numpy as np
import pytest
import torch

from executor_svc.attention.explicit_attention import TILE_TOKENS
from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, AttentionPlan, DecodeBatch, LayerCache
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.models.families.common import alibi_slopes
from tests.numerics.attention import CHUNKS, DECODES, LayerInput, Rows, Step, biases_of, sinks_of
from tests.numerics.torch_decode import TorchDecodePlanner
from tests.support.each_row import each_row

WINDOWS = [1, 2, 15, 16, 17, 40, 97, 1_000]


def check(inputs: LayerInput, layer: AttentionLayer, *, rtol: float = 1e-5, atol: float = 5e-6) -> None:
    ours, our_cache = inputs.attend(TorchAttentionBackend(), layer)
    naive, naive_cache = inputs.attend_naively(layer)
    assert ours.dtype == inputs.dtype
    torch.testing.assert_close(ours.double(), naive, rtol=rtol, atol=atol)
    torch.testing.assert_close(our_cache.keys.double(), naive_cache.keys, rtol=rtol, atol=atol, equal_nan=True)
    torch.testing.assert_close(our_cache.values.double(), naive_cache.values, rtol=0, atol=0, equal_nan=True)


@each_row(*product([True, False], [False, True], [False, True], [None, 1.5], [None, *WINDOWS]))
def test_every_combination(
    is_rotated: bool, has_alibi: bool, has_sinks: bool, soft_cap: float | None, window: int | None
) -> None:
    slopes, sinks = alibi_slopes(6) if has_alibi else None, sinks_of(6) if has_sinks else None
    layer = AttentionLayer(0.7, window, soft_cap, slopes, sinks)
    for rows in (DECODES, CHUNKS, [*DECODES, *CHUNKS], [*CHUNKS, *DECODES]):
        check(LayerInput(Step(rows, 16, window), (6, 2), 16, is_rotated=is_rotated), layer)


@each_row(2, 6, 14)
def test_part_of_a_head(rotary_dim: int) -> None:
    check(LayerInput(Step([*DECODES, *CHUNKS], 16), (6, 2), 16, rotary_dim=rotary_dim), AttentionLayer(0.7))


@each_row(*product([None, *WINDOWS], [1, 3, 32, 128]))
def test_every_block_size(window: int | None, block_size: int) -> None:
    for layer in (AttentionLayer(0.25, window), AttentionLayer(0.25, window, 1.5, alibi_slopes(4), sinks_of(4))):
        check(LayerInput(Step([*DECODES, *CHUNKS], block_size, window), (4, 2), 16), layer)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 1), (9, 3), (10, 2)])
def test_every_number_of_query_heads_for_a_kv_head(heads: tuple[int, int]) -> None:
    all_slopes, all_sinks = (None, alibi_slopes(heads[0])), (None, sinks_of(heads[0]))
    for window, soft_cap, slopes, sinks in itertools.product((None, 20), (None, 1.5), all_slopes, all_sinks):
        inputs = LayerInput(Step([*DECODES, *CHUNKS], 16, window), heads, 8)
        check(inputs, AttentionLayer(0.5, window, soft_cap, slopes, sinks))


@each_row(*product([[(1_000, 1), (3, 1), (200, 1), (450, 1)], [(0, 700)], [(300, TILE_TOKENS + 1)]], [None, 129, 400]))
def test_long_contexts(rows: Rows, window: int | None) -> None:
    for layer in (
        AttentionLayer(0.5, window),
        AttentionLayer(0.5, window, 1.5),
        AttentionLayer(0.5, window, alibi_slopes=alibi_slopes(2)),
        AttentionLayer(0.5, window, sinks=sinks_of(2)),
        AttentionLayer(0.5, window, distance_biases=biases_of(2, 129)),
    ):
        check(LayerInput(Step(rows, 16, window), (2, 1), 8), layer)


@pytest.mark.parametrize("is_rotated", [True, False])
@pytest.mark.parametrize(("windows", "gone_window"), [((16, 40), 40), ((5, 16, 5), 16), ((16, None, 200), None)])
def test_layers_of_one_plan_attend_each_in_its_own_way(
    windows: tuple[int | None, ...], gone_window: int | None, is_rotated: bool
) -> None:
    step = Step([*DECODES, *CHUNKS], 16, gone_window)
    kinds = [
        *((None, None, None), (1.5, None, None), (None, alibi_slopes(4), None), (2.5, (0.3, 0.2, 0.1, 0.0), None)),
        *((None, None, sinks_of(4)), (None, None, sinks_of(5)[1:])),
    ]
    layers = [
        AttentionLayer(scale, window, soft_cap, slopes, sinks)
        for scale, (window, (soft_cap, slopes, sinks)) in zip(
            itertools.cycle((0.25, 1.0, 0.5)), itertools.product(windows, kinds), strict=False
        )
    ]
    inputs = [LayerInput(step, (4, 2), 8, is_rotated=is_rotated, seed=seed) for seed in range(len(layers))]
    caches = [LayerCache(each.keys.clone(), each.values.clone()) for each in inputs]

    plan = TorchAttentionBackend().plan(step.metadata, caches[0])

    for each, cache, layer in zip(inputs, caches, layers, strict=True):
        ours = plan.attend(each.qkv.clone(), each.rotation, cache, layer)
        torch.testing.assert_close(ours.double(), each.attend_naively(layer)[0], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_every_number_format(dtype: torch.dtype, tolerance: float) -> None:
    all_slopes, all_sinks = (None, alibi_slopes(4)), (None, sinks_of(4))
    for window, soft_cap, slopes, sinks in itertools.product((None, 20), (None, 1.5), all_slopes, all_sinks):
        inputs = LayerInput(Step([*DECODES, *CHUNKS], 16, window), (4, 2), 16, is_rotated=False, dtype=dtype)
        check(inputs, AttentionLayer(0.25, window, soft_cap, slopes, sinks), rtol=tolerance, atol=tolerance)


@each_row(*range(20))
def test_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 12))
    starts = rng.integers(0, 300, num_rows) * rng.integers(0, 2, num_rows)
    lengths = 1 + rng.integers(0, 60, num_rows) * rng.integers(0, 2, num_rows)
    rows = list(zip(starts.tolist(), lengths.tolist(), strict=True))
    window = None if rng.random() < 0.3 else int(rng.integers(1, 250))
    num_kv_heads, group, block_size = (int(rng.integers(1, end)) for end in (4, 6, 40))
    layer = AttentionLayer(
        float(rng.uniform(0.1, 1)),
        window,
        None if rng.random() < 0.5 else float(rng.uniform(0.5, 5)),
        None if rng.random() < 0.5 else tuple(rng.uniform(0, 1, num_kv_heads * group).tolist()),
        None if rng.random() < 0.5 else torch.from_numpy(rng.normal(0, 2, num_kv_heads * group)).float(),
    )
    inputs = LayerInput(Step(rows, block_size, window), (num_kv_heads * group, num_kv_heads), 8, seed=seed)

    check(inputs, layer)


class DecodePlans:
    """The torch backend with the plans that CUDA graphs capture."""

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> AttentionPlan:
        visible = torch.from_numpy(metadata.starts + metadata.lengths)
        tables = torch.from_numpy(metadata.block_tables)
        return TorchDecodePlanner().decode_plan(DecodeBatch(visible, tables, metadata.slot_mapping), cache)


@each_row(*product([False, True], [None, 1.5], [None, *WINDOWS], [1, 3, 16, 128]))
def test_decodes_that_look_at_nothing_on_the_host(
    has_options: bool, soft_cap: float | None, window: int | None, block_size: int
) -> None:
    slopes, sinks = (alibi_slopes(6), sinks_of(6)) if has_options else (None, None)
    layer = AttentionLayer(0.7, window, soft_cap, slopes, sinks)
    inputs = LayerInput(Step([*DECODES, (300, 1)], block_size, window), (6, 2), 16)
    ours, _ = inputs.attend(DecodePlans(), layer)
    torch.testing.assert_close(ours.double(), inputs.attend_naively(layer)[0], rtol=1e-5, atol=5e-6)
