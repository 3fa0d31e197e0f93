"""Memory of weights: its pages, and that parts do not touch each other."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from executor_svc.native.binding import HUGE_PAGE_BYTES, WeightMemory

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(parts: Sequence[torch.Tensor]) -> int:
    """Return how much of the mappings that tensors lie in is in huge pages, as Linux tells it."""
    total = 0
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(encoding="ascii")):
        begin, end = (int(address, 16) for address in mapping.split(" ", 1)[0].split("-"))
        if any(begin <= part.data_ptr() < end for part in parts):
            total += 1024 * int(re.findall(r"AnonHugePages:\s+(\d+) kB", mapping)[0])
    return total


@pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(encoding="ascii"), reason="Linux gives no huge pages here"
)
def test_small_matrices_share_huge_pages() -> None:
    memory = WeightMemory()
    parts = [memory.take(700_000) for _ in range(100)]
    for part in parts:
        part.fill_(1)

    assert huge_bytes(parts) >= 0.9 * len(parts) * 700_000


def test_parts_are_zero_aligned_and_apart() -> None:
    memory, sizes = WeightMemory(), [1, 63, 64, 65, HUGE_PAGE_BYTES - 7, 3 * HUGE_PAGE_BYTES, 5]
    parts = [memory.take(size) for size in sizes]

    assert [len(part) for part in parts] == sizes
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    assert not any(part.any() for part in parts)
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    assert all(bool((part == number + 1).all()) for number, part in enumerate(parts))
