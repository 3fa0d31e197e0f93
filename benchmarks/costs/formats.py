"""Scenarios of number formats: products of the C library, and decode steps by format of the KV cache."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.costs.harness import Figures, Groups, Size, Way, in_turn, scenario
from benchmarks.costs.workers import BLOCK_SIZE, IN_BFLOAT16, new_worker, prompt_steps, random_prompts, title
from executor_svc.attention.cache_format import CACHE_DTYPES
from executor_svc.checkpoint.gguf.rounding import block_size
from executor_svc.checkpoint.scaled_codes import E4M3, INT8, MXFP4, NVFP4, UINT4_G32, UINT4_G128
from executor_svc.native.binding import WeightMemory
from executor_svc.native.library import NativeLibrary, load_library
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import K_FORMATS, NumberFormat
from executor_svc.worker.interface import execute
from octavo_shared.step_wire.step import Admission, SamplingRow, Step, TableDelta, pairs

# Outputs and inputs: attention, both halves of an MLP, and the head of SmolLM2-135M; an MLP of about 1B weights.
SHAPES = ((576, 576), (1536, 576), (576, 1536), (49152, 576), (8192, 2048), (2048, 8192))
PRODUCT_ROWS = (1, 8, 32, 512)
WEIGHT_FORMATS = tuple(number_format for number_format in NumberFormat if number_format not in K_FORMATS)
# Formats of files without a quantization; the type of their blocks.
BLOCK_TYPES = {
    NumberFormat.FP8: E4M3.block_type,
    NumberFormat.INT8_A32: INT8.block_type,
    NumberFormat.MXFP4: MXFP4.block_type,
    NumberFormat.INT4_G32: UINT4_G32.block_type,
    NumberFormat.INT4_G128: UINT4_G128.block_type,
    NumberFormat.NVFP4: NVFP4.block_type,
}
LEAST_OPERATIONS = 4e8  # of a turn


@scenario("products", "products of float32 rows with weights in each number format, one thread, CPU time", pairs=7)
async def products(size: Size) -> Groups:
    """The rounding of rows is part of it. No model multiplies 512 rows with its head."""
    library = load_library(1)
    for (num_outputs, num_inputs), rows in size.of(
        [(shape, rows) for shape in SHAPES for rows in PRODUCT_ROWS if rows * shape[0] < 2**24], [((50, 96), 3)]
    ):
        name = f"{num_outputs:,} x {num_inputs:,}, {rows} rows, "
        yield [
            Way(
                name + number_format.name,
                in_turn(product_turn, library, matrix_of(library, number_format, num_outputs, num_inputs), rows),
                beside=name + NumberFormat.FLOAT32.name if number_format else "",
            )
            for number_format in WEIGHT_FORMATS
        ]


def matrix_of(library: NativeLibrary, number_format: NumberFormat, num_outputs: int, num_inputs: int) -> PackedMatrix:
    formats = [(number_format, [num_outputs])]
    matrix = PackedMatrix(library, num_inputs, formats, has_bias=False, memory=WeightMemory())
    generator = torch.Generator().manual_seed(1)
    if (block_type := BLOCK_TYPES.get(number_format)) is None:
        matrix.weights[0].copy_(torch.randn(num_outputs, num_inputs, generator=generator))
        return matrix
    block_inputs, block_bytes = block_size(block_type)
    num_bytes = -(-num_inputs // block_inputs) * block_bytes
    # As scales, too, such bytes are small numbers.
    blocks = torch.randint(32, 64, (num_outputs, num_bytes), generator=generator, dtype=torch.uint8)
    is_exact = matrix.weights[0].copy_blocks(blocks, block_type, None)
    assert is_exact, "all scales are numbers"
    return matrix


def product_turn(library: NativeLibrary, matrix: PackedMatrix, num_rows: int) -> Figures:
    """Return how many floating-point operations a nanosecond has."""
    x, out = torch.randn(num_rows, matrix.num_inputs), torch.empty(num_rows, matrix.num_outputs)
    num_operations = 2 * num_rows * matrix.num_inputs * matrix.num_outputs
    num_times = max(1, int(LEAST_OPERATIONS / num_operations))
    library.linear(matrix.struct, x, out)
    began_ns = time.thread_time_ns()
    for _ in range(num_times):
        library.linear(matrix.struct, x, out)
    return {"GFLOP/s": num_times * num_operations / (time.thread_time_ns() - began_ns)}


CACHE_ROWS, CONTEXT = 32, 2000
CHUNK = 2048  # tokens
WARM_UP = 3  # steps

CACHE_FORMATS: Sequence[str] = [name for name in CACHE_DTYPES if name != "float32"]


@scenario(
    "cache", "decoded tokens a second of 32 rows with 2,000 tokens of context, by format of the KV cache", pairs=6
)
async def cache(size: Size) -> Groups:
    """Without RPC, greedy. The rows have one prompt in blocks of their own."""
    rows, context, num_steps = size.of(CACHE_ROWS, 2), size.of(CONTEXT, 20), size.of(8, 2)
    for number_format in size.of(("none", "int8-a8"), ("none",)):
        exact = LongRows(size, number_format, "float32", rows, context)
        for name in size.of(CACHE_FORMATS, CACHE_FORMATS[2:3]):
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
