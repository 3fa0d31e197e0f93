"""Equality of bits: what the same request gives, however it is scheduled."""

import torch


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fail unless two float32 tensors have the same bits; NaN is never the same. `what` names them in the message."""
    assert actual.shape == expected.shape, f"{what}: {list(actual.shape)} instead of {list(expected.shape)}"
    assert actual.dtype == expected.dtype == torch.float32
    assert not expected.isnan().any(), f"{what}: what is expected has NaN"
    is_other = actual.view(torch.int32) != expected.view(torch.int32)
    if not bool(is_other.any()):
        return
    distance = float((actual - expected).abs().max())
    raise AssertionError(
        f"{what}: {int(is_other.sum())} of {is_other.numel()} have other bits, by {distance:.1e} at most"
    )
