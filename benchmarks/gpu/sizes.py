"""How large the check is: on a GPU, and in a rehearsal on a CPU, which shows that its code works."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.bandwidth import DecodeShape
from benchmarks.gpu.models import LLAMA_1B, LLAMA_8B, TINY
from benchmarks.gpu.part import Progress
from benchmarks.gpu.throughput import Workload


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    copy_bytes: int
    decode_shapes: Sequence[DecodeShape]
    cache_shapes: Sequence[DecodeShape]  # of which decodes are timed with caches of 8 bits, beside the model's dtype
    large_model: Mapping[str, Any]  # for one stream
    small_model: Mapping[str, Any]  # for many
    dtype: torch.dtype
    decode_batch_sizes: Sequence[int]
    prefill_tokens: Sequence[int]  # of one prompt
    prompt_tokens: int
    num_new_tokens: int
    workload: Workload
    max_num_batched_tokens: int
    num_device_blocks: int | None  # None: what the memory has room for
    invariant_tokens: int  # of the sequence whose logits are compared: more than a split of keys
    invariant_batch_sizes: Sequence[int]

    def decode_shapes_of(self, backend: str) -> Sequence[DecodeShape]:
        """Return the shapes with blocks that a backend takes."""
        block_size = {"flash_attn": 256, "xformers": 64}.get(backend, 16)
        return [replace(shape, block_size=block_size) for shape in self.decode_shapes]


FULL = Sizes(
    copy_bytes=4 * 2**30,
    decode_shapes=(
        DecodeShape(32, 2048),
        DecodeShape(32, 8192),
        DecodeShape(128, 2048),
        DecodeShape(256, 4096),
        DecodeShape(1, 32768),
    ),
    cache_shapes=(DecodeShape(32, 2048), DecodeShape(128, 2048)),
    large_model=LLAMA_8B,
    small_model=LLAMA_1B,
    dtype=torch.bfloat16,
    decode_batch_sizes=(1, 32, 256),
    prefill_tokens=(2048, 8190),
    prompt_tokens=128,
    num_new_tokens=64,
    workload=Workload(num_requests=512, batch_size=256, max_prompt_tokens=768, max_new_tokens=512),
    max_num_batched_tokens=8192,
    num_device_blocks=None,
    invariant_tokens=700,
    invariant_batch_sizes=(1, 32, 256),
)
REHEARSAL = Sizes(
    copy_bytes=2**20,
    decode_shapes=(DecodeShape(3, 40, 4, 2, 16, dtype=torch.float32),),
    cache_shapes=(DecodeShape(3, 40, 4, 2, 16, dtype=torch.float32),),
    large_model=TINY,
    small_model=TINY,
    dtype=torch.float32,
    decode_batch_sizes=(1, 4),
    prefill_tokens=(60,),
    prompt_tokens=20,
    num_new_tokens=8,
    workload=Workload(num_requests=6, batch_size=4, max_prompt_tokens=32, max_new_tokens=12),
    max_num_batched_tokens=64,
    num_device_blocks=64,
    invariant_tokens=8,
    invariant_batch_sizes=(2,),
)


def place_of(progress: Progress) -> tuple[Sizes, torch.device]:
    """Return how large a part is, and where it computes."""
    return (REHEARSAL, torch.device("cpu")) if progress.is_rehearsal else (FULL, torch.device("cuda"))
