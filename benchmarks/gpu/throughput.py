"""Output tokens a second: our continuous batching beside the static batches of transformers, on the same card."""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.engine import Prompt
from octavo_shared.step_wire.step import Int32Array


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of ragged lengths; each wants so many tokens, whatever they are."""

    num_requests: int
    batch_size: int
    max_prompt_tokens: int
    max_new_tokens: int

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Return the requests: prompts of evenly spread lengths; most outputs are short and some are long."""
        generator = np.random.default_rng(0)
        prompts = []
        for _ in range(self.num_requests):
            length = int(generator.integers(self.max_prompt_tokens // 16, self.max_prompt_tokens + 1))
            share = float(np.clip(generator.exponential(0.25), 1 / 32, 1.0))
            token_ids = generator.integers(3, vocab_size, length, dtype=np.int32)
            prompts.append(Prompt(token_ids, max(1, round(share * self.max_new_tokens))))
        return prompts


def of_transformers(
    settings: Mapping[str, Any], prompts: Sequence[Prompt], batch_size: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the wanted output tokens a second of `generate` on batches, each as long as its longest request."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**settings)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(made, dtype=dtype).eval()
    _generate(model, prompts[:2], device, num_new_tokens=2)
    begin_s = time.perf_counter()
    for begin in range(0, len(prompts), batch_size):
        batch = prompts[begin : begin + batch_size]
        _generate(model, batch, device, max(prompt.num_new_tokens for prompt in batch))
    seconds = time.perf_counter() - begin_s
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return sum(prompt.num_new_tokens for prompt in prompts) / seconds


@torch.inference_mode()
def _generate(model: Any, prompts: Sequence[Prompt], device: torch.device, num_new_tokens: int) -> Int32Array:
    """Generate greedily for one batch, padded on the left; return the new tokens."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    token_ids = np.zeros((len(prompts), longest), np.int64)
    mask = np.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest - len(prompt.token_ids) :] = prompt.token_ids
        mask[row, longest - len(prompt.token_ids) :] = 1
    output = model.generate(
        input_ids=torch.from_numpy(token_ids).to(device),
        attention_mask=torch.from_numpy(mask).to(device),
        max_new_tokens=num_new_tokens,
        min_new_tokens=num_new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    new_tokens: Int32Array = output[:, longest:].cpu().numpy()
    return new_tokens
