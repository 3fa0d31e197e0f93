"""A query attends to the same bits whatever the chunk, the batch, the block size and the device's size.

The interpreter shows that tiles, splits and the order of folds are the row's own, with a product that adds up each row
alike (`products.py`). That decodes and chunks are one machine code is in `test_compiled_kernels.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.attention import invariant_triton_backend
from executor_svc.attention.cache_format import CACHE_DTYPES
from executor_svc.attention.interface import (
    AttentionLayer,
    AttentionMetadata,
    DecodeBatch,
    DecodePlanner,
    LayerCache,
    Rotation,
)
from executor_svc.attention.invariant_triton_backend import InvariantAttentionBackend
from executor_svc.attention.key_value_write import write_in_torch
from executor_svc.cache.cache_engine import CacheShape
from executor_svc.triton_kernels import invariant_attention
from executor_svc.triton_kernels.tiles import SPLIT_KEYS, invariant_tile, pad
from tests.kernels.device import DEVICE, SLOW_IF_INTERPRETED
from tests.kernels.products import add_up_rows_alike
from tests.numerics.attention import LayerInput, Step, biases_of

LENGTH = 80
HEADS, HEAD_DIM = (2, 1), 16
NEIGHBOURS = (70, 20)  # lengths of the sequences that may share a step


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of 80 tokens have two splits, one of two tiles."""
    add_up_rows_alike(monkeypatch)
    set_split_keys(monkeypatch, 64)


