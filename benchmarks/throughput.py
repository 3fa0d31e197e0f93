"""Output tokens a second of the whole stack beside transformers' `generate`, in one run.

    python -m benchmarks.throughput [--rounds 3] [--model DIRECTORY] [--cpu-kernels auto] [--streams 1 32]

Two workloads of random token ids, greedy, end-of-sequence ignored: one stream and 32 streams, each 128 tokens in and
128 out. One stream is measured as it decodes, without the time to the first token, which a request for one token takes
with another prompt; several as a whole, prompts included. Octavo runs as users run it: client, scheduler and executor
in three processes over gRPC, once with float32 weights and once with `--quantization int8`. transformers runs the same
ids as one batch in this process, float32, same number of threads. All take turns, so that a slow spell of the machine
hits all; the table has the median of each, and the median over the rounds of its ratio to transformers.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.machine import describe_machine
from octavo.client import Client
from octavo.local import LocalServices
from octavo.local_options import LocalOptions
from octavo.models.store import prepare_model
from octavo.sampling_params import SamplingParams

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
STREAMS = (1, 32)
SYSTEMS = ("octavo", "octavo int8", "transformers")
FIRST_ORDINARY_ID = 100  # below are special tokens in the demo model


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one workload; of one stream the rate of decoding, of several that of the whole run."""

    system: str
    num_streams: int
    output_tokens_per_s: float


def random_prompts(num_streams: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return fresh prompts, so that no cache of an earlier run helps; [num_streams][PROMPT_TOKENS]."""
    generator = np.random.default_rng(seed)
    return generator.integers(FIRST_ORDINARY_ID, vocab_size, (num_streams, PROMPT_TOKENS)).tolist()  # type: ignore[no-any-return]


async def run_octavo(client: Client, prompts: list[list[int]], num_output_tokens: int) -> float:
    """Return the seconds of one run through both services."""
    params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = await asyncio.gather(*(client.generate(prompt, params) for prompt in prompts))
    elapsed_s = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_tokens == len(prompts) * num_output_tokens, "a stream ended early"
    return elapsed_s


async def run_transformers(model: torch.nn.Module, prompts: list[list[int]], num_output_tokens: int) -> float:
    """Return the seconds of one `generate` with the same prompts as a batch."""
    input_ids = torch.tensor(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=num_output_tokens,
            max_new_tokens=num_output_tokens,
        )
    elapsed_s = time.perf_counter() - started
    assert output.shape == (len(prompts), PROMPT_TOKENS + num_output_tokens)
    return elapsed_s


Run = Callable[[list[list[int]], int], Awaitable[float]]


async def measure_rate(run: Run, num_streams: int, vocab_size: int, seed: int) -> float:
    """Return the output tokens a second of one run; see `Measurement`."""
    first_token_s = 0.0
    if num_streams == 1:
        first_token_s = await run(random_prompts(1, vocab_size, seed=1_000 + seed), 1)
    elapsed_s = await run(random_prompts(num_streams, vocab_size, seed), OUTPUT_TOKENS)
    num_tokens = OUTPUT_TOKENS - 1 if num_streams == 1 else num_streams * OUTPUT_TOKENS
    return num_tokens / (elapsed_s - first_token_s)


async def measure(
    model_directory: Path, num_rounds: int, cpu_kernels: str, streams: Sequence[int]
) -> list[Measurement]:
    """Run all systems in turns."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    vocab_size = model.config.vocab_size
    measurements: list[Measurement] = []
    options = LocalOptions(model_directory, {"dtype": "float32"})
    async with AsyncExitStack() as stack:
        runs: dict[str, Run] = {"transformers": partial(run_transformers, model)}
        for system, quantization in (("octavo", "none"), ("octavo int8", "int8")):
            command = [*options.executor_command(), "--quantization", quantization, "--cpu-kernels", cpu_kernels]
            services = await stack.enter_async_context(LocalServices(command, options.scheduler_command()))
            client = await stack.enter_async_context(Client(services.address))
            runs[system] = partial(run_octavo, client)
        for run in runs.values():
            await run(random_prompts(2, vocab_size, seed=0), OUTPUT_TOKENS)
        with Progress() as progress:
            task = progress.add_task("measuring", total=num_rounds * len(streams) * len(SYSTEMS))
            for round_index in range(num_rounds):
                for num_streams in streams:
                    for system in SYSTEMS:
                        rate = await measure_rate(runs[system], num_streams, vocab_size, seed=1 + round_index)
                        measurements.append(Measurement(system, num_streams, rate))
                        progress.advance(task)
    return measurements


def result_table(measurements: list[Measurement], streams: Sequence[int]) -> Table:
    """Return medians, ranges and ratios."""
    table = Table(title=f"Output tokens a second, {PROMPT_TOKENS} in, {OUTPUT_TOKENS} out, on CPU")
    for heading in ("streams", "system", "tokens/s", "range", "ratio to transformers"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for num_streams in streams:
        rates = {
            system: [m.output_tokens_per_s for m in measurements if (m.system, m.num_streams) == (system, num_streams)]
            for system in SYSTEMS
        }
        for system, values in rates.items():
            ratio = statistics.median(a / b for a, b in zip(values, rates["transformers"], strict=True))
            median = f"{statistics.median(values):.1f}"
            table.add_row(str(num_streams), system, median, f"{min(values):.1f} to {max(values):.1f}", f"{ratio:.2f}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Output tokens a second beside transformers, in one run.")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each workload and system (default: 3)")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the demo model)")
    parser.add_argument("--cpu-kernels", default="auto", help="of the executor: auto, native or torch")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="workloads (default: 1 32)")
    arguments = parser.parse_args()
    console = Console()
    model_directory = arguments.model or prepare_model("smollm2")
    measurements = asyncio.run(measure(model_directory, arguments.rounds, arguments.cpu_kernels, arguments.streams))
    console.print(result_table(measurements, arguments.streams))
    console.print(describe_machine())


if __name__ == "__main__":
    main()
