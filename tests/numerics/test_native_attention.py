"""The C attention equals the torch one on a cache full of NaN, whatever the layer, the shapes and the block tables."""

import ctypes
import itertools
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from executor_svc.attention.interface import AttentionLayer, LayerCache
from executor_svc.attention.native_backend import NativeAttentionBackend, NativeAttentionPlan
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.models.families.common import alibi_slopes
from executor_svc.models.pooling import ScratchCache, text_rows
from executor_svc.native.library import NativeLibrary
from executor_svc.native.structs import StepStruct
from tests.numerics.attention import CHUNKS, DECODES, LayerInput, Rows, Step, biases_of, sinks_of
from tests.numerics.native import LANES, library_path, native_library
from tests.support.each_row import each_row

ALL = [*DECODES, *CHUNKS]


def check(inputs: LayerInput, lanes: str, layer: AttentionLayer, *, rtol: float = 1e-5, atol: float = 5e-6) -> None:
    ours, our_cache = inputs.attend(NativeAttentionBackend(native_library(lanes)), layer)
    theirs, their_cache = inputs.attend(TorchAttentionBackend(), layer)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    for our_pool, their_pool in ((our_cache.keys, their_cache.keys), (our_cache.values, their_cache.values)):
        torch.testing.assert_close(our_pool, their_pool, rtol=1e-5, atol=1e-6, equal_nan=True)


def check_shapes(rows: Rows, heads: tuple[int, int], head_dim: int, block_size: int, lanes: str) -> None:
    """Compare a plain layer, and one with every option."""
    check(LayerInput(Step(rows, block_size), heads, head_dim), lanes, AttentionLayer(head_dim**-0.5))
    biases = biases_of(heads[0], 30)
    layer = AttentionLayer(head_dim**-0.5, 40, 1.5, alibi_slopes(heads[0]), sinks_of(heads[0]), biases)
    check(LayerInput(Step(rows, block_size, 40), heads, head_dim), lanes, layer)


@each_row(1, 3, 20, 24, 40, 128)
def test_every_block_size(block_size: int) -> None:
    """Also those that half a vector divides, and a whole one does not."""
    for rows, lanes in product((DECODES, CHUNKS, ALL), LANES):
        check_shapes(rows, (6, 2), 16, block_size, lanes)


@each_row(*product(LANES, [1, 2, 3, 4, 5, 6, 7, 8, 9, 71]))
def test_every_number_of_query_heads_for_a_kv_head(lanes: str, group: int) -> None:
    for num_kv_heads in (1, 3):
        check_shapes(ALL, (group * num_kv_heads, num_kv_heads), 8, 16, lanes)


@each_row(*product(LANES, [2, 6, *range(8, 129, 8), 192, 256]))
def test_every_head_dim(lanes: str, head_dim: int) -> None:
    check_shapes([(0, 1), (50, 1), (0, 20), (97, 9)], (4, 2), head_dim, 16, lanes)


@each_row(
    *product(LANES, [True, False], [False, True], [False, True], [None, 1.5], [None, 1, 2, 16, 95, 96, 97, 1_000])
)
def test_every_combination(
    lanes: str, is_rotated: bool, has_alibi: bool, has_sinks: bool, soft_cap: float | None, window: int | None
) -> None:
    slopes, sinks = alibi_slopes(6) if has_alibi else None, sinks_of(6) if has_sinks else None
    layer = AttentionLayer(0.7, window, soft_cap, slopes, sinks)
    check(LayerInput(Step(ALL, 16, window), (6, 2), 16, is_rotated=is_rotated), lanes, layer)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("block_size", [5, 16])
def test_a_window_begins_anywhere_in_a_block(block_size: int, lanes: str) -> None:
    rows = [(200 + offset, 1) for offset in range(block_size)] + [(100 + offset, 7) for offset in range(block_size)]
    for window in (*range(1, 2 * block_size + 2), 96 + block_size, 192, 202):
        check(LayerInput(Step(rows, block_size, window), (2, 1), 8), lanes, AttentionLayer(0.25, window))


