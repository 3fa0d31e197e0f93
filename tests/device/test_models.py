"""Models that take other ways on a GPU: code of transformers, int8."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.engine import InProcessEngine
from tests.device.conftest import OTHER_MODELS
from tests.device.test_generation import LENGTHS, NUM_NEW_TOKENS, assert_greedy, prompts_of
from tests.device.workers import IS_GPU, served_worker

SavedModel = Callable[[str], tuple[Path, Any]]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if IS_GPU else pytest.mark.slow) for name in OTHER_MODELS]
)
def test_models_without_graphs_are_those_of_transformers(name: str, saved_model: SavedModel) -> None:
    directory, model = saved_model(name)
    prompts = prompts_of(LENGTHS)

    run = InProcessEngine(served_worker(directory)).generate(prompts)

    for prompt, output in zip(prompts, run.outputs, strict=True):
        assert len(output) == NUM_NEW_TOKENS
        assert_greedy(model, prompt, output)


@pytest.mark.skipif(
    IS_GPU and find_spec("torchao") is None, reason="torchao is not installed (pip install '.[gpu-int8]')"
)
def test_int8_follows_its_own_logits(saved_model: SavedModel) -> None:
    """Weights are rounded: tokens must be likely in float32, not the likeliest."""
    directory, model = saved_model("llama")
    prompts = prompts_of(LENGTHS)
    dtype = "bfloat16" if IS_GPU else "float32"

    run = InProcessEngine(served_worker(directory, quantization="int8", dtype=dtype, cpu_kernels="torch")).generate(
        prompts
    )

    for prompt, output in zip(prompts, run.outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt.token_ids.tolist(), *output]])).logits
        rows = logits[0, len(prompt.token_ids) - 1 : -1]
        gaps = rows.amax(-1) - rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (gaps < 0.1 * rows.std(-1)).all()
