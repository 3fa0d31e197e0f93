"""Attention in bfloat16: near float64 on rounded inputs, one set of bits on every processor and in every schedule."""

import ctypes
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.attention.cache_format import CACHE_DTYPES, FP8
from executor_svc.attention.interface import AttentionBackend, AttentionLayer, LayerCache
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.models.families.common import alibi_slopes
from executor_svc.native.library import NativeLibrary
from tests.numerics import test_cache_formats
from tests.numerics.attention import CHUNKS, DECODES, LayerInput, Rows, Step, biases_of, decoded, sinks_of
from tests.numerics.native import LANES, library_path, mode_of_floats, native_library
from tests.numerics.test_cache_formats import PIECES, SCALES, Written
from tests.support.each_row import each_row, further_case

ALL: Rows = [*DECODES, *CHUNKS, (600, 1)]
WITHOUT_BF16 = "widest without BF16"
each_instructions = pytest.mark.parametrize("instructions", [*LANES, pytest.param(WITHOUT_BF16, marks=further_case)])
LOG2_E = 1.44269504088896341
SHAPES = [
    *test_cache_formats.SHAPES,
    ((3, 3), 33, 16, AttentionLayer(0.2)),
    ((4, 1), 96, 16, AttentionLayer(0.1, 7)),
    ((4, 1), 128, 16, AttentionLayer(0.09, alibi_slopes=alibi_slopes(4))),
    ((4, 2), 24, 16, AttentionLayer(0.2, distance_biases=biases_of(4, 40))),
    ((2, 1), 256, 16, AttentionLayer(0.06, 97)),
    ((8, 1), 64, 16, AttentionLayer(0.125, 128, sinks=sinks_of(8))),
]


def native(instructions: str) -> AttentionBackend:
    """Return the attention, on scratch memory where no byte is of a number."""
    library, num_bytes = native_library(instructions), 1 << 24
    ctypes.memset(library._scratch.address(num_bytes), 0xFF, num_bytes)
    return NativeAttentionBackend(library, in_bfloat16=True)


def rounded_cache(cache: LayerCache, dtype: torch.dtype) -> LayerCache:
    """Return what attention reads of a cache: elements in bfloat16, but scales beside them."""
    if dtype not in (torch.float32, torch.float16):
        return cache
    return LayerCache(cache.keys.bfloat16(), cache.values.bfloat16())


@pytest.mark.parametrize("name", [*LANES, pytest.param(WITHOUT_BF16, marks=further_case), "torch"])
@each_row(*product(CACHE_DTYPES, range(len(SHAPES))))
def test_attention_is_that_of_rounded_numbers_in_float64(cache_format: str, shape: int, *, name: str) -> None:
    heads, head_dim, block_size, layer = SHAPES[shape]
    dtype, step = CACHE_DTYPES[cache_format], Step(ALL, block_size, layer.window_tokens)
    inputs = LayerInput(step, heads, head_dim, is_rotated=head_dim % 2 == 0, cache_dtype=dtype, scales=SCALES[dtype])
    is_torch = name == "torch"

    ours, cache = inputs.attend(TorchAttentionBackend(in_bfloat16=True) if is_torch else native(name), layer)

    read = rounded_cache(cache, dtype)
    factor = layer.scale if is_torch or layer.soft_cap else layer.scale * LOG2_E
    exact, _ = inputs.attend_naively(layer, read, factor if is_torch else factor * cache.key_scale)
    # Each weight is rounded to 8 bits; torch also rounds what scales make of elements.
    sizes = LayerInput.attend_naively(inputs, layer, sizes_of(read))[0]
    is_rounded_twice = is_torch and (dtype in FP8 or dtype == torch.int8)
    bound = (3 if is_rounded_twice else 1) * 2.0**-8 * sizes + 2e-5
    assert ((ours.double() - exact).abs() <= bound).all()
    assert (ours.double() - exact).norm() < (0.6 if is_rounded_twice else 0.3) * 2.0**-8 * sizes.norm()


def sizes_of(cache: LayerCache) -> LayerCache:
    """Return a cache with the magnitudes of its values, in float64."""
    keys, values = decoded(cache)
    return LayerCache(keys, values.abs())