@each_row(*product(LANES, [1, 5, 33]))
def test_without_rotation_the_number_of_dimensions_may_be_odd(lanes: str, head_dim: int) -> None:
    check(LayerInput(Step(ALL, 16), (4, 2), head_dim, is_rotated=False), lanes, AttentionLayer(0.25))


@each_row(*product(LANES, [(8, 2), (20, 6), (40, 34), (128, 96)], [torch.float32, torch.int8]))
def test_part_of_a_head(lanes: str, sizes: tuple[int, int], cache_dtype: torch.dtype) -> None:
    head_dim, rotary_dim = sizes
    inputs = LayerInput(Step(ALL, 16), (4, 2), head_dim, rotary_dim=rotary_dim, cache_dtype=cache_dtype)
    ours, theirs = (
        inputs.attend(backend, AttentionLayer(0.25))[0]
        for backend in (NativeAttentionBackend(native_library(lanes)), TorchAttentionBackend())
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)


@each_row(*product(LANES, [None, 300, 1_000], [[(2_000, 1)], [(1_500, 40)], [(2_000, 1), (3, 1), (0, 1)], [(0, 700)]]))
def test_a_long_context_is_split_over_the_threads(lanes: str, window: int | None, rows: Rows) -> None:
    inputs = LayerInput(Step(rows, 16, window), (4, 2), 16)
    for soft_cap, slopes, sinks in itertools.product((None, 1.5), (None, alibi_slopes(4)), (None, sinks_of(4))):
        check(inputs, lanes, AttentionLayer(0.25, window, soft_cap, slopes, sinks))
    for num_distances in (1, 129):
        check(inputs, lanes, AttentionLayer(0.25, window, distance_biases=biases_of(4, num_distances)))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("windows", "gone_window"), [((16, 40, 16), 40), ((None, 16, 150, None), None)])
def test_layers_of_one_plan_attend_each_in_its_own_way(
    windows: tuple[int | None, ...], gone_window: int | None, lanes: str
) -> None:
    step = Step([*ALL, (600, 1)], 16, gone_window)
    all_slopes, all_sinks = (None, alibi_slopes(4), (0.3, 0.2, 0.1, 0.0)), (None, sinks_of(4), sinks_of(5)[1:])
    kinds = list(itertools.product(windows, (None, 1.5), all_slopes, (True, False), all_sinks))
    layers = [AttentionLayer(0.25, window, soft_cap, slopes, sinks) for window, soft_cap, slopes, _, sinks in kinds]
    layers[::3] = [replace(layer, distance_biases=biases_of(4, 50 + seed)) for seed, layer in enumerate(layers[::3])]
    inputs = [LayerInput(step, (4, 2), 8, is_rotated=kind[3], seed=seed) for seed, kind in enumerate(kinds)]
    caches = [LayerCache(each.keys.clone(), each.values.clone()) for each in inputs]

    plan = NativeAttentionBackend(native_library(lanes)).plan(step.metadata, caches[0])

    for each, cache, layer in zip(inputs, caches, layers, strict=True):
        ours = plan.attend(each.qkv.clone(), each.rotation, cache, layer)
        theirs, _ = each.attend(TorchAttentionBackend(), layer)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)


@each_row(*product(LANES, [None, 50.0], [None, sinks_of(4)]))
def test_large_scores_do_not_overflow(lanes: str, soft_cap: float | None, sinks: torch.Tensor | None) -> None:
    inputs = LayerInput(Step(ALL, 16), (4, 2), 16)
    inputs.qkv.mul_(100)

    layer = AttentionLayer(0.25, soft_cap=soft_cap, sinks=sinks)
    ours, _ = inputs.attend(NativeAttentionBackend(native_library(lanes)), layer)
    theirs, _ = inputs.attend(TorchAttentionBackend(), layer)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@each_row(*product(LANES, [1e-3, 0.1, 1.0, 10.0, 1e4]))
def test_soft_caps_of_every_size(lanes: str, soft_cap: float) -> None:
    """Scores of about 4: from all at the cap to none near it."""
    check(LayerInput(Step(ALL, 16), (4, 2), 16), lanes, AttentionLayer(1.0, soft_cap=soft_cap), rtol=2e-5, atol=1e-5)


