"""What sampling costs beside a step of the model: each feature by itself, and all at once.

    python -m benchmarks.sampler [--rounds 30] [--model DIRECTORY] [--cpu-kernels auto]

32 rows with histories of 256 tokens, on logits that the demo model has after pieces of this project's text;
the step decodes one token behind each of these pieces, greedily. Model and sampler use the same kernels. Samplers
and steps take turns, so that a slow spell of the machine hits all; the table has the median of each and its share
of the step.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.machine import describe_machine
from executor_svc.config import ExecutorConfig
from executor_svc.models.kernels import CpuKernels
from executor_svc.native.build import NativeUnavailableError
from executor_svc.native.sampling import load_sampling
from executor_svc.sampler.sample_rows import SampleRows
from executor_svc.sampler.sampler import Sampler
from executor_svc.worker.interface import execute
from executor_svc.worker.loading import load_worker
from executor_svc.worker.torch_worker import TorchWorker
from octavo.models.store import prepare_model
from shared.step import SAMPLING_ROW, Admission, Int32Array, SamplingRow, Step, TableDelta, pairs
from shared.token_rules import TokenRules, pack_mask, pad_words

NUM_ROWS = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
TEXTS = "README.md", "ARCHITECTURE.md"
LEAST_ROUNDS, MOST_ROUNDS = 30, OUTPUT_TOKENS - 1


def rules_of(vocab_size: int) -> dict[str, TokenRules]:
    """Return rules of every kind, by name, and all of them together."""
    generator = np.random.default_rng(0)

    def some(count: int) -> Int32Array:
        return generator.choice(vocab_size, count, replace=False).astype(np.int32)

    everything = TokenRules(
        biased_token_ids=some(300),
        biases=np.ones(300, np.float32),
        stop_token_ids=some(3),
        banned_token_ids=some(1024),
        banned_words=pad_words(some(256).reshape(64, 4).tolist()),
        allowed_mask=pack_mask(some(vocab_size // 2), vocab_size),
    )
    return {
        "logit_bias, 300 tokens": TokenRules(everything.biased_token_ids, everything.biases),
        "banned ids, 1,024": TokenRules(banned_token_ids=everything.banned_token_ids),
        "banned words, 64 of 4 tokens": TokenRules(banned_words=everything.banned_words),
        "min_tokens": TokenRules(stop_token_ids=everything.stop_token_ids),
        "allowed ids, half": TokenRules(allowed_mask=everything.allowed_mask),
        "everything": everything,
    }


def cases(vocab_size: int) -> dict[str, tuple[SamplingRow, TokenRules | None]]:
    """Return how all rows are sampled, by name."""
    rules = rules_of(vocab_size)
    long = PROMPT_TOKENS + OUTPUT_TOKENS
    everything = SamplingRow(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.02,
        typical_p=0.95,
        num_logprobs=20,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        min_tokens=long,
    )
    return {
        "greedy": (SamplingRow(), None),
        "temperature": (SamplingRow(temperature=0.8), None),
        "top-k 50": (SamplingRow(temperature=0.8, top_k=50), None),
        "top-p 0.95": (SamplingRow(temperature=0.8, top_p=0.95), None),
        "min-p 0.05": (SamplingRow(temperature=0.8, min_p=0.05), None),
        "typical-p 0.95": (SamplingRow(temperature=0.8, typical_p=0.95), None),
        "repetition penalty": (SamplingRow(repetition_penalty=1.1), None),
        "presence, frequency": (SamplingRow(presence_penalty=0.5, frequency_penalty=0.5), None),
        **{name: (SamplingRow(min_tokens=long), rule) for name, rule in rules.items() if name != "everything"},
        "logprobs": (SamplingRow(num_logprobs=0), None),
        "logprobs, 20 alternatives": (SamplingRow(num_logprobs=20), None),
        "everything": (everything, rules["everything"]),
    }


def sample_rows(sampling: SamplingRow, rules: TokenRules | None, vocab_size: int) -> SampleRows:
    """Return `NUM_ROWS` rows with random histories, all sampled alike but for their seeds."""
    table = np.array([sampling.as_tuple()] * NUM_ROWS, SAMPLING_ROW)
    table["seed"] = np.arange(NUM_ROWS)
    shape = NUM_ROWS, PROMPT_TOKENS + OUTPUT_TOKENS
    return SampleRows(
        sampling=table,
        rules=[rules] * NUM_ROWS,
        slots=np.arange(NUM_ROWS, dtype=np.int32),
        num_tokens=np.full(NUM_ROWS, shape[1], np.int32),
        num_prompt_tokens=np.full(NUM_ROWS, PROMPT_TOKENS, np.int32),
        token_ids=np.random.default_rng(1).integers(0, vocab_size, shape).astype(np.int32),
    )


def text_prompts(directory: Path) -> Int32Array:
    """Return `NUM_ROWS` pieces of this project's own text, [NUM_ROWS, PROMPT_TOKENS]."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "".join(Path(name).read_text(encoding="utf-8") for name in TEXTS)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids[: NUM_ROWS * PROMPT_TOKENS]
    return np.array(token_ids, np.int32).reshape(NUM_ROWS, PROMPT_TOKENS)


