"""The offline API and `octavo demo`, with the demo model.

What does not depend on a model is in test_llm_lifecycle.py, on the fake executor.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from octavo import LLM, SamplingParams
from octavo.errors import LocalServiceError
from octavo.values.outputs import ChatMessage

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time", "Water is made of"]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(demo_model, progress=False, kv_cache_gib=0.25) as llm:
        yield llm


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [output.prompt for output in together] == PROMPTS
    assert "Paris" in together[0].outputs[0].text
    assert "5" in together[1].outputs[0].text
    assert all(output.usage.num_output_tokens == len(output.outputs[0].token_ids) for output in together)


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    conversation = [ChatMessage(role="user", content="Say hello.")]
    [alone] = llm.chat(conversation, GREEDY, progress=False)
    many = llm.chat([conversation, conversation], GREEDY, progress=False)
    assert alone.outputs[0].text != ""
    assert len(many) == 2


def test_the_tokenizer_is_that_of_transformers(llm: LLM, float32_model: Path) -> None:
    own, reference = llm.get_tokenizer(), AutoTokenizer.from_pretrained(float32_model)
    ids = own.encode(PROMPTS[0])
    assert ids == reference.encode(PROMPTS[0])
    assert own.decode(ids) == reference.decode(ids) == PROMPTS[0]
    chat = [ChatMessage(role="user", content="Say hello.")]
    rendered = reference.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert own.apply_chat_template(chat) == rendered


def test_a_model_directory_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LocalServiceError, match=r"^the model directory .*no-such-model does not exist$"):
        LLM(tmp_path / "no-such-model", progress=False)


@pytest.mark.slow
def test_demo_answers_and_stops(demo_model: Path) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "octavo.cli",
            "demo",
            "What is 1+1?",
            "--model",
            str(demo_model),
            "--kv-cache-gib",
            "0.25",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "> What is 1+1?" in ended.stdout
    assert re.search(r"^\d+ tokens: the answer finished before an executor could be killed", ended.stdout, re.MULTILINE)
