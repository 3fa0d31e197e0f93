"""Executor's workers without a service, and the steps that the scenarios give them."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.end_to_end.workloads import FIRST_ORDINARY_ID
from executor_svc.config import ExecutorConfig
from executor_svc.worker.interface import Worker, execute
from executor_svc.worker.loading import load_worker
from octavo_shared.step_wire.step import (
    NO_RESOURCES,
    Adapter,
    AdapterLoad,
    Admission,
    Int32Array,
    Resources,
    SamplingRow,
    Step,
    TableDelta,
    pairs,
)

BLOCK_SIZE = 16
IN_BFLOAT16 = "in bfloat16 "


def title(number_format: str) -> str:
    return "float32" if number_format == "none" else number_format.strip()


def new_worker(
    directory: Path,
    number_format: str,
    num_threads: int,
    num_tokens: int,
    num_rows: int = 1,
    chunk: int = 2048,
    kv_cache_dtype: str = "auto",
    lora_dir: Path | None = None,
) -> Worker:
    """Load a model, with room for so many tokens in each row.

    `number_format` is of the weights; behind IN_BFLOAT16 all is computed in bfloat16. Adapters may be in `lora_dir`.
    """
    config = {
        "model": str(directory),
        "dtype": "float32",
        "quantization": number_format.removeprefix(IN_BFLOAT16) or "none",
        "compute_dtype": "bfloat16" if number_format.startswith(IN_BFLOAT16) else "float32",
        "kv_cache_dtype": kv_cache_dtype,
        "num_threads": num_threads,
        "block_size_tokens": BLOCK_SIZE,
        "num_device_blocks": num_rows * -(-num_tokens // BLOCK_SIZE),
        "num_host_blocks": 0,
        "max_num_batched_tokens": max(chunk, 256),
        "lora_dir": () if lora_dir is None else (str(lora_dir),),
    }
    return load_worker(ExecutorConfig.model_validate(config))


def prompt_steps(
    worker: Worker,
    prompts: Sequence[Int32Array],
    num_tokens: int,
    chunk: int,
    step_ids: Iterator[int] | None = None,
    num_adapters: int = 0,
) -> Iterator[Step]:
    """Yield the steps that compute prompts, one after the other.

    Rows have blocks for `num_tokens`, and the adapters in turns.
    """
    num_blocks, step_ids = -(-num_tokens // BLOCK_SIZE), step_ids or itertools.count(1)
    for slot, prompt in enumerate(prompts):
        blocks = np.arange(slot * num_blocks, (slot + 1) * num_blocks, dtype=np.int32)
        own = Resources(adapter_slot=slot % num_adapters) if num_adapters else NO_RESOURCES
        admissions: tuple[Admission, ...] = (
            Admission(slot, 1, prompt, len(prompt), 0, blocks, SamplingRow(), resources=own),
        )
        for _, length in chunks_of(len(prompt), chunk):
            delta = TableDelta(admissions=admissions, prefill_chunks=pairs((slot, length)))
            admissions = ()
            yield Step(1, next(step_ids), delta)


def chunks_of(num_tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield where each chunk begins, and its length."""
    return ((begin, min(chunk, num_tokens - begin)) for begin in range(0, num_tokens, chunk))


class Decoding:
    """Rows with random prompts that decode a token a step, for so many steps at most; with adapters in turns."""

    def __init__(
        self, worker: Worker, num_rows: int, context: int, most_steps: int, adapters: Sequence[str] = ()
    ) -> None:
        self._worker, self._step_ids = worker, itertools.count(1)
        prompts = random_prompts(worker, num_rows, context)
        worker.reset()
        self._load(adapters)
        num_tokens = decode_tokens(num_rows, context, most_steps)
        for step in prompt_steps(worker, prompts, num_tokens, context, self._step_ids, len(adapters)):
            execute(worker, step)

    def _load(self, adapters: Sequence[str]) -> None:
        delta = TableDelta(adapter_loads=tuple(AdapterLoad(slot, Adapter(one)) for slot, one in enumerate(adapters)))
        num_loaded = 0
        while num_loaded < len(adapters):
            ended = execute(self._worker, Step(1, next(self._step_ids), delta)).adapters_loaded
            assert not any(end.error for end in ended), ended
            num_loaded, delta = num_loaded + len(ended), TableDelta()

    def step(self) -> None:
        """Decode one token of each row."""
        execute(self._worker, Step(1, next(self._step_ids), TableDelta()))


def decode_tokens(num_rows: int, context: int, most_steps: int) -> int:
    """Return what the longest row needs: the first prompts decode while the others are computed."""
    return context + num_rows + most_steps + 1


def random_prompts(worker: Worker, num_rows: int, num_tokens: int, seed: int = 0) -> list[Int32Array]:
    shape, lowest = (num_rows, num_tokens), min(FIRST_ORDINARY_ID, worker.info.vocab_size // 2)
    return list(np.random.default_rng(seed).integers(lowest, worker.info.vocab_size, shape, dtype=np.int32))
