"""Log-probabilities of prompts equal transformers', however the prompt is cut into chunks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor_svc.sampler import sampler
from octavo_shared.step_wire.step import SamplingRow, StepResult, TableDelta, pairs
from tests.numerics.conftest import TinyModel
from tests.numerics.reference import MakeDriver, assert_close, random_prompt, reference_logits


def assert_prompt_logprobs(
    results: list[StepResult], model: TinyModel, prompt: list[int], num_alternatives: int
) -> None:
    """Fail unless the results of one prompt's chunks, joined, are those of transformers."""
    expected = torch.log_softmax(reference_logits(model, prompt)[:-1], -1)
    found = [result.prompt_logprobs for result in results if result.prompt_logprobs is not None]
    of_tokens = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert_close(torch.from_numpy(np.concatenate(found)), of_tokens)
    token_ids = [r.prompt_alternative_token_ids for r in results if r.prompt_alternative_token_ids is not None]
    if not num_alternatives:
        assert not token_ids
        return
    top = expected.topk(num_alternatives)
    assert np.concatenate(token_ids).tolist() == top.indices.flatten().tolist()
    values = [r.prompt_alternative_logprobs for r in results if r.prompt_alternative_logprobs is not None]
    assert_close(torch.from_numpy(np.concatenate(values)), top.values.flatten())


@pytest.mark.parametrize("num_alternatives", [0, 3])
@pytest.mark.parametrize("chunk_size", [1, 4, 5, 11, 100])
def test_prompt_logprobs_of_any_chunks_equal_transformers(
    chunk_size: int,
    num_alternatives: int,
    tiny_models: dict[str, TinyModel],
    make_driver: MakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "PROMPT_TOKENS_AT_ONCE", 3)
    model, prompt = tiny_models["gqa"], random_prompt(11)
    driver = make_driver(model)
    neighbour = driver.admission(0, random_prompt(6, seed=1), 20)
    driver.execute(TableDelta(admissions=(neighbour,), prefill_chunks=pairs((0, 6))))
    asking = replace(driver.admission(1, prompt, 3), num_prompt_logprobs=num_alternatives)

    results = []
    for begin in range(0, len(prompt), chunk_size):
        chunk = pairs((1, min(chunk_size, len(prompt) - begin)))
        results.append(driver.execute(TableDelta(admissions=() if begin else (asking,), prefill_chunks=chunk)))
    after = driver.execute(TableDelta())

    assert_prompt_logprobs(results, model, prompt, num_alternatives)
    assert after.prompt_logprobs is None


def test_two_prompts_of_one_step_answer_in_the_order_of_their_chunks(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    model, prompts = tiny_models["gqa"], [random_prompt(5, seed=2), random_prompt(7, seed=3), random_prompt(4, seed=4)]
    driver = make_driver(model)
    asked = (2, -1, 0)
    admissions = tuple(
        replace(driver.admission(slot, prompt, 3, SamplingRow()), num_prompt_logprobs=count)
        for slot, (prompt, count) in enumerate(zip(prompts, asked, strict=True))
    )

    result = driver.execute(TableDelta(admissions=admissions, prefill_chunks=pairs((2, 4), (1, 7), (0, 5))))

    assert result.prompt_logprobs is not None
    assert result.prompt_alternative_token_ids is not None
    last = replace(result, prompt_logprobs=result.prompt_logprobs[:3], prompt_alternative_token_ids=None)
    assert_prompt_logprobs([last], model, prompts[2], 0)
    assert_prompt_logprobs([replace(result, prompt_logprobs=result.prompt_logprobs[3:])], model, prompts[0], 2)


def test_a_prompt_that_is_computed_again_with_its_output_answers_no_output(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    model, tokens = tiny_models["gqa"], random_prompt(9)
    driver = make_driver(model)
    asking = replace(driver.admission(0, tokens, 3, num_prompt_tokens=6), num_prompt_logprobs=1)

    result = driver.execute(TableDelta(admissions=(asking,), prefill_chunks=pairs((0, 9))))

    assert_prompt_logprobs([result], model, tokens[:6], 1)
