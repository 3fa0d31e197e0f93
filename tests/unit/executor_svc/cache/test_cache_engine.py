"""Blocks keep every bit when they move, and moves keep their order."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from executor_svc.cache.cache_engine import CacheEngine, CacheShape
from octavo_shared.step_wire.step import Step, TableDelta, pairs
from tests.support.each_row import each_row

SHAPE = CacheShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def filled_engine(
    num_host_blocks: int = 4, device: str = "cpu", dtype: torch.dtype = torch.float32, is_one_piece: bool = False
) -> CacheEngine:
    shape = CacheShape(3, block_size=4, num_kv_heads=2, head_dim=8, dtype=dtype, is_one_piece=is_one_piece)
    engine = CacheEngine(shape, 6, num_host_blocks, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    for layer in engine.layers:
        for pool in (layer.keys, layer.values):
            pool.copy_(torch.randn(pool.shape, generator=generator))
        for scales in (layer.key_scales, layer.value_scales):
            if scales is not None:
                scales.copy_(torch.rand(scales.shape, generator=generator))
    engine.host_blocks.zero_()
    return engine


def contents(engine: CacheEngine) -> torch.Tensor:
    """Return all that attention sees of the blocks of sequences, [num_blocks, numbers]."""
    pools = [
        pool.float() if pool.itemsize == 1 else pool
        for layer in engine.layers
        for pool in (layer.keys, layer.values, layer.key_scales, layer.value_scales)
        if pool is not None
    ]
    return torch.cat([pool[:-1].flatten(1) for pool in pools], dim=1).cpu()


@pytest.mark.parametrize("max_staged_blocks", [1, 2, 64])
@pytest.mark.parametrize(
    ("dtype", "is_one_piece"),
    [
        *((torch.float32, True), (torch.float32, False), (torch.bfloat16, False), (torch.float16, True)),
        *((torch.int8, True), (torch.int8, False), (torch.float8_e4m3fn, True), (torch.float8_e5m2, False)),
    ],
)
def test_swapped_blocks_come_back_bit_for_bit(
    dtype: torch.dtype, is_one_piece: bool, max_staged_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_svc.cache.cache_engine.MAX_STAGED_BLOCKS", max_staged_blocks)
    engine = filled_engine(dtype=dtype, is_one_piece=is_one_piece)
    before = contents(engine)

    engine.move(Step(1, 1, TableDelta(), blocks_to_swap_out=pairs((0, 3), (4, 0), (2, 1))))
    engine.move(Step(1, 2, TableDelta(), blocks_to_swap_in=pairs((3, 5), (0, 1), (1, 0))))

    after = contents(engine)
    assert torch.equal(after[[5, 1, 0]], before[[0, 4, 2]])
    assert torch.equal(after[[2, 3, 4]], before[[2, 3, 4]])


@each_row(
    *((dtype, is_one_piece) for dtype in (torch.float32, torch.bfloat16, torch.int8) for is_one_piece in (True, False))
)
def test_the_content_of_blocks_is_that_of_another_cache_bit_for_bit_however_it_lies_there(
    dtype: torch.dtype, is_one_piece: bool
) -> None:
    engine, other = filled_engine(dtype=dtype, is_one_piece=is_one_piece), filled_engine(dtype=dtype)
    other_ids, before = np.array([1, 4, 0], np.int32), contents(other)

    content = engine.read_blocks(np.array([0, 3, 5], np.int32))
    other.write_blocks(other_ids, content)

    assert content.shape == (3, engine.block_bytes[0])
    assert torch.equal(contents(other)[[1, 4, 0]], contents(engine)[[0, 3, 5]])
    assert torch.equal(contents(other)[[2, 3, 5]], before[[2, 3, 5]])


def test_a_block_is_one_piece_of_memory_where_that_is_asked_for() -> None:
    engine = filled_engine(is_one_piece=True)
    pools = [pool for layer in engine.layers for pool in (layer.keys, layer.values)]
    block_bytes = pools[0][0].nbytes
    assert [pool[1].data_ptr() for pool in pools] == [pools[0][1].data_ptr() + i * block_bytes for i in range(6)]


def test_a_block_leaves_for_the_host_before_it_is_copied_over() -> None:
    engine = filled_engine()
    before = contents(engine)

    engine.move(Step(1, 1, TableDelta(), blocks_to_swap_out=pairs((1, 0)), blocks_to_copy=pairs((2, 1), (2, 3))))

    assert torch.equal(engine.host_blocks[0].flatten(), before[1])
    assert torch.equal(contents(engine)[[1, 3]], before[[2, 2]])


def test_a_block_is_copied_after_it_came_from_the_host() -> None:
    engine = filled_engine()
    before = contents(engine)
    engine.move(Step(1, 1, TableDelta(), blocks_to_swap_out=pairs((1, 0))))

    engine.move(Step(1, 2, TableDelta(), blocks_to_swap_in=pairs((0, 4)), blocks_to_copy=pairs((4, 5))))

    assert torch.equal(contents(engine)[[4, 5]], before[[1, 1]])


def test_a_step_without_moves_and_an_engine_without_a_host_pool_change_nothing() -> None:
    engine = filled_engine(num_host_blocks=0)
    before = contents(engine)

    engine.move(Step(1, 1, TableDelta()))

    assert torch.equal(contents(engine), before)
    assert len(engine.host_blocks) == 0


@each_row(
    (torch.float32, 8, 3 * 2 * 64 * 4),
    (torch.bfloat16, 8, 3 * 2 * 64 * 2),
    (torch.float16, 8, 3 * 2 * 64 * 2),
    (torch.int8, 8, 3 * 2 * (64 + 8 * 4)),
    (torch.float8_e4m3fn, 8, 3 * 2 * 64),
    (torch.float8_e5m2, 8, 3 * 2 * 64),
    (torch.int8, 1, 3 * 2 * (8 + 8 * 4)),
)
def test_a_block_has_the_bytes_of_keys_values_and_scales_of_all_layers(
    dtype: torch.dtype, head_dim: int, num_bytes: int
) -> None:
    shape = CacheShape(3, 4, 2, head_dim, dtype)
    for is_one_piece in (False, True):
        engine = CacheEngine(replace(shape, is_one_piece=is_one_piece), 1, 1, torch.device("cpu"))
        assert engine.host_blocks[0].nbytes == shape.bytes_per_block == num_bytes
        assert engine.layers[0].keys.shape == (2, 4, 2, head_dim)
        assert engine.layers[0].keys.dtype == dtype


def test_scales_begin_where_a_number_of_four_bytes_may() -> None:
    shape = CacheShape(1, 3, 1, 5, torch.int8)  # 15 elements
    engine = CacheEngine(shape, 2, 0, torch.device("cpu"))
    assert shape.bytes_per_block == 2 * (16 + 3 * 4)
    scales = engine.layers[0].key_scales
    assert scales is not None
    assert scales.shape == (3, 1, 3)
    assert scales.data_ptr() == engine.layers[0].keys.data_ptr() + 16


def test_scales_are_copied_with_their_block() -> None:
    engine = filled_engine(dtype=torch.int8, is_one_piece=True)
    before = contents(engine)

    engine.move(Step(1, 1, TableDelta(), blocks_to_copy=pairs((2, 1), (2, 3))))

    assert torch.equal(contents(engine)[[1, 3]], before[[2, 2]])


class RecordedOrder:
    """Notes what swaps and computation wait for."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def beside_compute(self) -> Iterator[None]:
        self.events.append("swaps wait for nothing")
        yield
        self.events.append("swaps end")

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        self.events.append("swaps wait for compute")
        yield
        self.events.append("swaps end")

    def hold_compute(self) -> None:
        self.events.append("compute waits for swaps")

    def hold_swaps(self) -> None:
        self.events.append("swaps wait for compute")


