"""The C attention equals the torch one on a cache full of NaN, whatever the shapes and the block tables."""

import numpy as np
import pytest
import torch

from executor_svc.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    LayerCache,
    Rotation,
    TorchAttentionBackend,
)
from executor_svc.attention.native_backend import MIN_SPLIT_KEYS, NativeAttentionBackend, query_tiles, split_keys
from executor_svc.models.config import RopeConfig
from executor_svc.models.rotary import inverse_frequencies, rotations
from tests.numerics.native import LANES, native_library

DECODES = [(0, 1), (1, 1), (7, 1), (95, 1), (96, 1), (97, 1), (130, 1)]
CHUNKS = [(0, 2), (0, 33), (5, 3), (90, 40), (200, 2)]


class Case:
    """Sequences of which (computed, new) tokens are given, in a cache of scattered blocks that is NaN elsewhere."""

    def __init__(self, rows: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, block_size: int) -> None:
        rng = np.random.default_rng(3)
        generator = torch.Generator().manual_seed(3)
        starts, lengths = np.array(rows, np.int32).T.copy()
        num_blocks = -(-(starts + lengths) // block_size)
        free = rng.permutation(int(num_blocks.sum()) + 3).astype(np.int32)
        tables = np.full((len(rows), num_blocks.max()), free[-1], np.int32)  # beyond a row's blocks: any block
        for row, number in enumerate(num_blocks):
            tables[row, :number], free = free[:number], free[number:]
        self.num_heads, self.num_kv_heads = heads
        shape = (int(num_blocks.sum()) + 3, block_size, self.num_kv_heads, head_dim)
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        positions, slots = [], []
        for row, (start, length) in enumerate(rows):
            for position in range(start + length):
                slot = int(tables[row, position // block_size]) * block_size + position % block_size
                if position >= start:
                    positions.append(position)
                    slots.append(slot)
                else:
                    for pool in (self.keys, self.values):
                        pool.flatten(0, 1)[slot] = torch.randn(shape[2:], generator=generator)
        self.metadata = AttentionMetadata(starts, lengths, tables, torch.tensor(slots))
        self.qkv = torch.randn(len(slots), self.num_heads + 2 * self.num_kv_heads, head_dim, generator=generator)
        self.rotation: Rotation = rotations(
            torch.tensor(positions), inverse_frequencies(RopeConfig(10_000.0), head_dim), torch.float32
        )

    def attend(self, backend: AttentionBackend) -> tuple[torch.Tensor, LayerCache]:
        cache = LayerCache(self.keys.clone(), self.values.clone())
        return backend.plan(self.metadata, cache).attend(
            self.qkv.clone(), self.rotation, cache, AttentionLayer(self.qkv.shape[2] ** -0.5)
        ), cache


def check(case: Case, lanes: str) -> None:
    ours, our_cache = case.attend(NativeAttentionBackend(native_library(lanes)))
    theirs, their_cache = case.attend(TorchAttentionBackend())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)
    for our_pool, their_pool in ((our_cache.keys, their_cache.keys), (our_cache.values, their_cache.values)):
        torch.testing.assert_close(our_pool, their_pool, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 128])
def test_every_block_size(block_size: int, lanes: str) -> None:
    for rows in (DECODES, CHUNKS, DECODES + CHUNKS):
        check(Case(rows, (6, 2), 16, block_size), lanes)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 71])
def test_every_number_of_query_heads_for_a_kv_head(group: int, lanes: str) -> None:
    for num_kv_heads in (1, 3):
        check(Case(DECODES + CHUNKS, (group * num_kv_heads, num_kv_heads), 8, 16), lanes)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("head_dim", [2, 6, *range(8, 129, 8), 192, 256])
def test_every_head_dim(head_dim: int, lanes: str) -> None:
    check(Case([(0, 1), (50, 1), (0, 20), (97, 9)], (4, 2), head_dim, 16), lanes)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("rows", [[(2_000, 1)], [(1_500, 40)], [(2_000, 1), (3, 1), (0, 1)], [(0, 700)]])
def test_a_long_context_is_split_over_the_threads(rows: list[tuple[int, int]], lanes: str) -> None:
    check(Case(rows, (4, 2), 16, 16), lanes)


def test_large_scores_do_not_overflow() -> None:
    case = Case(DECODES + CHUNKS, (4, 2), 16, 16)
    case.qkv.mul_(100)

    for lanes in LANES:
        ours, _ = case.attend(NativeAttentionBackend(native_library(lanes)))
        theirs, _ = case.attend(TorchAttentionBackend())
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_tiles_cover_every_token_once() -> None:
    starts, lengths = np.array([5, 0, 9], np.int32), np.array([1, 7, 4], np.int32)

    tiles = query_tiles(starts, lengths, 3)

    assert tiles[:, :4].tolist() == [
        [0, 0, 1, 5],
        [1, 1, 3, 0],
        [1, 4, 3, 3],
        [1, 7, 1, 6],
        [2, 8, 2, 9],
        [2, 10, 2, 11],
    ]


def test_keys_are_split_where_one_tile_is_most_of_the_work() -> None:
    tiles = query_tiles(np.array([10_000, 100, 200], np.int32), np.array([1, 1, 1], np.int32), 16)

    tasks = split_keys(tiles, num_wanted=4)

    assert tiles[:, 4].tolist() == [4, 1, 1]
    assert tasks.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [2, 0]]


def test_short_contexts_are_not_split() -> None:
    tiles = query_tiles(np.array([2 * MIN_SPLIT_KEYS - 2], np.int32), np.array([1], np.int32), 16)

    assert split_keys(tiles, num_wanted=8).tolist() == [[0, 0]]
