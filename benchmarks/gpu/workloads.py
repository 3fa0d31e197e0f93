"""Workloads that others publish figures of, and decodes at long contexts: what a card is compared by.

Lengths are numbers, and tokens are random: there are no texts. The figures of others are of an H100 (80 GB) where
nothing else is said.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.engine import InProcessEngine, Prompt, Run
from benchmarks.gpu.measurements import copy_figure, idle_figure, worker_of
from benchmarks.gpu.models import LLAMA_8B, num_weight_bytes
from benchmarks.gpu.part import Figure
from benchmarks.gpu.sizes import Sizes, free_memory
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.step_wire.step import SamplingRow

# By the names of config.json: what nano-vllm's benchmark runs, and a mixture of experts of which 3 B are active.
QWEN3_0_6B: Mapping[str, Any] = {
    **LLAMA_8B,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
}
QWEN3_30B_A3B: Mapping[str, Any] = {
    **QWEN3_0_6B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 12,  # of 48: a step is so much shorter
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
# Steps of a decode that are measured.
MEASURED_STEPS = 24


def nano_vllm_prompts(num_requests: int, most: int, vocab_size: int) -> list[Prompt]:
    """Return what nano-vllm's bench.py asks for: its numbers, drawn as it draws them, as far as a vocabulary has them.

    With 256 requests of up to 1,024 tokens these are 133,966 output tokens. Source: GeeeekExplorer/nano-vllm, bench.py.
    """
    generator, least = random.Random(0), min(100, most)
    lengths: list[list[int]] = []
    for _ in range(num_requests):
        length = generator.randint(least, most)
        lengths.append([generator.randint(0, 10_000) % vocab_size for _ in range(length)])
    sampling = SamplingRow(temperature=0.6, seed=1)
    return [Prompt(np.array(token_ids, np.int32), generator.randint(least, most), sampling) for token_ids in lengths]


def sharegpt_prompts(num_requests: int, longest: int, vocab_size: int) -> list[Prompt]:
    """Return requests as long as conversations of ShareGPT are on average.

    vLLM's reports of 1,000 requests, as its benchmark samples them, have 215,000 to 217,000 prompt tokens and 197,000
    to 199,000 output tokens. Lengths are drawn from logarithmic normal distributions with about these sums, cut where
    that benchmark drops requests: they are not those of the data set.
    """
    generator = np.random.default_rng(0)

    def draw(mean: float, spread: float, most: int) -> list[int]:
        numbers = generator.lognormal(np.log(mean) - spread**2 / 2, spread, num_requests)
        return [int(number) for number in np.clip(numbers * most / 1024, 4, most)]

    return [
        Prompt(generator.integers(3, vocab_size, num_in, dtype=np.int32), num_out)
        for num_in, num_out in zip(draw(250, 1.06, longest), draw(221, 1.21, longest), strict=True)
    ]


def workloads_figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Measure output tokens a second of what others publish."""
    small = sizes.published_model or QWEN3_0_6B
    prompts = nano_vllm_prompts(sizes.num_published_requests // 4 or 1, sizes.published_tokens, small["vocab_size"])
    yield from _of_requests(
        "nano-vllm's benchmark, 0.6 B",
        small,
        prompts,
        sizes,
        device,
        detail="published: 15,068 with 1 B on an A800",
    )
    large = sizes.large_model
    prompts = sharegpt_prompts(sizes.num_published_requests, sizes.published_tokens, large["vocab_size"])
    detail = "published: SGLang 16,215, LMDeploy 16,132, vLLM 12,553"
    yield from _of_requests("lengths of ShareGPT, 8 B", large, prompts, sizes, device, 16_000.0, detail)


def contexts_figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Measure decodes at long contexts beside the bytes that they must read, at the copy bandwidth."""
    copy = copy_figure(sizes, device)
    yield copy
    for name, model in (("1 B", sizes.small_model), ("8 B", sizes.large_model)):
        most = max(sizes.context_batch_sizes)
        worker = worker_of(model, sizes, device, most)
        for size in sizes.context_batch_sizes:
            target = 1.35 if name == "1 B" and size == most else None
            yield _context_figure(name, worker, model, size, sizes, copy.value * 1e9, target)
        del worker
        free_memory(device)
    experts = sizes.published_model or QWEN3_30B_A3B
    worker = worker_of(experts, sizes, device, 32)
    yield _context_figure("30B-A3B, 12 layers", worker, experts, 32, sizes, copy.value * 1e9, 2.0, 16)


def _of_requests(
    name: str,
    model: Mapping[str, Any],
    prompts: Sequence[Prompt],
    sizes: Sizes,
    device: torch.device,
    target: float | None = None,
    detail: str = "",
) -> Iterator[Figure]:
    worker = worker_of(model, sizes, device, sizes.workload.batch_size)
    run = InProcessEngine(worker).generate(prompts)
    del worker
    free_memory(device)
    num_in = sum(len(prompt.token_ids) for prompt in prompts)
    about = f"{len(prompts)} requests, {num_in:,} prompt and {run.num_output_tokens:,} output tokens; {detail}"
    yield Figure(f"output tokens, {name}", run.num_output_tokens / run.wall_s, "tokens/s", target, detail=about)
    yield idle_figure(run, sizes.workload.batch_size, of=name, target=2.0)
    yield launch_figure(run, name)


def launch_figure(run: Run, name: str) -> Figure:
    """Return the processor time that the host takes for launching a step, the median."""
    seconds = float(np.median(run.launch_cpu_s))
    return Figure(f"CPU time of launching a step, {name}", 1e3 * seconds, "ms", 0.5, at_most=True)


def _context_figure(
    name: str,
    worker: TorchWorker,
    model: Mapping[str, Any],
    num_rows: int,
    sizes: Sizes,
    copy_rate: float,
    target: float | None,
    num_tokens: int | None = None,
) -> Figure:
    """Measure steps in which all rows decode; as many rows as the cache has room for."""
    num_tokens = num_tokens or sizes.context_tokens
    # The first ones decode while the last ones are computed: they get so many more tokens.
    num_ahead = 2 * num_rows * num_tokens // sizes.max_num_batched_tokens + 4
    longest = num_tokens + num_ahead + MEASURED_STEPS
    info = worker.info
    num_rows = min(num_rows, info.num_device_blocks // -(-longest // info.block_size_tokens))
    prompt = Prompt(3 + np.arange(num_tokens, dtype=np.int32) % 90, num_ahead + MEASURED_STEPS)
    worker.reset()
    run = InProcessEngine(worker).generate([prompt] * num_rows)
    step_s = float(np.median(run.step_s[num_ahead : num_ahead + MEASURED_STEPS]))
    cache_bytes = num_rows * (num_tokens + num_ahead) * _bytes_of_token(model, sizes.dtype.itemsize)
    weight_bytes = _weight_bytes(model, num_rows, sizes.dtype.itemsize)
    limit_s = (cache_bytes + weight_bytes) / copy_rate
    detail = f"{step_s * 1e3:.2f} ms, {num_rows / step_s:,.0f} tokens/s; weights {weight_bytes / 1e9:.2f} GB"
    return Figure(
        f"decode, {name}, {num_rows} rows of {num_tokens:,} tokens",
        step_s / limit_s,
        "× the time of its bytes at the copy bandwidth",
        target,
        at_most=True,
        detail=f"{detail}, cache {cache_bytes / 1e9:.2f} GB",
    )


def _bytes_of_token(model: Mapping[str, Any], itemsize: int) -> int:
    head_dim = model.get("head_dim", model["hidden_size"] // model["num_attention_heads"])
    return int(2 * model["num_hidden_layers"] * model["num_key_value_heads"] * head_dim * itemsize)


def _weight_bytes(model: Mapping[str, Any], num_rows: int, itemsize: int) -> float:
    """Return what a step reads of the weights; of experts those that so many random choices hit, on average."""
    if "num_experts" not in model:
        return num_weight_bytes(model, itemsize)
    hidden, head_dim = model["hidden_size"], model["head_dim"]
    attention = hidden * head_dim * 2 * (model["num_attention_heads"] + model["num_key_value_heads"])
    share = 1 - (1 - model["num_experts_per_tok"] / model["num_experts"]) ** num_rows
    experts = 3 * hidden * model["moe_intermediate_size"] * model["num_experts"] * share
    layers = model["num_hidden_layers"] * (attention + experts + hidden * model["num_experts"])
    return float(itemsize * (layers + hidden * model["vocab_size"]))
