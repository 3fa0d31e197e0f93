"""What lm-eval's API classes send is answered, with the log-likelihoods and texts of transformers in float32.

tests/e2e/lm_eval has the tasks and the requests; record.py there wrote down what lm-eval sent. The log-likelihoods are
read from the answers as lm-eval reads them: its `parse_logprobs`.
"""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.local.options import LocalOptions
from octavo.local.services import LocalServices

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

RECORDED = json.loads((Path(__file__).parent / "lm_eval" / "requests.json").read_text(encoding="utf-8"))["requests"]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

# Of the log-probability of a token, in nats.
TOLERANCE = 1e-4


class Reference:
    """The demo model in transformers."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    def token_ids(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt

    def logprobs(self, token_ids: list[int], context_length: int) -> tuple[list[float], bool]:
        """Return those of the tokens behind the context, and whether each of them is the likeliest."""
        with torch.inference_mode():
            logprobs = self._model(torch.tensor([token_ids])).logits[0].log_softmax(-1)[context_length - 1 : -1]
        followed = torch.tensor(token_ids[context_length:])
        of_tokens = logprobs.gather(1, followed[:, None])[:, 0]
        return of_tokens.tolist(), bool((logprobs.argmax(-1) == followed).all())

    def continuation(self, token_ids: list[int], body: dict[str, Any]) -> str:
        """Return the greedy text up to the first of the stop strings."""
        key = (*token_ids, body["max_tokens"])
        if key not in self._outputs:
            with torch.inference_mode():
                self._outputs[key] = self._model.generate(
                    torch.tensor([token_ids]),
                    attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
                    do_sample=False,
                    max_new_tokens=body["max_tokens"],
                )[0, len(token_ids) :].tolist()
        text: str = self.tokenizer.decode(self._outputs[key], skip_special_tokens=True)
        return min((text.split(stop)[0] for stop in body["stop"]), key=len)


def prompts_of(body: dict[str, Any]) -> list[Any]:
    return [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]


def choices_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(answer["choices"], key=lambda choice: choice["index"])


def as_lm_eval_reads(choice: dict[str, Any], context_length: int) -> tuple[list[float], bool]:
    """Return what it adds up, and whether it is greedy: the last token is the one that the server made."""
    logprobs = choice["logprobs"]
    of_tokens = logprobs["token_logprobs"][context_length:-1]
    tops = logprobs["top_logprobs"][context_length:-1]
    return of_tokens, all(it == max(top.values()) for it, top in zip(of_tokens, tops, strict=True))


async def answers_to(url: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the recorded requests with what a server answers."""
    answered = []
    async with aiohttp.ClientSession(url) as session:
        for request in RECORDED:
            async with session.post(request["path"], json=request["body"]) as response:
                assert response.status == 200, await response.text()
                answered.append((request, await response.json()))
    return answered


@pytest.mark.slow
async def test_the_requests_of_lm_eval_get_what_transformers_computes(float32_model: Path) -> None:
    settings = {"dtype": "float32", "kv_cache_gib": 0.25}
    options = LocalOptions(float32_model, settings, scheduler={"openai_listen": "127.0.0.1:0"})
    async with LocalServices.from_options(options) as services:
        answered = await answers_to(f"http://{services.openai_address}")

    reference = Reference(float32_model)
    num_likely = 0
    for request, answer in answered:
        body, choices = request["body"], choices_of(answer)
        if request["path"] == CHATS:
            prompt = reference.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True).input_ids
            assert choices[0]["message"]["content"] == reference.continuation(prompt, body)
            continue
        for place, (prompt, choice) in enumerate(zip(prompts_of(body), choices, strict=True)):
            token_ids = reference.token_ids(prompt)
            if not body.get("echo"):
                assert choice["text"] == reference.continuation(token_ids, body)
                continue
            context_length = request["context_lengths"][place]
            expected, is_greedy = reference.logprobs(token_ids, context_length)
            found, is_found_greedy = as_lm_eval_reads(choice, context_length)
            assert found == pytest.approx(expected, abs=TOLERANCE)
            assert is_found_greedy == is_greedy
            num_likely += is_greedy
    assert num_likely > 0, "no answer of the recorded tasks is the likeliest one"
