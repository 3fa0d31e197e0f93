"""The fused write does what the torch one does: queries and keys rotated, keys and values in their slots."""

from itertools import product

import torch

from executor_svc.attention.interface import LayerCache
from executor_svc.attention.key_value_write import write_in_torch
from executor_svc.triton_kernels.key_value_write import write_in_triton
from tests.kernels.device import DEVICE
from tests.numerics.attention import LayerInput, Step
from tests.support.each_row import each_row

# One rounding of a number near 1, which torch makes twice.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check(inputs: LayerInput, tolerance: float) -> None:
    ours, theirs = inputs.cache(), inputs.cache()
    qkv, slot_mapping = inputs.qkv.clone(), inputs.step.metadata.slot_mapping
    value_tolerance = tolerance if inputs.value_begin else 0  # which are keys
    our_heads = write_in_triton(qkv, inputs.rotation, slot_mapping, ours)
    their_heads = write_in_torch(inputs.qkv.clone(), inputs.rotation, slot_mapping, theirs)
    assert our_heads.query.data_ptr() == qkv.data_ptr(), "queries are rotated in place"
    for our_tensor, their_tensor, bound in (
        (our_heads.query, their_heads.query, tolerance),
        (our_heads.key, their_heads.key, tolerance),
        (our_heads.value, their_heads.value, value_tolerance),
        (ours.keys, theirs.keys, tolerance),
        (ours.values, theirs.values, value_tolerance),
    ):
        torch.testing.assert_close(our_tensor, their_tensor, rtol=bound, atol=bound, equal_nan=True)
    torch.testing.assert_close(ours.keys.flatten(0, 1)[slot_mapping], our_heads.key, rtol=0, atol=0)


@each_row(*product([True, False], [16, 18, 64, 80, 96, 128, 160, 256]))
def test_every_head_dim(is_rotated: bool, head_dim: int) -> None:
    step = Step([(3, 1), (0, 2), (17, 1)], 16, device=DEVICE)
    check(LayerInput(step, (6, 2), head_dim, is_rotated=is_rotated), TOLERANCES[torch.float32])


@each_row((8, 2), (18, 4), (80, 32), (128, 96))
def test_part_of_a_head(head_dim: int, rotary_dim: int) -> None:
    step = Step([(3, 1), (0, 2), (17, 1)], 16, device=DEVICE)
    check(LayerInput(step, (6, 2), head_dim, rotary_dim=rotary_dim), TOLERANCES[torch.float32])


@each_row((48, 16), (35, 2), (576, 64))
def test_latent_vectors(head_dim: int, rotary_dim: int) -> None:
    step = Step([(3, 1), (0, 2), (17, 1)], 16, device=DEVICE)
    inputs = LayerInput(step, (3, 1), head_dim, rotary_dim=rotary_dim, value_begin=rotary_dim)
    check(inputs, TOLERANCES[torch.float32])


@each_row(*product([(1, 1), (9, 3), (32, 8), (71, 1)], TOLERANCES))
def test_every_number_of_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    step = Step([(3, 1), (14, 3)], 16, device=DEVICE)
    check(LayerInput(step, heads, 80, dtype=dtype), TOLERANCES[dtype])


@each_row(17, 33)
def test_without_rotation_the_number_of_dimensions_may_be_odd(head_dim: int) -> None:
    check(LayerInput(Step([(3, 1), (14, 3)], 16, device=DEVICE), (4, 2), head_dim, is_rotated=False), 0)


def test_tokens_may_lie_apart() -> None:
    """The projection may give other columns beside these."""
    inputs = LayerInput(Step([(3, 1), (14, 3)], 16, device=DEVICE), (4, 2), 32)
    wide = torch.full((4, 10, 32), torch.nan, device=DEVICE)
    wide[:, :8] = inputs.qkv
    cache = LayerCache(inputs.keys.clone(), inputs.values.clone())

    heads = write_in_triton(wide[:, :8], inputs.rotation, inputs.step.metadata.slot_mapping, cache)

    expected = LayerCache(inputs.keys.clone(), inputs.values.clone())
    their_heads = write_in_torch(inputs.qkv, inputs.rotation, inputs.step.metadata.slot_mapping, expected)
    torch.testing.assert_close(heads.query, their_heads.query)
    torch.testing.assert_close(cache.keys, expected.keys, equal_nan=True)
    assert bool(wide[:, 8:].isnan().all())
