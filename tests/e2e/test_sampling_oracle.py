"""Penalties, rules and prompt log-probabilities through both services are those of transformers.

Token ids are compared up to the first tie of the reference: two best processed logits closer than 1e-4.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import Client, SamplingParams
from octavo.local.options import LocalOptions
from octavo.local.services import LocalServices

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

TIE = TOLERANCE = 1e-4
NUM_OUTPUT_TOKENS = 24
PENALTY = 1.3
PROMPTS = ("The capital of France is", "One, two, three, four,", "Once upon a time there was a")


@pytest.mark.slow
async def test_penalized_greedy_ids_and_prompt_logprobs_equal_transformers(float32_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(float32_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(float32_model)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    banned = tokenizer(" the", add_special_tokens=False).input_ids
    params = SamplingParams(
        temperature=0.0,
        max_tokens=NUM_OUTPUT_TOKENS,
        min_tokens=NUM_OUTPUT_TOKENS,
        repetition_penalty=PENALTY,
        banned_token_ids=banned,
        logprobs=2,
        prompt_logprobs=3,
    )
    options = LocalOptions(float32_model, {"dtype": "float32", "kv_cache_gib": 0.25})
    async with LocalServices.from_options(options) as services, Client(services.address) as client:
        answers = [await client.generate(prompt, params) for prompt in prompts]

    for prompt, answer in zip(prompts, answers, strict=True):
        (output,) = answer.outputs
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                min_new_tokens=NUM_OUTPUT_TOKENS,
                max_new_tokens=NUM_OUTPUT_TOKENS,
                repetition_penalty=PENALTY,
                bad_words_ids=[banned],
                output_scores=True,
                return_dict_in_generate=True,
            )
            logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0]
        theirs = expected.sequences[0, len(prompt) :].tolist()
        for ours, other, scores in zip(output.token_ids, theirs, expected.scores, strict=True):
            if ours != other:
                best, second = scores[0].topk(2).values.tolist()
                assert best - second < TIE, f"{ours} instead of {other}, with a gap of {best - second:.2e}"
                break
        logprobs = torch.log_softmax(logits, -1)
        of_prompt = logprobs[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        of_output = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs.logprobs == pytest.approx(of_prompt.tolist(), abs=TOLERANCE)
        assert output.logprobs == pytest.approx(of_output.tolist(), abs=TOLERANCE)
        for found, row in zip(answer.prompt_logprobs.alternatives, logprobs, strict=False):
            assert [token.logprob for token in found] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)
        assert [len(found) for found in output.alternatives] == [2] * NUM_OUTPUT_TOKENS