def decoding_step(worker: TorchWorker, prompts: Int32Array) -> Callable[[], object]:
    """Bring sequences to the end of their prompts; return what decodes one token of each."""
    block_size = worker.info.block_size_tokens
    num_blocks = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // block_size)
    step_ids = iter(range(1, 1_000_000))
    for slot, prompt in enumerate(prompts):
        blocks = np.arange(slot * num_blocks, (slot + 1) * num_blocks, dtype=np.int32)
        admission = Admission(slot, 1, prompt, PROMPT_TOKENS, 0, blocks, SamplingRow())
        delta = TableDelta(admissions=(admission,), prefill_chunks=pairs((slot, PROMPT_TOKENS)))
        execute(worker, Step(1, next(step_ids), delta))
    return lambda: execute(worker, Step(1, next(step_ids), TableDelta()))


def make_sampler(cpu_kernels: CpuKernels) -> Sampler:
    """Return a sampler with the C library, or without it: "torch" was asked for, or "auto" and it cannot be had."""
    if cpu_kernels == "torch":
        return Sampler()
    try:
        return Sampler(load_sampling(torch.get_num_threads()))
    except NativeUnavailableError:
        if cpu_kernels == "native":
            raise
        return Sampler()


def measure(
    directory: Path, num_rounds: int, cpu_kernels: CpuKernels
) -> tuple[list[float], dict[str, list[float]], int]:
    """Return the times of the step and of each case in seconds, and the size of the vocabulary."""
    prompts = text_prompts(directory)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        logits = model(torch.from_numpy(prompts.astype(np.int64)), logits_to_keep=1).logits[:, 0].contiguous()
    worker = load_worker(
        ExecutorConfig(model=str(directory), dtype="float32", num_device_blocks=1024, num_host_blocks=0)
    )
    vocab_size = worker.info.vocab_size
    decode, sampler = decoding_step(worker, prompts), make_sampler(cpu_kernels)
    rows = {name: sample_rows(*how, vocab_size) for name, how in cases(vocab_size).items()}
    every_row = np.arange(NUM_ROWS, dtype=np.int32)
    steps: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in rows}
    with torch.inference_mode():
        for _ in range(num_rounds):
            started = time.perf_counter()
            decode()
            steps.append(time.perf_counter() - started)
            for name, these in rows.items():
                started = time.perf_counter()
                sampler.sample(logits, every_row, these)
                times[name].append(time.perf_counter() - started)
    return steps, times, vocab_size


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What sampling costs beside a step of the model.")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, help="times that each is measured (default: 30)")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the demo model)")
    parser.add_argument("--cpu-kernels", choices=get_args(CpuKernels), default="auto", help="(default: auto)")
    arguments = parser.parse_args()
    if not LEAST_ROUNDS <= arguments.rounds <= MOST_ROUNDS:
        parser.error(f"--rounds is {arguments.rounds}; it is {LEAST_ROUNDS} to {MOST_ROUNDS}")
    steps, times, vocab_size = measure(
        arguments.model or prepare_model("smollm2"), arguments.rounds, arguments.cpu_kernels
    )
    step_s = statistics.median(steps)
    table = Table(title=f"Sampling {NUM_ROWS} rows of {vocab_size} logits; a step takes {step_s * 1e3:.1f} ms")
    table.add_column("sampling")
    for heading in ("median ms", "least ms", "share of the step"):
        table.add_column(heading, justify="right")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        table.add_row(name, f"{median * 1e3:.2f}", f"{min(seconds) * 1e3:.2f}", f"{median / step_s:.1%}")
    console = Console()
    console.print(table)
    console.print(describe_machine())


if __name__ == "__main__":
    main()
