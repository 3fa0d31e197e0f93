"""What the Triton backend plans on the host, and decodes that depend on nothing there."""

from itertools import product

import numpy as np
import pytest
import torch

from executor_svc.attention import triton_backend
from executor_svc.attention.interface import AttentionLayer, DecodeBatch, DecodePlanner, LayerCache
from executor_svc.attention.rules import AttentionNeeds, TritonRules
from executor_svc.attention.splits import MAX_WAVES, number_of_splits
from executor_svc.attention.triton_backend import TritonAttentionBackend, number_of_prefill_splits
from executor_svc.triton_kernels.decode import DecodeRows
from executor_svc.triton_kernels.prefill import PrefillRows, query_tiles
from executor_svc.triton_kernels.tiles import MAX_RESIDENT_PROGRAMS, MAX_SPLITS, groups_of, resident_programs
from tests.kernels.device import DEVICE
from tests.numerics.attention import LayerInput, Step
from tests.support.each_row import each_row

# Three programs on each of 132 multiprocessors.
H200_PLACES = 3 * 132


def decode_batch(step: Step) -> DecodeBatch:
    metadata = step.metadata
    visible = torch.from_numpy(metadata.starts + 1).to(DEVICE)
    return DecodeBatch(visible, torch.from_numpy(metadata.block_tables).to(DEVICE), metadata.slot_mapping)


@pytest.mark.parametrize(
    ("num_multiprocessors", "window", "value_begin"), [(1, None, 0), (1, 20, 0), (8, None, 0), (8, 20, 0), (2, 20, 5)]
)
def test_a_decode_plan_equals_a_plan(num_multiprocessors: int, window: int | None, value_begin: int) -> None:
    step = Step([(0, 1), (40, 1), (69, 1)], 16, window, DEVICE)
    inputs = LayerInput(step, (4, 1) if value_begin else (4, 2), 16, value_begin=value_begin)
    backend = TritonAttentionBackend(num_multiprocessors)
    layer = AttentionLayer(0.25, window, 1.5, (0.5, 0.25, 0.1, 0.0))
    caches = [inputs.cache() for _ in range(2)]
    plans = [backend.plan(step.metadata, caches[0]), backend.decode_plan(decode_batch(step), caches[1])]

    planned, decoded = (
        plan.attend(inputs.qkv.clone(), inputs.rotation, cache, layer)
        for plan, cache in zip(plans, caches, strict=True)
    )

    assert isinstance(backend, DecodePlanner)
    assert torch.equal(planned, decoded)
    torch.testing.assert_close(caches[0].keys, caches[1].keys, rtol=0, atol=0, equal_nan=True)


def test_a_decode_plan_sees_what_its_tensors_hold_later() -> None:
    """A graph is replayed with other rows in the same tensors."""
    backend, layer = TritonAttentionBackend(4), AttentionLayer(0.25)
    first, second = (Step(rows, 16, device=DEVICE) for rows in ([(70, 1), (1, 1)], [(3, 1), (90, 1)]))
    inputs = LayerInput(second, (2, 1), 16)
    cache = LayerCache(inputs.keys.clone(), inputs.values.clone())
    batch, later = decode_batch(first), decode_batch(second)
    tables = torch.zeros(2, 10, dtype=torch.int32, device=DEVICE)
    plan = backend.decode_plan(DecodeBatch(batch.num_visible_tokens, tables, batch.slot_mapping), cache)

    batch.num_visible_tokens.copy_(later.num_visible_tokens)
    batch.slot_mapping.copy_(later.slot_mapping)
    tables[:, : later.block_tables.shape[1]] = later.block_tables

    ours = plan.attend(inputs.qkv.clone(), inputs.rotation, cache, layer)
    torch.testing.assert_close(ours.cpu().double(), inputs.attend_naively(layer)[0], rtol=1e-5, atol=5e-6)