def set_split_keys(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for module in (invariant_attention, invariant_triton_backend):
        monkeypatch.setattr(module, "SPLIT_KEYS", number)


@dataclass(frozen=True)
class Schedule:
    """How the tokens of our sequence come to be computed."""

    chunks: tuple[int, ...]  # tokens of each step; together LENGTH
    block_size: int = 16
    has_neighbours: bool = False
    num_multiprocessors: int = 1
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: as `dtype`


WHOLE = Schedule((LENGTH,))


def tokens_of(length: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, Rotation]:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(length, HEADS[0] + 2 * HEADS[1], HEAD_DIM, generator=generator).to(DEVICE, dtype)
    angles = 6 * torch.rand(length, HEAD_DIM // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    parts = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    return qkv, Rotation(*(part.to(DEVICE, dtype) for part in parts))


def attended(schedule: Schedule, layer: AttentionLayer, backend: Any = None) -> torch.Tensor:
    """Return what the tokens of our sequence attended to, [LENGTH, num_heads * head_dim], step by step."""
    backend = backend or InvariantAttentionBackend(schedule.num_multiprocessors)
    lengths = (NEIGHBOURS[0], LENGTH, NEIGHBOURS[1]) if schedule.has_neighbours else (LENGTH,)
    ours = 1 if schedule.has_neighbours else 0
    sequences = [tokens_of(length, seed=length, dtype=schedule.dtype) for length in lengths]
    size = schedule.block_size
    num_blocks = [-(-length // size) for length in lengths]
    blocks = np.random.default_rng(size).permutation(sum(num_blocks) + 1).astype(np.int32)
    tables = np.full((len(lengths), max(num_blocks)), blocks[-1])
    for row, (begin, number) in enumerate(zip(np.cumsum([0, *num_blocks]), num_blocks, strict=False)):
        tables[row, :number] = blocks[begin : begin + number]
    shape = CacheShape(1, size, HEADS[1], HEAD_DIM, schedule.cache_dtype or schedule.dtype)
    pools = torch.empty(2, len(blocks), *shape.pool_shape, dtype=shape.pool_dtype, device=DEVICE)
    pools.view(torch.uint8).fill_(0xFF)  # what nobody wrote is no number
    (cache,) = shape.layer_caches(list(pools), [(0.25, 4.0)])
    results = []
    position = 0
    for index, count in enumerate(schedule.chunks):
        rows = [(position, count)]
        if schedule.has_neighbours:  # one decodes beside ours, one is a chunk; they begin anew when they are through
            rows = [(index * 37 % 60, 1 + 9 * (index % 2)), rows[0], (index * 11 % 19, 1)]
            for row, (start, _) in enumerate(rows):
                if row != ours:  # its past
                    fill_cache(cache, sequences[row], tables[row], start, size)
        results.append(step_of(backend, rows, sequences, tables, cache, layer)[ours])
        position += count
    assert position == LENGTH
    return torch.cat(results)


def fill_cache(
    cache: LayerCache, sequence: tuple[torch.Tensor, Rotation], table: np.ndarray, end: int, size: int
) -> None:
    positions = np.arange(end)
    slots = torch.from_numpy(table[positions // size].astype(np.int64) * size + positions % size).to(DEVICE)
    write_in_torch(sequence[0][:end, HEADS[0] :], None, slots, cache)


def step_of(
    backend: Any,
    rows: Sequence[tuple[int, int]],
    sequences: Sequence[tuple[torch.Tensor, Rotation]],
    tables: np.ndarray,
    cache: LayerCache,
    layer: AttentionLayer,
) -> list[torch.Tensor]:
    """Return what the tokens of each row attend to in one step."""
    size = cache.block_size
    slots, qkv, cos, sin = [], [], [], []
    for (start, count), (tokens, rotation), table in zip(rows, sequences, tables, strict=True):
        positions = np.arange(start, start + count)
        slots.append(table[positions // size].astype(np.int64) * size + positions % size)
        qkv.append(tokens[start : start + count])
        cos.append(rotation.cos[start : start + count])
        sin.append(rotation.signed_sin[start : start + count])
    starts, counts = np.array(rows, np.int32).T.copy()
    mapping = torch.from_numpy(np.concatenate(slots)).to(DEVICE)
    width = -(-int((starts + counts).max()) // size)
    plan = backend.plan(AttentionMetadata(starts, counts, tables[:, :width].copy(), mapping), cache)
    output = plan.attend(torch.cat(qkv), Rotation(torch.cat(cos), torch.cat(sin)), cache, layer)
    return list(output.split(counts.tolist()))


LAYERS = {
    "plain": AttentionLayer(0.25),
    "window": AttentionLayer(0.25, 40),
    "all": AttentionLayer(0.4, 70, 1.5, (0.5, 0.1), torch.tensor([0.5, 3.0], device=DEVICE), biases_of(2, 30, DEVICE)),
}
SCHEDULES = {
    "all at once": Schedule((63, 7, 1, 1, 8), block_size=48, has_neighbours=True, num_multiprocessors=32),
    "64, then the rest": Schedule((64, 16)),
    "7 at a time": Schedule((*[7] * 11, 3)),
    "one at a time": Schedule((1,) * LENGTH),
    "one at a time, a program for each split": Schedule((1,) * LENGTH, num_multiprocessors=32),
    "neighbours": Schedule((30, 40, *[1] * 10), has_neighbours=True),
    "blocks of 48": Schedule((61, 1, 1, 1, 16), block_size=48),
    "bfloat16": Schedule((61, 1, 1, 1, 16), dtype=torch.bfloat16),
    **{
        f"cache {name}": Schedule((33, 30, 1, 16), 48, True, 32, cache_dtype=CACHE_DTYPES[name])
        for name in ("int8", "fp8_e4m3")
    },
}


QUICK = {("all", "all at once"), ("all", "cache int8"), ("plain", "cache fp8_e4m3")}


@pytest.mark.parametrize(
    ("layer", "schedule"),
    [
        pytest.param(layer, schedule, marks=() if (layer, schedule) in QUICK else SLOW_IF_INTERPRETED)
        for layer in LAYERS
        for schedule in SCHEDULES
    ],
)
def test_no_schedule_changes_a_bit(layer: str, schedule: str) -> None:
    ours = SCHEDULES[schedule]
    whole = attended(Schedule((LENGTH,), dtype=ours.dtype, cache_dtype=ours.cache_dtype), LAYERS[layer])

    assert torch.equal(attended(ours, LAYERS[layer]), whole)


@pytest.mark.parametrize("num_keys", [pytest.param(32, marks=SLOW_IF_INTERPRETED)])
def test_splits_that_follow_the_batch_are_found(num_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above must notice: splits of another length are another order of sums."""
    whole = attended(WHOLE, LAYERS["plain"])
    set_split_keys(monkeypatch, num_keys)

    assert not torch.equal(attended(WHOLE, LAYERS["plain"]), whole)


@pytest.mark.parametrize(
    ("num_multiprocessors", "value_begin"), [(1, 0), pytest.param(32, 0, marks=SLOW_IF_INTERPRETED), (32, 2)]
)
def test_it_is_attention(num_multiprocessors: int, value_begin: int) -> None:
    rows = [(3, 1), (0, 2), (62, 4)]
    layer = AttentionLayer(0.4, 60, 1.5, (0.5, 0.1), torch.tensor([0.5, 3.0], device=DEVICE))
    inputs = LayerInput(Step(rows, 16, layer.window_tokens, DEVICE), HEADS, 18, value_begin=value_begin)

    ours, _ = inputs.attend(InvariantAttentionBackend(num_multiprocessors), layer)

    naive, _ = inputs.attend_naively(layer)
    torch.testing.assert_close(ours.cpu().double(), naive, rtol=1e-5, atol=5e-6)


def test_a_decode_plan_sees_what_its_tensors_hold_later() -> None:
    """A graph is replayed with other rows in the same tensors."""
    backend, layer = InvariantAttentionBackend(4), AttentionLayer(0.25)
    first, second = (Step(rows, 16, device=DEVICE) for rows in ([(70, 1), (1, 1)], [(3, 1), (70, 1)]))
    inputs = LayerInput(second, HEADS, 16)
    expected, _ = inputs.attend(backend, layer)
    cache = LayerCache(inputs.keys.clone(), inputs.values.clone())
    visible, slots = (first.metadata.starts + 1, second.metadata.starts + 1), first.metadata.slot_mapping.clone()
    tensors = torch.from_numpy(visible[0]).to(DEVICE)
    tables = torch.zeros(2, 10, dtype=torch.int32, device=DEVICE)
    plan = backend.decode_plan(DecodeBatch(tensors, tables, slots), cache)

    tensors.copy_(torch.from_numpy(visible[1]))
    slots.copy_(second.metadata.slot_mapping)
    later = torch.from_numpy(second.metadata.block_tables).to(DEVICE)
    tables[:, : later.shape[1]] = later

    assert isinstance(backend, DecodePlanner)
    assert torch.equal(plan.attend(inputs.qkv.clone(), inputs.rotation, cache, layer), expected)


class Launches:
    """Stands for a kernel: keeps what it is launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.constants: set[tuple[tuple[str, Any], ...]] = set()
        self.arguments: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> "Launches":
        self.grids.append(grid)
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        self.arguments.append(arguments)
        self.constants.add(tuple(sorted(constants.items())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 2), 64), ((32, 1), 128), ((71, 1), 64)])
def test_only_the_shape_of_the_model_chooses_tiles(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over random batches and devices of several sizes: one set of constants, hence one machine code."""
    set_split_keys(monkeypatch, SPLIT_KEYS)
    attend, fold = Launches(), Launches()
    monkeypatch.setattr(invariant_attention, "attend_kernel", attend)
    monkeypatch.setattr(invariant_attention, "fold_kernel", fold)

    def no_write(qkv: torch.Tensor, *_: Any) -> Any:
        return SimpleNamespace(query=qkv[:, : heads[0]])

    monkeypatch.setattr(invariant_triton_backend, "write_in_triton", no_write)
    rng = np.random.default_rng(0)
    pool = torch.empty(1, 16, heads[1], head_dim, dtype=dtype)
    for _ in range(100):
        num_rows = int(rng.integers(1, 40))
        starts = rng.integers(0, 20_000, num_rows).astype(np.int32)
        lengths = np.where(rng.random(num_rows) < 0.5, 1, rng.integers(1, 50, num_rows)).astype(np.int32)
        tables = np.zeros((num_rows, -(-int((starts + lengths).max()) // 16)), np.int32)
        backend = InvariantAttentionBackend(int(rng.choice([1, 46, 108, 132])))
        plan = backend.plan(
            AttentionMetadata(starts, lengths, tables, torch.zeros(1, dtype=torch.int64)), LayerCache(pool, pool)
        )
        qkv = torch.empty(int(lengths.sum()), heads[0] + 2 * heads[1], head_dim, dtype=dtype)
        plan.attend(qkv, None, LayerCache(pool, pool), AttentionLayer(0.1))

    assert len(attend.constants) == len(fold.constants) == 1
    constants = dict(next(iter(attend.constants)))
    shape = invariant_tile(head_dim, heads[0] // heads[1], dtype.itemsize)
    assert constants["TILE_QUERIES"] == shape.num_queries >= pad(heads[0] // heads[1])
    assert constants["SPLIT_KEYS"] == SPLIT_KEYS
    assert SPLIT_KEYS % constants["TILE_KEYS"] == 0
    assert constants["enable_fp_fusion"] is False
    assert {grid[2] for grid in attend.grids} > {1}, "both ways to share splits out were planned"
    for grid, arguments in zip(attend.grids, attend.arguments, strict=True):
        outputs, scores, (num_programs, num_splits, tile_tokens) = arguments[12], arguments[13], arguments[17:20]
        assert grid[2] == num_programs
        if num_programs > 1:
            assert num_splits > int(arguments[9].max()) // SPLIT_KEYS
            assert int(arguments[8].max()) <= tile_tokens
            num_states = grid[1] * tile_tokens * heads[0] * num_splits
            assert (len(outputs) >= num_states * head_dim, len(scores) >= num_states * 2) == (True, True)


def test_the_room_for_states_grows_by_doubling() -> None:
    """Contexts that grow split by split would else leave a heap of outgrown rooms."""
    memory = invariant_triton_backend.SplitMemory(264, torch.device("cpu"))
    taken = [memory.take(1, 1, 8, 4, 16, num_positions) for num_positions in range(64, 64 * 60, 64)]
    assert len({states.outputs.data_ptr() for states in taken}) <= 6
    assert all(states.num_splits > index + 1 for index, states in enumerate(taken))
    assert memory.take(1, 1, 8, 4, 16, 128).outputs.data_ptr() == taken[-1].outputs.data_ptr()


def test_few_tiles_of_a_prompt_are_shared_out_unless_their_states_take_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_split_keys(monkeypatch, SPLIT_KEYS)
    memory = invariant_triton_backend.SplitMemory(264, torch.device("cpu"))
    behind_32k = memory.take(4, 16, 8, 4, 128, 32_768)  # 64 tokens
    assert 4 * 8 * behind_32k.num_programs >= 2 * 132
    assert behind_32k.outputs.nbytes <= invariant_triton_backend.MAX_STATE_BYTES
    assert memory.take(4, 16, 8, 4, 128, 131_072).num_programs == 1
    assert memory.take(40, 16, 8, 4, 128, 32_768).num_programs == 1


@pytest.mark.parametrize("window", [None, 20])
def test_many_programs_of_a_prompt_change_no_bit(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last query of a tile begin to see in other splits."""
    set_split_keys(monkeypatch, 32)
    layer = AttentionLayer(0.3, window)
    alone = attended(WHOLE, layer)
    shared = attended(Schedule((41, 39), num_multiprocessors=132), layer)
    assert torch.equal(alone, shared)
