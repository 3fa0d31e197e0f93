"""What kernels are compiled for, drawn for a random case: any shape in the interpreter, one of a few on a GPU.

There each shape takes seconds to compile. The few are shapes of other tests in `test_triton_attention.py`, most of
whose kernels are compiled anyway.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.attention.interface import AttentionLayer
from tests.kernels.device import DEVICE, RANDOM_CASES


@dataclass(frozen=True, slots=True)
class Shape:
    """What the attention kernels know when they are compiled."""

    heads: tuple[int, int]  # of queries, of keys
    head_dim: int
    block_size: int  # in tokens
    is_rotated: bool
    has_window: bool
    has_soft_cap: bool
    has_alibi: bool
    has_sinks: bool = False

    def random_layer(self, rng: np.random.Generator) -> AttentionLayer:
        """Return a layer of this shape, with random numbers."""
        return AttentionLayer(
            float(rng.uniform(0.1, 1)),
            int(rng.integers(1, 80)) if self.has_window else None,
            float(rng.uniform(0.5, 5)) if self.has_soft_cap else None,
            tuple(rng.uniform(0, 1, self.heads[0]).tolist()) if self.has_alibi else None,
            torch.from_numpy(rng.normal(0, 2, self.heads[0])).float().to(DEVICE) if self.has_sinks else None,
        )


# Every combination of options, then block sizes with all of them, then head sizes with none.
COMPILED_SHAPES = [
    *(
        Shape((6, 2), 16, 16, alibi, window, cap, alibi, has_sinks=cap == alibi)
        for window, cap, alibi in itertools.product((False, True), repeat=3)
    ),
    *(Shape((2, 1), 16, block_size, True, True, True, True) for block_size in (32, 48, 256)),
    *(Shape((2, 1), head_dim, 16, True, False, False, False) for head_dim in (18, 72)),
]
CASES_OF_A_SHAPE = -(-RANDOM_CASES // len(COMPILED_SHAPES))


def shape_of_case(seed: int) -> Shape:
    """Return the shape of a random case; seeds are below `RANDOM_CASES`."""
    if DEVICE.type == "cuda":
        return COMPILED_SHAPES[seed // CASES_OF_A_SHAPE]
    rng = np.random.default_rng((seed, 1))
    num_kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 6))
    return Shape(
        heads=(num_kv_heads * group, num_kv_heads),
        head_dim=2 * int(rng.integers(8, 25)),
        block_size=16 * int(rng.integers(1, 6)),
        is_rotated=True,
        has_window=bool(rng.random() < 0.7),
        has_soft_cap=bool(rng.random() < 0.5),
        has_alibi=bool(rng.random() < 0.5),
        has_sinks=bool(rng.random() < 0.5),
    )