def test_rows_that_pad_a_batch_change_nothing() -> None:
    """All of them write the same slot of a block that no sequence has."""
    step = Step([(0, 1), (40, 1)], 16, device=DEVICE)
    inputs = LayerInput(step, (2, 1), 16)
    cache = LayerCache(inputs.keys.clone(), inputs.values.clone())
    used = {slot // 16 for slots in step.slots for slot in slots}
    spare = next(block for block in range(step.num_blocks) if block not in used)
    batch = decode_batch(step)
    num_rows, width = 5, batch.block_tables.shape[1]
    tables = torch.full((num_rows, width), spare, dtype=torch.int32, device=DEVICE)
    tables[:2] = batch.block_tables
    visible = torch.ones(num_rows, dtype=torch.int32, device=DEVICE)
    visible[:2] = batch.num_visible_tokens
    slots = torch.full((num_rows,), spare * 16, device=DEVICE)
    slots[:2] = batch.slot_mapping
    qkv = torch.cat((inputs.qkv, inputs.qkv[:1].expand(3, -1, -1)))
    assert inputs.rotation is not None
    rotation = type(inputs.rotation)(
        *(torch.cat((part, part[:1].expand(3, -1))) for part in (inputs.rotation.cos, inputs.rotation.signed_sin))
    )
    plan = TritonAttentionBackend(1).decode_plan(DecodeBatch(visible, tables, slots), cache)

    layer = AttentionLayer(0.25)
    ours = plan.attend(qkv, rotation, cache, layer)

    naive, naive_cache = inputs.attend_naively(layer)
    torch.testing.assert_close(ours[:2].cpu().double(), naive, rtol=1e-5, atol=5e-6)
    assert bool(ours.isfinite().all())
    cache.keys[spare] = torch.nan
    torch.testing.assert_close(cache.keys.cpu().double(), naive_cache.keys, rtol=1e-5, atol=5e-6, equal_nan=True)


def test_one_backend_serves_steps_of_every_size() -> None:
    """Their splits share memory, which must be enough for the most of them."""
    backend, layer = TritonAttentionBackend(8), AttentionLayer(0.25)
    for rows, heads in (([(40, 1)] * 3, (2, 1)), ([(3, 1)], (2, 1)), ([(20, 1)] * 2, (6, 2)), ([(40, 1)], (6, 2))):
        inputs = LayerInput(Step(rows, 16, device=DEVICE), heads, 16)
        ours, _ = inputs.attend(backend, layer)
        torch.testing.assert_close(ours.cpu().double(), inputs.attend_naively(layer)[0], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("num_decodes", [0, 1, 2, 5])
def test_block_tables_of_both_kinds_of_rows_begin_at_multiples_of_16_bytes(
    num_decodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each kernel is compiled twice, once for addresses that are no such multiple."""
    seen: dict[str, DecodeRows | PrefillRows] = {}
    monkeypatch.setattr(triton_backend, "decode", lambda rows, *_: seen.update(decode=rows))
    monkeypatch.setattr(triton_backend, "prefill", lambda rows, *_: seen.update(prefill=rows))
    step = Step([(5, 3), *[(40, 1)] * num_decodes, (90, 2)], 16, device=DEVICE)
    width = step.metadata.block_tables.shape[1]
    assert width % 4 != 0

    LayerInput(step, (2, 1), 16).attend(TritonAttentionBackend(1), AttentionLayer(0.25))

    chunk_rows = [0, num_decodes + 1]
    expected = {"prefill": step.metadata.block_tables[chunk_rows]}
    if num_decodes:
        expected["decode"] = np.delete(step.metadata.block_tables, chunk_rows, axis=0)
    assert seen.keys() == expected.keys()
    for name, rows in seen.items():
        assert rows.block_tables.data_ptr() % 16 == 0
        assert np.array_equal(rows.block_tables.cpu().numpy(), expected[name])


@each_row(
    (128, 2, (9, 0), 3),
    (16, 2, (10, 0), 3),
    (129, 2, (9, 0), 2),
    (512, 2, (9, 0), 1),
    (128, 4, (9, 0), 2),
    (128, 2, (8, 0), 2),
    (128, 2, (8, 9), 2),
    (128, 2, (12, 0), 2),
)
def test_programs_of_a_multiprocessor(
    value_dim: int, itemsize: int, capability: tuple[int, int], expected: int
) -> None:
    assert resident_programs(value_dim, itemsize, capability) == expected <= MAX_RESIDENT_PROGRAMS


@each_row((1, 1, 1), (16, 1, 16), (20, 2, 10), (128, 8, 16), (17, 17, 1))
def test_groups_of_a_latent_cache(num_heads: int, num_groups: int, group: int) -> None:
    keys = torch.empty(1, 16, 1, 48)
    assert groups_of(num_heads, LayerCache(keys, keys, value_begin=16)) == (num_groups, group)


@each_row(*product([1, 4, 8, 32], [2, 92, 216, H200_PLACES]))
def test_splits_keep_a_device_busy_and_no_more(num_kv_heads: int, places: int) -> None:
    for num_rows in range(1, 600):
        splits = number_of_splits(num_rows, num_kv_heads, places)
        num_programs = num_rows * num_kv_heads * splits
        assert 1 <= splits <= MAX_SPLITS
        assert splits == 1 or num_programs <= 4 * places
        assert num_rows * num_kv_heads * MAX_SPLITS < 2 * places or num_programs > 1.5 * places


@each_row(
    # The longest tile's keys and the least programs of a multiprocessor: two, or as many as the keys allow.
    (16 // 8, 8, 32_768, 2.0),
    (1, 8, 32_768, 1.9),
    (3, 8, 8_192, 2.0),
    (1, 8, 1_024, 32 / 132),
    (17, 8, 32_768, 1.0),
    (1, 1, 255, 1 / 132),
)
def test_few_tiles_of_queries_split_their_keys(
    num_tiles: int, num_groups: int, num_keys: int, least_programs: float
) -> None:
    splits = number_of_prefill_splits(num_tiles, num_groups, num_keys, 132)
    num_programs = num_tiles * num_groups * splits
    assert num_programs >= least_programs * 132
    assert splits == 1 or num_programs <= MAX_WAVES * 132
    assert splits == 1 or num_keys / splits >= 256


def test_large_batches_are_not_split() -> None:
    assert number_of_splits(1, 8, H200_PLACES) == 45  # one wave, 0.91 full
    assert number_of_splits(32, 8, H200_PLACES) == 6
    assert number_of_splits(64, 8, H200_PLACES) == 3
    assert number_of_splits(128, 8, H200_PLACES) == 1
    assert number_of_splits(10_000, 8, H200_PLACES) == 1


def test_tiles_cover_every_token_once_and_the_longest_come_first() -> None:
    starts, lengths = np.array([5, 0, 90], np.int32), np.array([2, 7, 4], np.int32)

    tiles = query_tiles(starts, lengths, np.array([0, 3, 11]), 3)

    assert tiles.tolist() == [[2, 14, 1, 93], [2, 11, 3, 90], [0, 0, 2, 5], [1, 9, 1, 6], [1, 6, 3, 3], [1, 3, 3, 0]]


def needs(
    dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, capability: tuple[int, int] | None = (9, 0)
) -> AttentionNeeds:
    return AttentionNeeds(dtype, 32, 8, head_dim, [AttentionLayer(0.1, 20, 1.5)], capability)


@each_row(
    (needs(), None),
    (needs(torch.float32, 16, (8, 0)), None),
    (needs(torch.float16, 256, (12, 0)), None),
    (needs(capability=None), "it needs a CUDA device"),
    (needs(capability=(7, 5)), "it needs a device with compute capability 8.0 or more, not 7.5"),
    (needs(torch.float64), "it supports float32, bfloat16 and float16, not float64"),
    (needs(head_dim=8), "it supports head dimensions of 16 to 256, not 8"),
    (needs(head_dim=257), "it supports head dimensions of 16 to 256, not 257"),
)
def test_rules_name_what_is_wrong(asked: AttentionNeeds, problem: str | None) -> None:
    assert TritonRules().why_not(asked) == problem


def test_rules_of_block_sizes() -> None:
    rules = TritonRules()
    assert rules.why_not_block_size(rules.preferred_block_size) is None
    assert rules.why_not_block_size(256) is None
    for block_size in (0, 1, 8, 24, 272):
        problem = f"it supports block sizes that are multiples of 16 from 16 to 256, not {block_size}"
        assert rules.why_not_block_size(block_size) == problem
