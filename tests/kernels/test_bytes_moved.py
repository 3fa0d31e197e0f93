"""Decodes read what is stored, once: counted by the kernels' own loads; and enough of it is on its way at a time."""

from itertools import product
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from executor_svc.attention.cache_format import CACHE_DTYPES
from executor_svc.attention.interface import AttentionLayer
from executor_svc.attention.triton_backend import TritonAttentionBackend
from executor_svc.triton_kernels.tiles import decode_tile, resident_programs
from tests.kernels.device import DEVICE
from tests.numerics.attention import LayerInput, Step

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="a device does not count its loads")

NUM_TOKENS, HEADS, HEAD_DIM = 2048, (8, 2), 128
FORMATS = ["bfloat16", "int8", "fp8_e4m3"]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each load of a kernel."""
    found: list[int] = []
    load = InterpreterBuilder.create_masked_load

    def counted(self: Any, ptrs: Any, mask: Any, *arguments: Any) -> Any:
        result = load(self, ptrs, mask, *arguments)
        found.append(int(mask.data.sum()) * result.data.itemsize)
        return result

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    return found


@pytest.mark.parametrize(("cache_format", "num_multiprocessors"), [*product(FORMATS, (1, 16))])
def test_a_decode_reads_hardly_more_than_is_stored(
    cache_format: str, num_multiprocessors: int, loaded: list[int]
) -> None:
    cache_dtype = CACHE_DTYPES[cache_format]
    step = Step([(NUM_TOKENS - 1, 1)], 16, device=DEVICE)
    inputs = LayerInput(step, HEADS, HEAD_DIM, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    inputs.attend(TritonAttentionBackend(num_multiprocessors), AttentionLayer(0.1))

    scale_bytes = 4 if cache_dtype == torch.int8 else 0
    stored = NUM_TOKENS * HEADS[1] * 2 * (HEAD_DIM * cache_dtype.itemsize + scale_bytes)
    # Splits leave their results in float32, which are read again.
    of_splits = 0 if num_multiprocessors == 1 else HEADS[0] * 64 * (HEAD_DIM + 1) * 4
    assert stored <= sum(loaded) <= 1.05 * stored + of_splits


@pytest.mark.parametrize("cache_format", FORMATS)
def test_enough_is_on_its_way_for_each_multiprocessor(cache_format: str) -> None:
    """Of an H100: 3.35 TB/s for 800 ns, over 132 multiprocessors; two tiles of keys and values a program are ahead."""
    itemsize = CACHE_DTYPES[cache_format].itemsize
    tile = decode_tile(HEAD_DIM, 4, 2, itemsize)
    of_program = 2 * tile.num_keys * 2 * HEAD_DIM * itemsize
    needed = 3.35e12 * 800e-9 / 132
    assert of_program * resident_programs(HEAD_DIM, itemsize, (9, 0)) >= 2 * needed