PART_KEYS = 384  # positions of a part of the keys


def planned(
    starts: list[int], lengths: list[int], heads: tuple[int, int], window: int = 20_000, head_dim: int = 257
) -> list[list[int]]:
    """Return the tiles of a step, columns as in `QueryTile` but the last, then its tasks, with NUM_THREADS threads."""
    library, rows = native_library("widest"), [np.array(values, np.int32) for values in (starts, lengths)]
    step = StepStruct(num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, window=window)
    memory = library.plan_attention(step, np.arange(len(starts), dtype=np.int32), *rows)
    tiles, tasks = (
        np.ctypeslib.as_array((ctypes.c_int32 * (count * width)).from_address(address)).reshape(count, width)
        for address, count, width in ((step.tiles, step.num_tiles, 7), (step.tasks, step.num_tasks, 3))
    )
    assert step.most_tokens == max(tile[2] for tile in tiles)
    assert step.num_partials == sum(tile[4] for tile in tiles)
    # Without parts a late thread may still attend when others are at a later layer: nothing that it writes is shared.
    assert bool(library._library.octavo_attention_scratch_bytes(ctypes.byref(step))) == bool(step.num_partials)
    assert memory.num_bytes >= 28 * len(tiles) + 12 * len(tasks)
    assert all(tile[6] == tile[3] + tile[2] for tile in tiles)  # its last token is the last that it sees
    return [*(tile[:6].tolist() for tile in tiles), *tasks.tolist()]


def test_tiles_cover_every_token_once() -> None:
    assert planned([5, 0, 9], [1, 7, 4], heads=(32, 1)) == [  # 3 tokens a tile
        *([0, 0, 1, 5, 0, 0], [1, 1, 3, 0, 0, 0], [1, 4, 3, 3, 0, 0]),
        *([1, 7, 1, 6, 0, 0], [2, 8, 2, 9, 0, 0], [2, 10, 2, 11, 0, 0]),
        *([tile, 0, 0] for tile in (5, 4, 2, 1, 3, 0)),  # the largest first
    ]


def test_long_chunks_have_large_tiles_and_short_ones_busy_threads() -> None:
    def tile_sizes(length: int) -> list[int]:
        return [tile[2] for tile in planned([0], [length], heads=(9, 3)) if len(tile) == 6]

    assert tile_sizes(1_000) == [125] * 8  # up to 384 queries
    assert tile_sizes(256) == [64] * 4  # as many as tasks are wanted
    assert tile_sizes(33) == [17, 16]  # no fewer than 96 queries


def test_keys_are_split_where_one_tile_is_most_of_the_work() -> None:
    assert planned([1_200, 100, 200], [1, 1, 1], heads=(24, 3)) == [  # 4 tasks are wanted
        *([0, 0, 1, 1_200, 4, 0], [1, 1, 1, 100, 0, 0], [2, 2, 1, 200, 0, 0]),
        *([tile, part, head] for tile, parts in ((0, 4), (1, 1), (2, 1)) for part in range(parts) for head in range(3)),
    ]


@each_row((12, 64, [0]), (11, 64, [0, 1, 2]), (8, 128, [0, 2]), (7, 128, [0, 1, 2]), (100, 257, [0, 1, 2]))
def test_keys_of_several_heads_are_read_side_by_side_where_there_are_tasks_enough(
    num_rows: int, head_dim: int, heads_of_tasks: list[int]
) -> None:
    tasks = planned([100] * num_rows, [1] * num_rows, heads=(9, 3), head_dim=head_dim)[num_rows:]
    assert tasks == [[row, 0, head] for row in range(num_rows) for head in heads_of_tasks]


def test_keys_of_one_part_are_not_split() -> None:
    assert planned([PART_KEYS - 1], [1], heads=(2, 1))[1:] == [[0, 0, 0]]
    assert planned([PART_KEYS], [1], heads=(2, 1))[1:] == [[0, 0, 0], [0, 1, 0]]


