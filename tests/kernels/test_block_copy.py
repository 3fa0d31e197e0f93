"""Blocks are copied in all pools, others stay as they are."""

from itertools import product

import numpy as np
import torch

from executor_svc.triton_kernels.block_copy import BlockCopier
from tests.kernels.device import DEVICE
from tests.support.each_row import each_row


@each_row(*product([torch.float32, torch.bfloat16], [(16, 1, 16), (16, 5, 80), (32, 2, 128)], [0, 1, 4]))
def test_copies_equal_those_of_torch(dtype: torch.dtype, block_shape: tuple[int, int, int], num_pairs: int) -> None:
    generator = torch.Generator().manual_seed(5)
    pools = [torch.randn(9, *block_shape, generator=generator).to(DEVICE, dtype) for _ in range(4)]
    pools[1][2] = torch.nan
    expected = [pool.clone() for pool in pools]
    pairs = np.array([(0, 8), (2, 5), (0, 3), (7, 1)], np.int32)[:num_pairs]
    for pool in expected:
        pool[pairs[:, 1].tolist()] = pool[pairs[:, 0].tolist()]

    BlockCopier(pools).copy_blocks(pairs)

    for pool, expected_pool in zip(pools, expected, strict=True):
        torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0, equal_nan=True)


def test_a_copier_copies_again_and_again() -> None:
    pools = [torch.arange(4.0, device=DEVICE)[:, None].repeat(1, 64) for _ in range(2)]
    copier = BlockCopier(pools)

    copier.copy_blocks(np.array([(0, 1)], np.int32))
    copier.copy_blocks(np.array([(1, 2), (3, 0)], np.int32))

    assert [pool[:, 0].tolist() for pool in pools] == [[3.0, 0.0, 0.0, 3.0]] * 2