def test_computation_waits_for_swaps_and_swaps_for_computation_only_where_blocks_are_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = RecordedOrder()
    monkeypatch.setattr("executor_svc.cache.cache_engine.swap_stream", lambda _: order)
    monkeypatch.setattr("executor_svc.cache.cache_engine.BlocksInMemory", type(None))  # as on a GPU
    engine = filled_engine()

    engine.move(Step(1, 1, TableDelta(), blocks_to_swap_out=pairs((1, 0), (2, 1))))
    engine.move(Step(1, 2, TableDelta(), blocks_to_swap_in=pairs((0, 4), (1, 5))))

    # Blocks that leave are read behind their last write, and may be written again as soon as they were read.
    assert order.events[:3] == ["swaps wait for compute", "compute waits for swaps", "swaps end"]
    # Blocks that return cross while earlier steps compute; what is computed from then on waits.
    assert order.events[3:] == [
        "swaps wait for nothing",
        "swaps end",
        "compute waits for swaps",
        "swaps wait for compute",  # staging is theirs again
    ]


@pytest.mark.gpu
def test_a_host_pool_beside_a_gpu_is_pinned_and_keeps_every_bit() -> None:
    engine = filled_engine(device="cuda")
    before = contents(engine)

    engine.move(Step(1, 1, TableDelta(), blocks_to_swap_out=pairs((0, 3), (4, 0))))
    engine.move(Step(1, 2, TableDelta(), blocks_to_swap_in=pairs((3, 5), (0, 1))))

    assert engine.host_blocks.is_pinned()
    assert torch.equal(contents(engine)[[5, 1]], before[[0, 4]])
