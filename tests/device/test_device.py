"""What a device does besides computing: it captures, moves blocks beside the computation, and says when it is lost."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.attention.interface import LayerCache
from executor_svc.cache.cache_engine import CacheEngine, CacheShape
from executor_svc.device.probe import CudaProbe, device_probe, probe_nothing, step_error
from octavo_shared.errors import DeviceLostError, StepFailedError
from octavo_shared.step_wire.step import Step, TableDelta, pairs
from tests.device.workers import DEVICE, IS_GPU

ROOT = Path(__file__).parents[2]
NUM_BLOCKS = 64 if IS_GPU else 4
SHAPE = CacheShape(
    num_layers=32 if IS_GPU else 2, block_size=16, num_kv_heads=8, head_dim=128 if IS_GPU else 16, dtype=torch.bfloat16
)
# An index that the kernel finds wrong ends the context of its process: from then on every call of CUDA fails.
LOSE_THE_DEVICE = """
import torch
from executor_svc.device.probe import device_probe, step_error
device = torch.device("cuda")
probe = device_probe(device)
try:
    torch.zeros(4, device=device)[torch.tensor([9], device=device)].sum().item()
except Exception as error:
    print(type(step_error(7, error, probe)).__name__)
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_swaps_beside_the_computation_keep_every_bit(dtype: torch.dtype) -> None:
    """The device is kept busy, and what is computed behind a swap overwrites the blocks that leave."""
    engine = CacheEngine(replace(SHAPE, dtype=dtype), NUM_BLOCKS, NUM_BLOCKS, DEVICE)
    tensors = [tensor for layer in engine.layers for tensor in elements_and_scales(layer)]
    for index, tensor in enumerate(tensors):
        tensor.copy_(50 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index)))
    before = [tensor[:NUM_BLOCKS].clone() for tensor in tensors]
    work = torch.randn(2048 if IS_GPU else 16, 2048 if IS_GPU else 16, device=DEVICE)
    blocks = range(NUM_BLOCKS)

    for round_ in range(4 if IS_GPU else 1):
        work = (work @ work).clamp(-1, 1)
        engine.move(Step(1, 2 * round_ + 1, TableDelta(), blocks_to_swap_out=pairs(*((i, i) for i in blocks))))
        for tensor in tensors:
            tensor[:NUM_BLOCKS] = 0
        work = (work @ work).clamp(-1, 1)
        engine.move(Step(1, 2 * round_ + 2, TableDelta(), blocks_to_swap_in=pairs(*((i, i) for i in blocks))))

    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor[:NUM_BLOCKS], expected)
    assert engine.host_blocks.is_pinned() == IS_GPU


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_blocks_go_to_another_cache_beside_the_computation_bit_for_bit(dtype: torch.dtype) -> None:
    """What is written just before they are read, and overwritten in the other cache, is still to be computed then."""
    one, other = (CacheEngine(replace(SHAPE, dtype=dtype), NUM_BLOCKS, 0, DEVICE) for _ in range(2))
    tensors, arrived = (
        [tensor for layer in each.layers for tensor in elements_and_scales(layer)] for each in (one, other)
    )
    work = torch.randn(4096 if IS_GPU else 16, 4096 if IS_GPU else 16, device=DEVICE)
    contents = [50 * torch.randn(tensor.shape, device=DEVICE) for tensor in tensors]
    sources, targets = np.split(np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32), 2)
    for _ in range(20 if IS_GPU else 1):
        work = (work @ work).clamp(-1, 1)
    for tensor, content, into in zip(tensors, contents, arrived, strict=True):
        tensor.copy_(content)
        into.zero_()

    one.begin_transfers()
    other.begin_transfers()
    for _ in range(20 if IS_GPU else 1):
        work = (work @ work).clamp(-1, 1)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: other.write_blocks(targets, one.read_blocks(sources))).result()

    for tensor, into in zip(tensors, arrived, strict=True):
        assert torch.equal(into[targets], tensor[sources])
        assert not into[sources].any()


def elements_and_scales(layer: LayerCache) -> list[torch.Tensor]:
    tensors = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
    return [tensor for tensor in tensors if tensor is not None]


def test_a_device_that_computes_is_not_lost() -> None:
    probe = device_probe(DEVICE)
    assert isinstance(probe, CudaProbe) if IS_GPU else probe is probe_nothing
    found = step_error(7, torch.OutOfMemoryError("no room"), probe)
    assert type(found) is StepFailedError
    assert str(found) == "step 7 failed: OutOfMemoryError: no room"


@pytest.mark.skipif(not IS_GPU, reason="a CPU is never lost")
def test_a_lack_of_memory_leaves_a_device_that_computes() -> None:
    probe = device_probe(DEVICE)
    with pytest.raises(torch.OutOfMemoryError) as lack:
        torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
    assert type(step_error(7, lack.value, probe)) is StepFailedError


def test_a_context_that_has_ended_is_a_lost_device() -> None:
    if not IS_GPU:

        def fail() -> None:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with")

        found = step_error(7, RuntimeError("index"), fail)
        assert type(found) is DeviceLostError
        assert str(found).endswith("the device is lost: CUDA error: device-side assert triggered")
        return
    done = subprocess.run(
        [sys.executable, "-c", LOSE_THE_DEVICE], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split()[-1:] == ["DeviceLostError"], done.stdout + done.stderr
