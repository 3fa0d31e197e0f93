"""What transformers says about the tiny models."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.numerics.conftest import TinyModel
from tests.numerics.driver import StepDriver
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
