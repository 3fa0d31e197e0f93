"""The demo model: what its GGUF file says, what it answers, and its copy in float32 beside transformers.

transformers reads GGUF files only with `accelerate` installed, which Octavo itself does not need; `[dev]` brings it.
"""

from pathlib import Path

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


def test_it_answers_greedily_by_default(demo_model: Path) -> None:
    with LLM(demo_model, progress=False, kv_cache_gib=0.25) as llm:
        answers = [llm.chat(QUESTION, params, progress=False)[0] for params in (SamplingParams(max_tokens=32),) * 2]
    assert [answer.outputs[0].text for answer in answers] == ["The capital of Japan is Tokyo."] * 2


def test_every_tensor_in_float32_is_bitwise_equal_to_what_transformers_reads_from_the_gguf_file(
    float32_model: Path, demo_model: Path
) -> None:
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32
    ).state_dict()
    actual = transformers.AutoModelForCausalLM.from_pretrained(float32_model, dtype=torch.float32).state_dict()

    assert list(actual) == list(expected)
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def test_transformers_finds_every_weight_and_no_other(float32_model: Path) -> None:
    model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(float32_model, output_loading_info=True)

    assert not any(loading_info.values()), loading_info
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_token_ids_keep_the_digit_rule(float32_model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(float32_model)

    # 81 198 198 33 ... without the rule
    assert tokenizer("a\n\n1. x").input_ids == [81, 1116, 33, 30, 1792]


def test_special_tokens_survive(float32_model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(float32_model)

    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert sorted(tokenizer.added_tokens_decoder) == list(range(17))


def test_the_greedy_answer_of_transformers_is_the_known_one(float32_model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(float32_model)
    model = transformers.AutoModelForCausalLM.from_pretrained(float32_model)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    num_prompt_tokens = prompt["input_ids"].shape[1]

    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, num_prompt_tokens:].tolist()

    assert num_prompt_tokens == 37
    assert tokenizer.decode(output) == "The capital of Japan is Tokyo.<|im_end|>"