@further_case
@each_row(*product(CACHE_DTYPES, range(len(SHAPES))))
def test_a_processor_without_the_instruction_gives_its_bits(cache_format: str, shape: int) -> None:
    """Also where queries, keys, values and sums are denormal."""
    heads, head_dim, block_size, layer = SHAPES[shape]
    dtype = CACHE_DTYPES[cache_format]
    for size in (1.0, 2.0**-66, 2.0**-123, 2.0**-130):
        inputs = LayerInput(
            Step(ALL, block_size, layer.window_tokens),
            *(heads, head_dim),
            is_rotated=head_dim % 2 == 0,
            cache_dtype=dtype,
        )
        for numbers in (inputs.qkv, inputs.keys, inputs.values):
            numbers.mul_(size)
        ours, theirs = (inputs.attend(native(name), layer)[0] for name in ("widest", WITHOUT_BF16))
        assert torch.equal(ours, theirs), size


PIECE_SHAPES = [
    # Odd windows: that a token sees only one key of a pair.
    ((9, 3), 64, AttentionLayer(0.125)),
    ((4, 2), 20, AttentionLayer(0.25, 251, 1.5)),
    ((10, 2), 33, AttentionLayer(0.2, alibi_slopes=alibi_slopes(10), sinks=sinks_of(10))),
    ((4, 4), 64, AttentionLayer(1.0, distance_biases=biases_of(4, 129))),
    ((9, 1), 128, AttentionLayer(0.1, 7)),
]


@each_instructions
@each_row(*product(CACHE_DTYPES, range(len(PIECE_SHAPES))))
def test_bits_do_not_depend_on_the_schedule(cache_format: str, shape: int, *, instructions: str) -> None:
    heads, head_dim, layer = PIECE_SHAPES[shape]
    dtype, library = CACHE_DTYPES[cache_format], native_library(instructions)
    formats: Any = {"cache_dtype": dtype, "scales": SCALES[dtype]}
    inputs = LayerInput(Step([(0, 430)], 16), heads, head_dim, is_rotated=head_dim % 2 == 0, **formats)
    output, cache = inputs.attend(native(instructions), layer)
    written = Written(inputs, layer, output, cache, in_bfloat16=True)
    for block_size, neighbours in ((16, []), (5, [(700, 1), (0, 50)]), (16, [(20, 1)] * 12)):
        for start, length in PIECES:
            written.piece(library, start, length, block_size, neighbours)
    written.piece(NativeLibrary(library_path(instructions), num_threads=1), 429, 1, 32, [])


@each_row(*range(1, 20))
def test_a_window_begins_at_either_key_of_a_pair(window: int) -> None:
    layer = AttentionLayer(0.25, window)
    rows = [(200 + offset, 1) for offset in range(4)] + [(100 + offset, 7) for offset in range(4)]
    for cache_format in ("bfloat16", "int8"):
        inputs = LayerInput(Step(rows, 5, window), (2, 1), 8, cache_dtype=CACHE_DTYPES[cache_format])
        ours, cache = inputs.attend(native("widest"), layer)
        exact, _ = inputs.attend_naively(layer, cache, layer.scale * LOG2_E)
        sizes, _ = inputs.attend_naively(layer, sizes_of(cache))
        assert ((ours.double() - exact).abs() <= 2.0**-8 * sizes + 2e-5).all()


@each_instructions
def test_denormals_of_others_stay_as_they_are(instructions: str, tmp_path: Path) -> None:
    mode = mode_of_floats(tmp_path)
    before = mode()
    library = NativeLibrary(library_path(instructions), 3)
    inputs = LayerInput(Step([*ALL, (0, 300)], 16), (4, 2), 64)
    for numbers in (inputs.values, inputs.qkv[:, -2:]):
        numbers.fill_(2.0**-130)
    for _ in range(3):
        ours, _ = inputs.attend(NativeAttentionBackend(library, in_bfloat16=True), AttentionLayer(0.125))
        exact, _ = inputs.attend(NativeAttentionBackend(library), AttentionLayer(0.125))
        assert not ours.any()
        torch.testing.assert_close(exact, torch.full_like(exact, 2.0**-130), rtol=1e-4, atol=0)
        assert mode() == before


@each_instructions
@each_row("bfloat16", "float32", "int8")
def test_a_value_that_is_no_number_stays_none(cache_format: str, *, instructions: str) -> None:
    inputs = LayerInput(Step([(0, 20)], 16), (2, 1), 16, cache_dtype=CACHE_DTYPES[cache_format])
    inputs.qkv[6, 3, 5] = torch.nan
    output, _ = inputs.attend(native(instructions), AttentionLayer(0.25))
    assert output[6:].view(14, 2, 16)[:, :, 5].isnan().all()
    assert output[:6].isfinite().all()
