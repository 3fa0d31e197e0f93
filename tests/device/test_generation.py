"""What a GPU runs, from the scheduler's core to the sampled ids, gives the tokens of transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.engine import GREEDY, InProcessEngine, Prompt
from benchmarks.gpu.models import usable_backends
from executor_svc.attention.interface import DecodePlanner
from octavo_shared.step_wire.step import SamplingRow
from tests.device.conftest import MODELS
from tests.device.workers import DEVICE, IS_GPU, reference_worker, worker_with
from tests.kernels.products import add_up_rows_alike

SavedModel = Callable[[str], tuple[Path, Any]]
TIE = 1e-3  # of logits that were multiplied up; float32 sums in another order
# The interpreter takes a second for what a device does in a thousandth.
NUM_NEW_TOKENS = 8 if IS_GPU else 4
LENGTHS = (1, 5, 16, 17, 40) if IS_GPU else (1, 17)
FLOAT_BACKENDS = sorted(usable_backends(DEVICE, torch.float32))
# Keys and values of 2 layers, 16 tokens and 2 KV heads: 16 elements of a byte, and a scale in float32.
BYTES_OF_BLOCKS = {"int8": 2 * 2 * 16 * 2 * (16 + 4), "fp8_e4m3": 2 * 2 * 16 * 2 * 16}
QUICK = {("llama", "triton"), ("llama", "torch"), ("gemma2, soft caps and windows", "triton")}
CASES = [
    pytest.param(name, backend, marks=() if IS_GPU or (name, backend) in QUICK else pytest.mark.slow)
    for name in MODELS
    for backend in FLOAT_BACKENDS
]


SLOW_ON_A_CPU = [pytest.param(torch.float32, marks=pytest.mark.slow)]


def prompts_of(lengths: Sequence[int], sampling: SamplingRow = GREEDY) -> list[Prompt]:
    generator = np.random.default_rng(1)
    return [Prompt(generator.integers(3, 97, length, dtype=np.int32), NUM_NEW_TOKENS, sampling) for length in lengths]


@torch.inference_mode()
def assert_greedy(model: Any, prompt: Prompt, output: Sequence[int]) -> None:
    """Assert that each token has the largest logit of transformers' model, or ties with it."""
    history = torch.tensor([[*prompt.token_ids.tolist(), *output]])
    logits = model(history).logits[0, len(prompt.token_ids) - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (gaps <= TIE * logits.abs().amax()).all(), (output, gaps.tolist())


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_greedy_tokens_are_those_of_transformers(
    name: str, backend: str, saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = saved_model(name)
    worker, counted = worker_with(backend, directory, torch.float32, monkeypatch)
    prompts = prompts_of(LENGTHS)

    run = InProcessEngine(worker).generate(prompts)

    for prompt, output in zip(prompts, run.outputs, strict=True):
        assert len(output) == NUM_NEW_TOKENS
        assert_greedy(model, prompt, output)
    assert (counted.num_replays > 0) == isinstance(usable_backends(DEVICE, torch.float32)[backend][0], DecodePlanner)
    assert run.max_in_flight == 2


@pytest.mark.parametrize("kv_cache_dtype", BYTES_OF_BLOCKS)
@pytest.mark.parametrize("backend", ["triton", "invariant"])
def test_a_cache_of_8_bits_gives_the_tokens_of_the_reference(
    backend: str, kv_cache_dtype: str, saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = saved_model("llama")
    room: dict[str, Any] = {"num_device_blocks": None, "kv_cache_gib": 64.5 * BYTES_OF_BLOCKS[kv_cache_dtype] / 2**30}
    reference = reference_worker(directory, kv_cache_dtype=kv_cache_dtype)  # before it would get the sampler of a GPU
    worker, _ = worker_with(backend, directory, torch.float32, monkeypatch, kv_cache_dtype=kv_cache_dtype, **room)
    prompts = prompts_of(LENGTHS)

    outputs = InProcessEngine(worker).generate(prompts).outputs

    assert outputs == InProcessEngine(reference).generate(prompts).outputs
    assert worker.info.kv_cache_dtype == reference.info.kv_cache_dtype == kv_cache_dtype
    assert worker.info.num_device_blocks == 64


@pytest.mark.parametrize("backend", FLOAT_BACKENDS if IS_GPU else [pytest.param("triton", marks=pytest.mark.slow)])
def test_the_batch_and_the_steps_in_flight_change_no_token(
    backend: str, saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = saved_model("llama")
    sampling = SamplingRow(temperature=0.8, top_k=30, top_p=0.95, min_p=0.01, seed=11)
    prompts = prompts_of(LENGTHS, sampling)

    def outputs(num_steps_in_flight: int, at_once: bool, cuda_graphs: str) -> list[list[int]]:
        worker, _ = worker_with(backend, directory, torch.float32, monkeypatch, cuda_graphs=cuda_graphs)
        engine = InProcessEngine(worker, num_steps_in_flight=num_steps_in_flight)
        if at_once:
            return engine.generate(prompts).outputs
        return [engine.generate([prompt]).outputs[0] for prompt in prompts]

    alone = outputs(1, at_once=False, cuda_graphs="off")
    together = outputs(3, at_once=True, cuda_graphs="auto")
    # Other batches round otherwise: a draw may fall on the other side of an edge, but hardly ever does.
    assert sum(ours == theirs for ours, theirs in zip(alone, together, strict=True)) >= len(prompts) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if IS_GPU else SLOW_ON_A_CPU, ids=str)
def test_invariant_numerics_draw_the_same_tokens_in_every_batch(
    dtype: torch.dtype, saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are equal, so not one draw may fall on the other side of an edge."""
    add_up_rows_alike(monkeypatch)
    directory, _ = saved_model("qwen3, norms of queries and keys")
    prompts = prompts_of(LENGTHS, SamplingRow(temperature=1.5, seed=11))

    def outputs(num_steps_in_flight: int, at_once: bool, cuda_graphs: str) -> list[list[int]]:
        worker, _ = worker_with("invariant", directory, dtype, monkeypatch, cuda_graphs=cuda_graphs)
        engine = InProcessEngine(worker, num_steps_in_flight=num_steps_in_flight)
        if at_once:
            return engine.generate(prompts).outputs
        return [engine.generate([prompt]).outputs[0] for prompt in prompts]

    assert outputs(1, at_once=False, cuda_graphs="off") == outputs(3, at_once=True, cuda_graphs="auto")


def test_a_pool_that_is_too_small_preempts_and_changes_no_token(
    saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = saved_model("llama")
    prompts = prompts_of((30, 30))
    # Preemption is the scheduler's: in the interpreter any attention will do.
    backend = "triton" if IS_GPU else "torch"
    worker, _ = worker_with(backend, directory, torch.float32, monkeypatch, num_device_blocks=5)
    run = InProcessEngine(worker).generate(prompts)
    for prompt, output in zip(prompts, run.outputs, strict=True):
        assert_greedy(model, prompt, output)
    assert run.num_preemptions > 0


@pytest.mark.parametrize("backend", sorted(usable_backends(DEVICE, torch.bfloat16)) if IS_GPU else ["triton"])
def test_sixteen_bits_follow_their_own_logits(
    backend: str, saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 rounds away small differences: tokens must be likely in float32, not the likeliest."""
    directory, model = saved_model("llama")
    worker, _ = worker_with(backend, directory, torch.bfloat16, monkeypatch)
    prompts = prompts_of(LENGTHS)
    run = InProcessEngine(worker).generate(prompts)
    for prompt, output in zip(prompts, run.outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt.token_ids.tolist(), *output]])).logits
        rows = logits[0, len(prompt.token_ids) - 1 : -1]
        gaps = rows.amax(-1) - rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (gaps < 0.1 * rows.std(-1)).all()
