"""What transformers says about the tiny models, and what ours say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.config import ExecutorConfig
from executor_svc.models.kernels import ChosenModel
from executor_svc.models.selection import choose_model
from executor_svc.worker.loading import load_worker
from octavo_shared.step_wire.step import TableDelta
from tests.numerics.conftest import TinyModel
from tests.numerics.driver import RecordingSampler, StepDriver
from tests.numerics.tiny_models import VOCAB_SIZE

MakeDriver = Callable[..., StepDriver]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    token_ids: list[int] = np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()
    return token_ids


def reference_logits(model: TinyModel, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position, [num_tokens, vocab_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = model.reference(torch.tensor([token_ids])).logits[0]
    return logits


def reference_continuation(reference: Any, prompt: list[int], num_new_tokens: int) -> list[int]:
    """Return so many greedy tokens of a model of transformers, whether or not it would end before."""
    token_ids = torch.tensor([prompt])
    output = reference.generate(  # transformers annotates self wrongly
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=num_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    continuation: list[int] = output[0, len(prompt) :].tolist()
    return continuation


def choose(directory: Path, **settings: object) -> ChosenModel:
    """Return what runs the model of a directory on a CPU."""
    config = ExecutorConfig.model_validate({"model": str(directory), "dtype": "float32", **settings})
    return choose_model(ModelDirectory(directory), config, torch.device("cpu"))


def logits_of(model: Path, recorder: RecordingSampler, **settings: object) -> torch.Tensor:
    """Return those of a prompt, and of a token more."""
    config = ExecutorConfig.model_validate({"model": str(model), "num_device_blocks": 64, **settings})
    driver = StepDriver(load_worker(config))
    driver.prefill([random_prompt(30)], num_new_tokens=2)
    logits = [recorder.logits]
    driver.execute(TableDelta())
    return torch.cat([*logits, recorder.logits])
