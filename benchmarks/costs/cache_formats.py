"""A scenario of the formats of the KV cache: how fast long contexts decode, beside float32."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.costs.harness import Figures, Groups, Size, Way, in_turn, scenario
from benchmarks.costs.workers import BLOCK_SIZE, IN_BFLOAT16, new_worker, prompt_steps, random_prompts, title
from executor_svc.attention.cache_format import CACHE_DTYPES
from executor_svc.worker.interface import execute
from octavo_shared.step_wire.step import Admission, SamplingRow, Step, TableDelta, pairs

ROWS, CONTEXT = 32, 2000
CHUNK = 2048  # tokens
WARM_UP = 3  # steps

FORMATS: Sequence[str] = [name for name in CACHE_DTYPES if name != "float32"]


@scenario(
    "cache", "decoded tokens a second of 32 rows with 2,000 tokens of context, by format of the KV cache", pairs=6
)
async def cache(size: Size) -> Groups:
    """Without RPC, greedy. The rows have one prompt in blocks of their own."""
    rows, context, num_steps = size.of(ROWS, 2), size.of(CONTEXT, 20), size.of(8, 2)
    for number_format in size.of(("none", "int8-a8"), ("none",)):
        exact = LongRows(size, number_format, "float32", rows, context)
        for name in size.of(FORMATS, FORMATS[2:3]):
            rounded = LongRows(size, number_format, name, rows, context)
            beside = f"weights {title(number_format)}, cache float32 beside {name}"
            yield [
                Way(beside, in_turn(exact.turn, num_steps)),
                Way(f"weights {title(number_format)}, cache {name}", in_turn(rounded.turn, num_steps), beside),
            ]
        computed = LongRows(size, IN_BFLOAT16 + number_format.removeprefix("none"), "auto", rows, context)
        beside = f"weights {title(number_format)}, float32 beside compute bfloat16"
        yield [
            Way(beside, in_turn(exact.turn, num_steps)),
            Way(f"weights {title(number_format)}, compute bfloat16", in_turn(computed.turn, num_steps), beside),
        ]


class LongRows:
    """Rows that decode behind a long context."""

    def __init__(self, size: Size, number_format: str, kv_cache_dtype: str, num_rows: int, context: int) -> None:
        self._num_rows, self._context = num_rows, context
        self._num_blocks = -(-(context + BLOCK_SIZE) // BLOCK_SIZE)
        self._worker = new_worker(
            size.directory(),
            number_format,
            torch.get_num_threads(),
            self._num_blocks * BLOCK_SIZE,
            num_rows,
            kv_cache_dtype=kv_cache_dtype,
        )

    def turn(self, num_steps: int) -> Figures:
        """Decode some tokens of each row."""
        step_ids = self._begin()
        for _ in range(WARM_UP):
            execute(self._worker, Step(1, next(step_ids), TableDelta()))
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            execute(self._worker, Step(1, next(step_ids), TableDelta()))
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        num_tokens = self._num_rows * num_steps
        return {"tokens/s": num_tokens / seconds, "CPU of a step, ms": 1000 * cpu_s / num_steps}

    def _begin(self) -> "itertools.count[int]":
        """Compute the context of one row, and copy its blocks for the others."""
        worker, num_blocks = self._worker, self._num_blocks
        worker.reset()
        (prompt,) = random_prompts(worker, 1, self._context)
        step_ids = itertools.count(1)
        for step in prompt_steps(worker, [prompt], num_blocks * BLOCK_SIZE, CHUNK):
            execute(worker, replace(step, step_id=next(step_ids)))
        blocks = np.arange(self._num_rows * num_blocks, dtype=np.int32).reshape(self._num_rows, num_blocks)
        admissions = tuple(
            Admission(slot, 1, prompt, len(prompt), len(prompt) - 1, blocks[slot], SamplingRow())
            for slot in range(1, self._num_rows)
        )
        chunks = pairs(*((slot, 1) for slot in range(1, self._num_rows)))
        copies = np.stack((np.tile(blocks[0], self._num_rows - 1), blocks[1:].ravel()), 1)
        delta = TableDelta(admissions=admissions, prefill_chunks=chunks)
        execute(worker, Step(1, next(step_ids), delta, blocks_to_copy=copies))
        return step_ids
