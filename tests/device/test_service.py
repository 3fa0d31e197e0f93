"""Both services beside each other, over gRPC: an executor on the device answers what the reference answers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.engine import InProcessEngine, Prompt
from octavo_shared.step_wire.step import SamplingRow
from tests.device.test_generation import LENGTHS, NUM_NEW_TOKENS, assert_greedy, prompts_of
from tests.device.test_requests import CLOSE
from tests.device.workers import DEVICE, IS_GPU, reference_worker

SavedModel = Callable[[str], tuple[Path, Any]]


@pytest.mark.parametrize("device", [pytest.param(DEVICE.type, marks=() if IS_GPU else pytest.mark.slow)])
def test_the_whole_service_answers_as_the_reference(device: str, saved_model: SavedModel) -> None:
    from octavo import LLM, SamplingParams  # gRPC may be missing where only kernels are tested
    from octavo.values.outputs import RequestOutput

    directory, model = saved_model("llama")
    prompts = prompts_of(LENGTHS)
    token_ids = [prompt.token_ids.tolist() for prompt in prompts]
    params = partial(SamplingParams, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    greedy = params(temperature=0, logprobs=2)
    penalized = params(temperature=0, repetition_penalty=1.3, presence_penalty=0.4)
    forked, beams = params(temperature=0.9, seed=5, n=3), params(beam_width=3, n=2)

    with LLM(
        directory,
        progress=False,
        device=device,
        dtype="float32",
        num_device_blocks=64,
        max_num_seqs=16,
        host_cache_gib=0.0,
    ) as llm:
        answers = llm.generate(
            token_ids + [token_ids[-1]] * 3, [greedy] * len(prompts) + [penalized, forked, beams], progress=False
        )

    last = prompts[-1].token_ids
    logged = [Prompt(prompt.token_ids, NUM_NEW_TOKENS, SamplingRow(num_logprobs=2)) for prompt in prompts]
    others = [
        Prompt(last, NUM_NEW_TOKENS, SamplingRow(repetition_penalty=1.3, presence_penalty=0.4)),
        Prompt(last, NUM_NEW_TOKENS, SamplingRow(temperature=0.9, seed=5), num_outputs=3),
        Prompt(last, NUM_NEW_TOKENS, num_outputs=2, beam_width=3),
    ]
    expected = InProcessEngine(reference_worker(directory)).generate([*logged, *others]).answers
    found = [answer.outputs for answer in answers if isinstance(answer, RequestOutput)]
    assert len(found) == len(answers)
    for prompt, ours, theirs in zip(prompts, found, expected, strict=False):
        assert_greedy(model, prompt, ours[0].token_ids)
        np.testing.assert_allclose(ours[0].logprobs, theirs.logprobs[0], atol=CLOSE, rtol=CLOSE)
    for ours, theirs in zip(found[len(prompts) :], expected[len(prompts) :], strict=True):
        assert [list(output.token_ids) for output in ours] == theirs.outputs
