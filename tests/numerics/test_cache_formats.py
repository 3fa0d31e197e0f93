"""Formats of the KV cache in C and torch: what is written, what is read, and that a schedule changes no bit."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from executor_svc.attention.cache_format import CACHE_DTYPES, FP8
from executor_svc.attention.interface import AttentionBackend, AttentionLayer, LayerCache
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.models.families.common import alibi_slopes
from executor_svc.native.library import NativeLibrary
from tests.numerics.attention import CHUNKS, DECODES, LayerInput, Rows, Step, sinks_of
from tests.numerics.native import LANES, library_path, native_library
from tests.support.each_row import each_row

ALL: Rows = [*DECODES, *CHUNKS, (600, 1), *[(20, 1)] * 6]  # so many that tasks have several heads
SCALES = {dtype: (0.37, 1.9) if dtype in FP8 else (1.0, 1.0) for dtype in CACHE_DTYPES.values()}
FORMATS = [name for name in CACHE_DTYPES if name != "float32"]


def raw(cache: LayerCache) -> list[torch.Tensor]:
    """Return all that a cache holds, as bits: elements [num_blocks, block_size, ..], then scales."""
    tensors = [cache.keys, cache.values]
    if cache.key_scales is not None and cache.value_scales is not None:
        tensors += [cache.key_scales.transpose(1, 2), cache.value_scales.transpose(1, 2)]
    return [tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]) for tensor in tensors]


def backends() -> dict[str, AttentionBackend]:
    """Return the backends of a CPU."""
    in_c = {lanes: NativeAttentionBackend(native_library(lanes)) for lanes in LANES}
    return {**in_c, "torch": TorchAttentionBackend()}


SHAPES = [
    # heads, head_dim, block_size, layer
    ((6, 2), 16, 16, AttentionLayer(0.25)),
    ((9, 3), 100, 24, AttentionLayer(0.125)),
    ((7, 1), 30, 3, AttentionLayer(0.3, 40, 1.5, alibi_slopes(7))),
    ((3, 3), 18, 5, AttentionLayer(0.3, 250)),
    ((10, 1), 80, 40, AttentionLayer(0.1, soft_cap=2.0, sinks=sinks_of(10))),
    ((3, 3), 6, 1, AttentionLayer(0.5)),
]


@each_row(*product(backends(), CACHE_DTYPES, range(len(SHAPES))))
def test_attention_is_that_of_the_elements_in_float64(name: str, cache_format: str, shape: int) -> None:
    heads, head_dim, block_size, layer = SHAPES[shape]
    dtype = CACHE_DTYPES[cache_format]
    step = Step(ALL, block_size, layer.window_tokens)
    inputs = LayerInput(step, heads, head_dim, cache_dtype=dtype, scales=SCALES[dtype])

    ours, cache = inputs.attend(backends()[name], layer)

    exact, _ = inputs.attend_naively(layer, cache)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=1e-5)


def heads_of_every_kind(head_dim: int) -> torch.Tensor:
    """Return heads that rounding can get wrong, [num_heads, head_dim] float32."""
    generator = torch.Generator().manual_seed(5)
    magnitudes = 2.0 ** torch.arange(-150, 128, 1.7)
    heads = [magnitude * torch.randn(head_dim, generator=generator) for magnitude in magnitudes.tolist()]
    every_byte = torch.arange(256, dtype=torch.uint8)
    for dtype in FP8:  # each number of a format, and the ties between them
        numbers = every_byte.view(dtype).float().nan_to_num(0, 0, 0).sort().values
        ties = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2, numbers * (1 + 2**-20), torch.zeros(1)))
        heads += list(ties.resize_(len(ties) // head_dim * head_dim).reshape(-1, head_dim))
    for dtype in (torch.bfloat16, torch.float16):  # ties
        bits = torch.randint(0, 0x7B00, (20, head_dim), generator=generator, dtype=torch.int16)
        lower, upper = (each.view(dtype).float() for each in (bits, bits + 1))
        heads += list((lower + upper) / 2)
    heads += [torch.zeros(head_dim), torch.full((head_dim,), 1e-45), torch.arange(head_dim) * 1.4e-45]
    for number in (torch.inf, -torch.inf, torch.nan, 3e38):
        heads.append(torch.cat((torch.tensor([number]), torch.randn(head_dim - 1, generator=generator))))
    return torch.stack(heads)


@each_row(*product(backends(), CACHE_DTYPES, [18, 20, 70], [(1.0, 1.0), (0.3, 7.0)]))
def test_elements_are_rounded_as_the_format_says(
    name: str, cache_format: str, head_dim: int, scales: tuple[float, float]
) -> None:
    dtype, heads = CACHE_DTYPES[cache_format], heads_of_every_kind(head_dim)
    if dtype not in FP8:
        scales = (1.0, 1.0)
    step = Step([(0, len(heads))], 16)
    inputs = LayerInput(step, (1, 1), head_dim, is_rotated=False, cache_dtype=dtype, scales=scales)
    inputs.qkv = torch.stack((torch.zeros_like(heads), heads, heads.flip(0)), 1)

    _, cache = inputs.attend(backends()[name], AttentionLayer(0.25))

    slots = torch.tensor(step.slots[0])
    pools = [
        (cache.keys, cache.key_scales, scales[0], heads),
        (cache.values, cache.value_scales, scales[1], heads.flip(0)),
    ]
    for pool, pool_scales, scale, given in pools:
        elements = pool[slots // 16, slots % 16][:, 0] if dtype not in FP8 else of_bytes(pool, slots)
        if pool_scales is None:
            torch.testing.assert_close(elements.double(), rounded(given, dtype, scale), rtol=0, atol=0, equal_nan=True)
            continue
        own_scales = pool_scales[slots // 16, :, slots % 16]
        largest = given.abs().amax(1, keepdim=True)
        wanted = torch.where(largest.isfinite(), largest, torch.nan) / 127
        torch.testing.assert_close(own_scales, wanted, rtol=0, atol=0, equal_nan=True)
        errors = (elements.double() * own_scales.double() - given.double()).abs()
        is_broken = wanted.isnan().expand_as(errors)
        assert errors[is_broken].isnan().all()
        assert (errors <= 0.50001 * wanted.double() + 127 * 1e-45)[~is_broken].all()


def of_bytes(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the elements of some slots, of a format that torch cannot index."""
    return pool.view(torch.uint8)[slots // 16, slots % 16][:, 0].view(pool.dtype)


def rounded(heads: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return the nearest numbers of a format in float64, counted from all numbers that it has."""
    if dtype in (torch.int8, torch.float32):
        return heads.double()
    bits = torch.arange(2 ** (8 * dtype.itemsize)).to({1: torch.uint8, 2: torch.int32}[dtype.itemsize])
    numbers = (bits.view(dtype) if dtype.itemsize == 1 else bits.to(torch.int16).view(dtype)).double()
    numbers = torch.unique(numbers[numbers.isfinite() & (numbers >= 0)])
    sizes = (heads / torch.tensor(scale)).double() if dtype in FP8 else heads.double()
    upper = torch.searchsorted(numbers, sizes.abs().nan_to_num(0.0)).clamp(max=len(numbers) - 1)
    lower = (upper - 1).clamp(min=0)
    above, below = numbers[upper] - sizes.abs(), sizes.abs() - numbers[lower]
    is_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    nearest = torch.where(is_lower, numbers[lower], numbers[upper]).copysign(sizes)
    if dtype not in FP8:  # they have infinity half a step behind the largest
        step = numbers[-1] - numbers[-2]
        nearest = torch.where(sizes.abs() >= numbers[-1] + step / 2, torch.inf, nearest.abs()).copysign(sizes)
    return torch.where(sizes.isnan(), torch.nan, nearest)


@each_row(*product(LANES, FORMATS))
def test_a_value_that_is_no_number_stays_none(lanes: str, cache_format: str) -> None:
    """A model that is broken must not look sound behind a format that saturates."""
    dtype = CACHE_DTYPES[cache_format]
    inputs = LayerInput(Step([(0, 20)], 16), (2, 1), 16, cache_dtype=dtype)
    inputs.qkv[3, 3, 5] = torch.nan
    output, _ = inputs.attend(NativeAttentionBackend(native_library(lanes)), AttentionLayer(0.25))
    assert output[3:].view(17, 2, 16)[:, :, 5].isnan().all()
    assert output[:3].isfinite().all()


@dataclass(frozen=True)
class Written:
    """A sequence that was computed in one step."""

    inputs: LayerInput
    layer: AttentionLayer
    output: torch.Tensor
    cache: LayerCache
    in_bfloat16: bool = False

    def piece(self, library: NativeLibrary, start: int, length: int, block_size: int, neighbours: Rows) -> None:
        """Fail unless some tokens have the same bits, computed behind neighbours on blocks that were moved."""
        whole = self.inputs
        heads, head_dim = (whole.num_heads, whole.num_kv_heads), whole.qkv.shape[2]
        step = Step([*neighbours, (start, length)], block_size)
        is_rotated = whole.rotation is not None
        formats: Any = {"cache_dtype": whole.cache_dtype, "scales": whole.scales}
        inputs = LayerInput(step, heads, head_dim, is_rotated=is_rotated, **formats)
        cache, slots = inputs.cache(), torch.tensor(step.slots[-1])
        own = torch.tensor(whole.step.slots[0])
        for source, target in zip(raw(self.cache), raw(cache), strict=True):
            past, from_slots = slots[:start], own[:start]
            size = whole.step.block_size
            target[past // block_size, past % block_size] = source[from_slots // size, from_slots % size]
        new = slice(start, start + length)
        inputs.qkv[-length:] = whole.qkv[new]
        if inputs.rotation is not None and whole.rotation is not None:
            inputs.rotation.cos[-length:] = whole.rotation.cos[new]
            inputs.rotation.signed_sin[-length:] = whole.rotation.signed_sin[new]
        backend = NativeAttentionBackend(library, in_bfloat16=self.in_bfloat16)
        ours = inputs.attend_on(backend, self.layer, cache)[-length:]
        assert torch.equal(ours, self.output[new]), (start, length, block_size)
        for source, target in zip(raw(self.cache), raw(cache), strict=True):
            size = whole.step.block_size
            written, expected = target[slots // block_size, slots % block_size], source[own // size, own % size]
            assert torch.equal(written, expected[: start + length]), (start, length, block_size)


PIECES: Rows = [(edge, 1) for edge in (0, 1, 15, 16, 96, 97, 191, 383, 384, 429)] + [
    (3, 7),
    (90, 10),
    (200, 129),
    (1, 429),
]
PIECE_SHAPES = [
    ((9, 3), 64, AttentionLayer(0.125)),
    ((4, 2), 20, AttentionLayer(0.25, 250, 1.5)),
    ((10, 2), 32, AttentionLayer(0.2, sinks=sinks_of(10))),
]


@each_row(*product(FORMATS, range(len(PIECE_SHAPES))))
def test_bits_do_not_depend_on_the_schedule_or_the_processor(cache_format: str, shape: int) -> None:
    heads, head_dim, layer = PIECE_SHAPES[shape]
    dtype = CACHE_DTYPES[cache_format]
    outputs = []
    for lanes in LANES:
        library = native_library(lanes)
        inputs = LayerInput(Step([(0, 430)], 16), heads, head_dim, cache_dtype=dtype, scales=SCALES[dtype])
        output, cache = inputs.attend(NativeAttentionBackend(library), layer)
        outputs.append((inputs.step.slots[0], [output.view(torch.int32), *raw(cache)]))
        written = Written(inputs, layer, output, cache)
        for block_size, neighbours in ((16, []), (24, [(700, 1), (0, 50)]), (5, [(20, 1)] * 12)):
            for start, length in PIECES:
                written.piece(library, start, length, block_size, neighbours)
        written.piece(NativeLibrary(library_path(lanes), num_threads=1), 429, 1, 32, [])
    (_, ours), (_, theirs) = outputs
    assert all(torch.equal(one, other) for one, other in zip(ours[1:], theirs[1:], strict=True))