def test_a_window_leaves_the_parts_that_it_touches() -> None:
    starts, lengths = [1_200, 3 * PART_KEYS - 1, 1_200], [1, 1, 300]
    planned_tiles = planned(starts, lengths, heads=(1, 1), window=PART_KEYS)[:3]
    assert [tile[4] for tile in planned_tiles[:2]] == [0, 0]  # work of one key beside 300 times as much
    assert planned_tiles[2][4] == 2
    assert [tile[4] for tile in planned(starts[:2], lengths[:2], heads=(1, 1), window=PART_KEYS)[:2]] == [2, 0]


EDGES = [0, 1, 15, 16, 95, 96, 97, 191, 192, 193, 287, 288, 383, 384, 385, 429]
PIECES: Rows = [(edge, 1) for edge in EDGES] + [(3, 7), (90, 10), (150, 64), (96, 96), (200, 129), (1, 429), (425, 5)]


class Sequence:
    """Random queries, keys and values of a sequence, and what a layer answers for any piece of it."""

    def __init__(self, num_tokens: int, heads: tuple[int, int], head_dim: int, layer: AttentionLayer) -> None:
        self.inputs = LayerInput(Step([(0, num_tokens)], 16), heads, head_dim)
        self.heads, self.head_dim, self.layer = heads, head_dim, layer

    def whole(self, library: NativeLibrary) -> torch.Tensor:
        """Return the output of each token, computed in one step; keep the keys and values."""
        output, cache = self.inputs.attend(NativeAttentionBackend(library), self.layer)
        slots = self.inputs.step.slots[0]
        self.keys, self.values = cache.keys.flatten(0, 1)[slots], cache.values.flatten(0, 1)[slots]
        return output

    def piece(self, library: NativeLibrary, start: int, length: int, block_size: int, neighbours: Rows) -> torch.Tensor:
        """Return the output of some tokens, computed in a step behind neighbours."""
        inputs = LayerInput(Step([*neighbours, (start, length)], block_size), self.heads, self.head_dim)
        assert inputs.rotation is not None
        assert self.inputs.rotation is not None
        past, new = inputs.step.slots[-1][:start], slice(start, start + length)
        inputs.keys.flatten(0, 1)[past], inputs.values.flatten(0, 1)[past] = self.keys[:start], self.values[:start]
        inputs.qkv[-length:] = self.inputs.qkv[new]
        inputs.rotation.cos[-length:] = self.inputs.rotation.cos[new]
        inputs.rotation.signed_sin[-length:] = self.inputs.rotation.signed_sin[new]
        return inputs.attend(NativeAttentionBackend(library), self.layer)[0][-length:]

    def check(self, library: NativeLibrary, block_size: int, neighbours: Rows) -> None:
        """Fail unless each piece has the bits that it has in the whole."""
        whole = self.whole(library)
        for start, length in PIECES:
            ours = self.piece(library, start, length, block_size, neighbours)
            assert torch.equal(ours, whole[start : start + length]), (start, length, block_size)


NEIGHBOURS: Rows = [(700, 1), (0, 50)]
MANY_NEIGHBOURS: Rows = [(20, 1)] * 12  # so that tasks have several heads


@each_row(
    *product(
        LANES,
        [(1, 1), (3, 1), (4, 2), (10, 2), (9, 1)],
        [
            AttentionLayer(0.25),
            AttentionLayer(0.25, 250, 1.5),
            AttentionLayer(0.25, 200, sinks=sinks_of(10)),
            AttentionLayer(1.0, distance_biases=biases_of(10, 129)),
            AttentionLayer(1.5, 7, alibi_slopes=(0.5, 0.3, 0.25, 0.1, 0.05, 0.03, 0.02, 0.01, 0.001, 0.4)),
        ],
    )
)
def test_bits_do_not_depend_on_the_schedule(lanes: str, heads: tuple[int, int], layer: AttentionLayer) -> None:
    if layer.alibi_slopes is not None:
        layer = replace(layer, alibi_slopes=layer.alibi_slopes[: heads[0]])
    if layer.sinks is not None:
        layer = replace(layer, sinks=layer.sinks[: heads[0]])
    if layer.distance_biases is not None:
        layer = replace(layer, distance_biases=layer.distance_biases[: heads[0]])
    sequence = Sequence(430, heads, 20, layer)
    for block_size, neighbours in ((16, []), (5, NEIGHBOURS), (16, MANY_NEIGHBOURS)):
        sequence.check(native_library(lanes), block_size, neighbours)
    sequence.check(NativeLibrary(library_path(lanes), num_threads=1), 32, [])


