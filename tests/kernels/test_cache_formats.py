"""Formats of the KV cache in Triton: what is written, to the bit, and attention beside float64."""

from itertools import product

import numpy as np
import torch

from executor_svc.attention.cache_format import CACHE_DTYPES
from executor_svc.attention.interface import AttentionBackend, AttentionLayer
from executor_svc.attention.invariant_triton_backend import InvariantAttentionBackend
from executor_svc.attention.key_value_write import write_in_torch
from executor_svc.attention.triton_backend import TritonAttentionBackend
from executor_svc.models.families.common import alibi_slopes
from executor_svc.triton_kernels.key_value_write import write_in_triton
from tests.kernels.device import DEVICE
from tests.numerics.attention import LayerInput, Rows, Step, sinks_of
from tests.numerics.test_cache_formats import SCALES, heads_of_every_kind, raw
from tests.support.each_row import each_row

MIXED: Rows = [(3, 1), (0, 2), (70, 1), (30, 7)]
BACKENDS: dict[str, AttentionBackend] = {
    "one program": TritonAttentionBackend(1),
    "splits": TritonAttentionBackend(16),
    "invariant": InvariantAttentionBackend(1),
    "invariant splits": InvariantAttentionBackend(16),
}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LAYERS = [
    # heads, head_dim, block_size, layer
    ((6, 2), 16, 16, AttentionLayer(0.25)),
    ((4, 1), 24, 48, AttentionLayer(0.4, 20, 1.5, alibi_slopes(4), sinks_of(4, DEVICE))),
]
CASES = [
    *product(["one program", "invariant"], CACHE_DTYPES, [torch.float32], range(len(LAYERS))),
    *product(["splits", "invariant splits"], ["int8", "fp8_e4m3"], [torch.float32], [0]),
    *product(["one program"], CACHE_DTYPES, [torch.float16, torch.bfloat16], [0]),
]


@each_row(*product(["splits"], CACHE_DTYPES, [torch.float16]), ("invariant", "int8", torch.float16))
def test_attention_on_a_latent_cache(backend: str, cache_format: str, dtype: torch.dtype) -> None:
    cache_dtype = CACHE_DTYPES[cache_format]
    scale, _ = SCALES[cache_dtype]
    step, layer = Step([(3, 1), (20, 3)], 16, device=DEVICE), AttentionLayer(0.25)
    inputs = LayerInput(
        step,
        (3, 1),
        40,
        rotary_dim=8,
        value_begin=8,
        dtype=dtype,
        cache_dtype=cache_dtype,
        scales=(scale, scale),
    )

    ours, cache = inputs.attend(BACKENDS[backend], layer)

    exact, _ = inputs.attend_naively(layer, cache)
    torch.testing.assert_close(ours.cpu().double(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@each_row(*CASES)
def test_attention_is_that_of_the_elements_in_float64(
    backend: str, cache_format: str, dtype: torch.dtype, shape: int
) -> None:
    heads, head_dim, block_size, layer = LAYERS[shape]
    cache_dtype = CACHE_DTYPES[cache_format]
    step = Step(MIXED, block_size, layer.window_tokens, DEVICE)
    inputs = LayerInput(step, heads, head_dim, dtype=dtype, cache_dtype=cache_dtype, scales=SCALES[cache_dtype])

    ours, cache = inputs.attend(BACKENDS[backend], layer)

    exact, _ = inputs.attend_naively(layer, cache)
    bound = TOLERANCES[dtype]
    torch.testing.assert_close(ours.cpu().double(), exact, rtol=bound, atol=bound)


NUM_KV_HEADS = 31
HALF_AND_FULL = [torch.float32, torch.float16, torch.bfloat16]


@each_row(*product(CACHE_DTYPES, HALF_AND_FULL, [16, 17]))
def test_what_is_written_is_what_torch_writes(cache_format: str, dtype: torch.dtype, head_dim: int) -> None:
    """Of numbers of every size, ties, and what is no number: the same bytes, and none beside the slots."""
    heads = heads_of_every_kind(head_dim).to(dtype)
    # The interpreter converts small numbers from and to bfloat16 otherwise.
    if torch.bfloat16 in (dtype, CACHE_DTYPES[cache_format]):
        heads = heads.where(heads.float().abs() >= 2.0**-126, 0)
    num_tokens = -(-len(heads) // NUM_KV_HEADS)
    keys = torch.cat((heads, heads))[: num_tokens * NUM_KV_HEADS].view(num_tokens, NUM_KV_HEADS, head_dim)
    qkv = torch.cat((keys[:, :1], keys, keys.flip(0, 1)), 1).to(DEVICE)
    step, cache_dtype = Step([(0, num_tokens)], 16, device=DEVICE), CACHE_DTYPES[cache_format]
    inputs = LayerInput(
        step, (1, NUM_KV_HEADS), head_dim, dtype=dtype, cache_dtype=cache_dtype, scales=SCALES[cache_dtype]
    )
    ours, theirs = inputs.cache(), inputs.cache()

    with np.errstate(over="ignore"):  # of the interpreter
        write_in_triton(qkv.clone(), None, step.metadata.slot_mapping, ours)

    write_in_torch(qkv, None, step.metadata.slot_mapping, theirs)
    # The interpreter cuts bfloat16 off, where a device rounds it.
    is_cut = DEVICE.type == "cpu" and cache_format == "bfloat16" != str(dtype).removeprefix("torch.")
    for our_bits, their_bits in zip(raw(ours), raw(theirs), strict=True):
        assert (our_bits.int() - their_bits.int()).abs().max() <= int(is_cut)
