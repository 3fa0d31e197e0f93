"""Whatever a request asks for, a GPU answers what the reference answers: torch in float32 on a CPU, without Triton.

The scheduler's core drives both. On a card kernels compute exponentials and logarithms by approximations
(`ex2.approx`, `lg2.approx`: relative errors near 2**-22), and products sum in other orders, so log-probabilities are
compared within `CLOSE`; token ids are equal, because the logits of these models lie far apart.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.engine import InProcessEngine, Prompt, Run
from octavo_shared.step_wire.step import SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask, pad_words
from scheduler_svc.core.limits import PreemptionMode
from tests.device.workers import IS_GPU, reference_worker, worker_with

SavedModel = Callable[[str], tuple[Path, Any]]
VOCAB_SIZE = 97
CLOSE = 2e-3  # of a log-probability, of models whose logits are some tens
NUM_NEW_TOKENS = 12 if IS_GPU else 4
# In the interpreter any attention will do: kernels have tests of their own.
BACKEND = "triton" if IS_GPU else "torch"

RULES = TokenRules(
    biased_token_ids=np.array([5, 6], np.int32),
    biases=np.array([4.0, -4.0], np.float32),
    banned_token_ids=np.array([7, 9], np.int32),
    banned_words=pad_words([(10, 11), (12, 14, 16)]),
    allowed_mask=pack_mask(np.arange(0, VOCAB_SIZE, 2, dtype=np.int32), VOCAB_SIZE),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What requests ask for, and where the steps that answer them run."""

    sampling: SamplingRow = field(default_factory=SamplingRow)
    request: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (5, 17)
    settings: Mapping[str, Any] = field(default_factory=dict)  # of both workers
    preemption_mode: PreemptionMode | None = None

    def prompts(self) -> list[Prompt]:
        generator = np.random.default_rng(1)
        return [
            Prompt(generator.integers(3, VOCAB_SIZE, length, dtype=np.int32), NUM_NEW_TOKENS, self.sampling)
            for length in self.lengths
        ]


CASES = {
    "log-probabilities": Case(SamplingRow(num_logprobs=3)),
    "log-probabilities of the prompt": Case(SamplingRow(num_logprobs=0), {"num_prompt_logprobs": 2}),
    "penalties": Case(SamplingRow(num_logprobs=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)),
    "masks, biases and banned words": Case(SamplingRow(num_logprobs=1), {"token_rules": RULES}),
    "top-p alone": Case(SamplingRow(temperature=0.9, top_p=0.8, seed=3)),
    "min-p and log-probabilities": Case(SamplingRow(temperature=0.9, min_p=0.05, seed=4, num_logprobs=2)),
    # A prompt that does not fill its last block: each output but one gets a copy of it.
    "outputs that share a block": Case(SamplingRow(temperature=0.9, seed=5), {"num_outputs": 3}, (18,)),
    "beams": Case(SamplingRow(), {"num_outputs": 2, "beam_width": 3}, (18,)),
    # Room for one of them at a time, and a pinned pool beside it.
    "swaps": Case(
        SamplingRow(num_logprobs=0),
        {},
        (30, 30),
        {"num_device_blocks": 5, "num_host_blocks": 8, "host_cache_gib": 0.01},
        PreemptionMode.SWAP,
    ),
}


# The others take the same ways.
QUICK = (
    "log-probabilities of the prompt",
    "masks, biases and banned words",
    "outputs that share a block",
    "beams",
    "swaps",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if IS_GPU or name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_a_request_gets_what_the_reference_gives_it(
    name: str, saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    directory, _ = saved_model("llama")
    prompts = [
        Prompt(prompt.token_ids, prompt.num_new_tokens, prompt.sampling, **case.request) for prompt in case.prompts()
    ]
    expected = InProcessEngine(reference_worker(directory, **case.settings)).generate(prompts)
    worker, _ = worker_with(BACKEND, directory, torch.float32, monkeypatch, **case.settings)

    found = InProcessEngine(worker, preemption_mode=case.preemption_mode).generate(prompts)

    assert_same(found, expected)
    assert [len(output) for answer in found.answers for output in answer.outputs] == [NUM_NEW_TOKENS] * sum(
        prompt.num_outputs for prompt in prompts
    )
    assert (found.num_copied_blocks > 0) == (name in ("outputs that share a block", "beams"))
    assert (found.num_swapped_blocks > 0) == (name == "swaps")
    if "log-probabilities" in name:
        assert all(answer.logprobs[0] for answer in found.answers)
    if name == "masks, biases and banned words":
        assert not any(token_id % 2 for output in found.outputs for token_id in output)


def assert_same(found: Run, expected: Run) -> None:
    for ours, theirs in zip(found.answers, expected.answers, strict=True):
        assert ours.outputs == theirs.outputs
        assert ours.alternatives == theirs.alternatives
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(mine, other, atol=CLOSE, rtol=CLOSE)
        np.testing.assert_allclose(ours.prompt_logprobs, theirs.prompt_logprobs, atol=CLOSE, rtol=CLOSE)