@each_row(*LANES)
def test_sinks_that_are_no_weight_change_no_bit(lanes: str) -> None:
    inputs, layer = LayerInput(Step([*ALL, (900, 1)], 16), (4, 2), 16), AttentionLayer(0.25)
    backend = NativeAttentionBackend(native_library(lanes))
    ours, theirs = (
        inputs.attend(backend, each)[0] for each in (layer, replace(layer, sinks=torch.full((4,), -torch.inf)))
    )
    assert torch.equal(ours, theirs)


@each_row(*product(LANES, [2, 6, 48, 64, 80, 96, 128, 192, 256]))
def test_bits_do_not_depend_on_the_schedule_at_any_head_dim(lanes: str, head_dim: int) -> None:
    sequence = Sequence(430, (2, 1), head_dim, AttentionLayer(head_dim**-0.5, 150))
    sequence.check(native_library(lanes), 16, NEIGHBOURS)


def attend_to_all(
    lanes: str,
    lengths: list[int],
    qkv: torch.Tensor,
    num_kv_heads: int,
    dtype: torch.dtype = torch.float32,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as an encoder does, in a number format, on a scratch cache full of NaN."""
    rows = text_rows(lengths, 16, torch.device("cpu"))
    cache = ScratchCache(16, num_kv_heads, qkv.shape[2], dtype=dtype, device=torch.device("cpu")).of_size(rows)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    in_bfloat16 = dtype == torch.bfloat16
    plan = NativeAttentionPlan(native_library(lanes), rows, in_bfloat16=in_bfloat16, is_full=True)
    return plan.attend(qkv, None, cache, AttentionLayer(qkv.shape[2] ** -0.5, distance_biases=biases))


@each_row(*product(LANES, [(4, 4), (6, 2), (9, 1)], [24, 64], [torch.float32, torch.bfloat16], [0, 128]))
def test_in_an_encoder_every_token_sees_all_tokens_of_its_text_with_the_same_bits_alone(
    lanes: str, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, farthest: int
) -> None:
    """Without and with biases of the distances from `-farthest` to `farthest`."""
    biases = biases_of(heads[0], 2 * farthest + 1) if farthest else None
    lengths = [1, 2, 17, 96, 97, 1, 400, 800]
    qkv = torch.randn(sum(lengths), heads[0] + 2 * heads[1], head_dim, generator=torch.Generator().manual_seed(0))
    attended = attend_to_all(lanes, lengths, qkv, heads[1], dtype, biases)
    for text, ours in zip(torch.split(qkv, lengths), torch.split(attended, lengths), strict=True):
        queries, keys, values = torch.split(text.transpose(0, 1), [heads[0], heads[1], heads[1]])
        positions = torch.arange(len(text))
        distances = (positions[:, None] - positions).clamp(-farthest, farthest) + farthest
        theirs = torch.nn.functional.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=None if biases is None else biases[:, distances],
            enable_gqa=True,
        )
        rtol, atol = (1e-5, 5e-6) if dtype == torch.float32 else (0.01, 0.01)
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1).flatten(1), rtol=rtol, atol=atol)
        assert torch.equal(attend_to_all(lanes, [len(text)], text.contiguous(), heads[1], dtype, biases), ours)


@each_row(*product(LANES, [1, 8, 9, 20], [(8, 24), (64, 576), (6, 21)]))
def test_a_latent_cache(lanes: str, num_heads: int, sizes: tuple[int, int]) -> None:
    """Values are the last numbers of keys: for decodes and chunks, scored directly and packed."""
    (begin, head_dim), rows = sizes, [(0, 1), (97, 1), (400, 1), (0, 20), (97, 9)]
    inputs = LayerInput(Step(rows, 16), (num_heads, 1), head_dim, rotary_dim=begin, value_begin=begin)
    check(inputs, lanes, AttentionLayer(head_dim**-0.5))
