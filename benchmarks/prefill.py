"""Time to the first token of long prompts on a CPU, and the share of attention in it: the executor alone, without RPC.

    python -m benchmarks.prefill [--lengths 512 2000 8000] [--quantization none int8] [--chunk 2048] [--json]

One prompt at a time, cut into chunks as the scheduler cuts it (`--chunk` is its `--max-num-batched-tokens`), greedy.
The time is from the first chunk to the sampled token. Attention is timed by itself on the same chunks, with a cache of
the model's shape, and counted for all layers; its FLOP are those of what a query sees, so what is computed and then
hidden lowers the rate. Rounds take turns, and the table has the fastest of each: other work on the machine only adds.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.machine import describe_machine
from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, LayerCache
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.config import ExecutorConfig
from executor_svc.native.library import load_library
from executor_svc.worker.interface import Worker, execute
from executor_svc.worker.loading import load_worker
from octavo.models.store import prepare_model
from shared.step import Admission, SamplingRow, Step, TableDelta, pairs

BLOCK_SIZE = 16
FIRST_ORDINARY_ID = 100  # below are special tokens in the demo model


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention does in a model, as if no layer had a window."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def flops(self, num_tokens: int) -> float:
        """Operations of the attention of a prompt: two products, each multiply-add two of them."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * num_tokens * (num_tokens + 1) / 2


@dataclass(frozen=True, slots=True)
class Measurement:
    """The fastest of the rounds of one prompt."""

    quantization: str
    num_tokens: int
    first_token_ms: float
    attention_ms: float
    attention_gflops: float

    @property
    def attention_share(self) -> float:
        """Of the time to the first token."""
        return self.attention_ms / self.first_token_ms


def chunks_of(num_tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield where each chunk begins, and its length."""
    for begin in range(0, num_tokens, chunk):
        yield begin, min(chunk, num_tokens - begin)


def first_token_s(worker: Worker, num_tokens: int, chunk: int, seed: int) -> float:
    """Return the seconds of one prompt."""
    worker.reset()
    prompt = np.random.default_rng(seed).integers(FIRST_ORDINARY_ID, worker.info.vocab_size, num_tokens)
    blocks = np.arange(-(-(num_tokens + 1) // BLOCK_SIZE), dtype=np.int32)
    admissions: tuple[Admission, ...] = (
        Admission(0, 1, prompt.astype(np.int32), num_tokens, 0, blocks, SamplingRow()),
    )
    started = time.perf_counter()
    for number, (_, length) in enumerate(chunks_of(num_tokens, chunk)):
        delta = TableDelta(admissions=admissions, prefill_chunks=pairs((0, length)))
        admissions = ()
        execute(worker, Step(1, number + 1, delta))
    return time.perf_counter() - started


def attention_s(backend: NativeAttentionBackend, heads: Heads, num_tokens: int, chunk: int) -> float:
    """Return the seconds of the attention of one prompt, all layers."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    shape = (num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    caches = [LayerCache(torch.rand(shape), torch.rand(shape)) for _ in range(2)]  # so that each is cold again
    tables, elapsed_s = np.arange(num_blocks, dtype=np.int32)[None], 0.0
    for begin, length in chunks_of(num_tokens, chunk):
        metadata = AttentionMetadata(
            np.array([begin], np.int32), np.array([length], np.int32), tables, torch.arange(begin, begin + length)
        )
        qkv = torch.rand(length, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        plan = backend.plan(metadata, caches[0])
        for cache in caches:
            started = time.perf_counter()
            plan.attend(qkv, None, cache, AttentionLayer(heads.head_dim**-0.5))
            elapsed_s += time.perf_counter() - started
    return elapsed_s / len(caches) * heads.num_layers


def heads_of(directory: Path) -> Heads:
    """Return what attention does in a model."""
    config = AutoConfig.from_pretrained(directory)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return Heads(config.num_hidden_layers, config.num_attention_heads, num_kv_heads, head_dim)


def measure(arguments: argparse.Namespace) -> list[Measurement]:
    """Run all prompts in turns."""
    torch.set_num_threads(arguments.threads)
    directory, longest = arguments.model or prepare_model("smollm2"), max(arguments.lengths)
    workers = {
        quantization: load_worker(
            ExecutorConfig(
                model=str(directory),
                dtype="float32",
                quantization=quantization,
                num_threads=arguments.threads,
                block_size_tokens=BLOCK_SIZE,
                num_device_blocks=-(-(longest + 1) // BLOCK_SIZE),
                num_host_blocks=0,
                max_num_batched_tokens=max(arguments.chunk, 256),
            )
        )
        for quantization in arguments.quantization
    }
    heads = heads_of(directory)
    backend = NativeAttentionBackend(load_library(arguments.threads))
    for worker in workers.values():  # memory, and the team's size
        first_token_s(worker, min(arguments.lengths), arguments.chunk, seed=0)
    first: dict[tuple[str, int], float] = {}
    attention: dict[int, float] = {}
    for round_index in range(arguments.rounds):
        for num_tokens in arguments.lengths:
            for quantization, worker in workers.items():
                found = first_token_s(worker, num_tokens, arguments.chunk, seed=1 + round_index)
                key = quantization, num_tokens
                first[key] = min(first.get(key, found), found)
            found = attention_s(backend, heads, num_tokens, arguments.chunk)
            attention[num_tokens] = min(attention.get(num_tokens, found), found)
    return [
        Measurement(
            quantization, tokens, 1e3 * found, 1e3 * attention[tokens], heads.flops(tokens) / attention[tokens] / 1e9
        )
        for (quantization, tokens), found in sorted(first.items(), key=lambda item: item[0][1])
    ]


def result_table(measurements: Sequence[Measurement]) -> Table:
    """Return the figures, one prompt a line."""
    table = Table(title="Time to the first token on a CPU, the executor alone")
    for heading in ("tokens", "weights", "first token, ms", "tokens/s", "attention, ms", "share", "attention, GFLOP/s"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    for found in measurements:
        table.add_row(
            f"{found.num_tokens:,}",
            "float32" if found.quantization == "none" else found.quantization,
            f"{found.first_token_ms:,.0f}",
            f"{1e3 * found.num_tokens / found.first_token_ms:,.0f}",
            f"{found.attention_ms:,.0f}",
            f"{100 * found.attention_share:.0f} %",
            f"{found.attention_gflops:.0f}",
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time to the first token on a CPU, and the share of attention in it.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2000, 8000], help="of prompts, in tokens")
    parser.add_argument(
        "--quantization", nargs="+", default=["none", "int8"], help="of the executor; several take turns"
    )
    parser.add_argument("--chunk", type=int, default=2048, help="most tokens of a step (default: 2048)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the executor (default: cores)")
    parser.add_argument("--rounds", type=int, default=3, help="of each prompt; the fastest counts (default: 3)")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the demo model)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    arguments = parser.parse_args()
    measurements = measure(arguments)
    if arguments.json:
        figures = [{**asdict(found), "attention_share": found.attention_share} for found in measurements]
        settings = {"chunk": arguments.chunk, "threads": arguments.threads, "rounds": arguments.rounds}
        print(json.dumps({"machine": describe_machine(), **settings, "prompts": figures}))
        return
    console = Console()
    console.print(result_table(measurements))
    threads = f"{arguments.threads} thread{'s' * (arguments.threads > 1)}"
    console.print(f"chunks of {arguments.chunk:,} tokens, {threads}, {describe_machine()}")


if __name__ == "__main__":
    main()
