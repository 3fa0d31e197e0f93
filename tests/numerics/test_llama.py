"""The model on the paged cache equals transformers' Llama, whatever the batch and the block tables."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from executor_svc.config import ExecutorConfig
from executor_svc.sampler.filters import draw
from executor_svc.sampler.sample_rows import uniforms
from executor_svc.worker.loading import load_worker
from octavo_shared.step_wire.step import SamplingRow, TableDelta, pairs
from tests.numerics.conftest import TinyModel
from tests.numerics.driver import RecordingSampler, StepDriver, fork_of
from tests.numerics.reference import (
    MakeDriver,
    assert_close,
    random_prompt,
    reference_continuation,
    reference_logits,
)
from tests.numerics.tiny_models import VARIANTS, save_tiny_model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_at_every_position_equal_transformers(
    variant: str, tiny_models: dict[str, TinyModel], make_driver: MakeDriver, recorder: RecordingSampler
) -> None:
    model, prompt = tiny_models[variant], random_prompt(45)
    driver = make_driver(model)

    driver.prefill([prompt[:length] for length in range(1, 46)])

    assert_close(recorder.logits, reference_logits(model, prompt))


def test_a_stored_head_counts_though_config_json_says_that_it_is_the_embedding(
    tmp_path: Path, make_driver: MakeDriver, recorder: RecordingSampler, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    model, prompt = TinyModel(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path)), random_prompt(9)

    make_driver(model).prefill([prompt])

    assert_close(recorder.logits, reference_logits(model, prompt)[-1:])
    assert "event=head_is_not_embedding" in caplog.text


@pytest.mark.parametrize("block_size", [1, 4, 24])
@pytest.mark.parametrize("variant", ["gqa", "mha", "llama3_rope"])
def test_greedy_decoding_equals_transformers_generate(
    variant: str, block_size: int, tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    model = tiny_models[variant]
    prompts = [random_prompt(length, seed=length) for length in (1, 15, 16, 17, 40)]
    driver = make_driver(model, block_size)

    outputs = driver.generate(prompts, num_new_tokens=20)

    assert outputs == [reference_continuation(model.reference, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("block_size", [1, 4, 24])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 16])
def test_chunked_prefill_equals_unchunked(
    chunk_size: int,
    block_size: int,
    tiny_models: dict[str, TinyModel],
    make_driver: MakeDriver,
    recorder: RecordingSampler,
) -> None:
    model, prompt = tiny_models["gqa"], random_prompt(33)
    driver = make_driver(model, block_size)

    driver.generate([prompt], num_new_tokens=1, chunk_size=chunk_size)

    assert_close(recorder.logits, reference_logits(model, prompt)[-1:])


def test_mixed_batch_of_chunks_and_decodes_equals_each_alone(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    model = tiny_models["gqa"]
    prompts = [random_prompt(length, seed=length) for length in (2, 9, 31, 64, 90)]

    together = make_driver(model).generate(prompts, num_new_tokens=12, chunk_size=7)

    alone = [make_driver(model, seed=9).generate([prompt], num_new_tokens=12)[0] for prompt in prompts]
    assert together == alone


def test_long_and_short_contexts_decode_together(tmp_path: Path, make_driver: MakeDriver) -> None:
    """Contexts of 3 to 600 tokens fall into several buckets of decode attention."""
    model = TinyModel(tmp_path, save_tiny_model(tmp_path, max_position_embeddings=1_024))
    prompts = [random_prompt(length, seed=length) for length in (600, 3, 140, 290, 17, 590)]
    driver = make_driver(model, block_size_tokens=16)

    outputs = driver.generate(prompts, num_new_tokens=6)

    assert outputs == [reference_continuation(model.reference, prompt, 6) for prompt in prompts]


def test_forks_share_the_logits_row_of_their_parent(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver, recorder: RecordingSampler
) -> None:
    model, prompt = tiny_models["gqa"], random_prompt(10)
    driver = make_driver(model)
    admission = driver.admission(0, prompt, num_new_tokens=4)

    result = driver.execute(
        TableDelta(
            admissions=(admission,),
            prefill_chunks=pairs((0, 10)),
            forks=(fork_of(0, 1), fork_of(0, 2, SamplingRow(temperature=5.0, seed=3))),
        )
    )

    assert recorder.num_logit_rows == 1
    assert len(result.sampled_token_ids) == 3
    assert result.sampled_token_ids[0] == result.sampled_token_ids[1]
    assert_close(recorder.logits, reference_logits(model, prompt)[-1:].expand(3, -1))


def test_a_fork_goes_its_own_way_after_its_shared_block_was_copied(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver, recorder: RecordingSampler
) -> None:
    model, prompt = tiny_models["gqa"], random_prompt(10)
    driver = make_driver(model)  # blocks of 4: the third holds positions 8 and 9, and gets 10
    admission = driver.admission(0, prompt, num_new_tokens=2)
    hot_fork = fork_of(0, 1, SamplingRow(temperature=50.0, seed=1))
    first = driver.execute(
        TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 10)), forks=(hot_fork,)),
    )
    parent_token, child_token = first.sampled_token_ids.tolist()
    shared_block, own_block = int(admission.block_ids[2]), int(driver.take_blocks(1)[0])

    driver.execute(
        TableDelta(replaced_blocks=pairs((1, 2, own_block))), blocks_to_copy=pairs((shared_block, own_block))
    )

    assert parent_token != child_token
    for row, token_id in enumerate((parent_token, child_token)):
        expected = reference_logits(model, [*prompt, token_id])[-1]
        assert_close(recorder.logits[row], expected)


def test_recompute_of_known_output_continues_as_if_nothing_had_happened(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    model, prompt = tiny_models["gqa"], random_prompt(11)
    sampling = SamplingRow(temperature=1.0, seed=42)
    whole = make_driver(model).generate([prompt], num_new_tokens=10, sampling=sampling)[0]
    driver = make_driver(model, seed=5)
    admission = driver.admission(0, [*prompt, *whole[:4]], 6, sampling, num_prompt_tokens=len(prompt))

    driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 15))))
    for _ in range(5):
        driver.execute(TableDelta())

    assert driver.worker.table.tokens_of(0)[len(prompt) :].tolist() == whole


def test_each_output_position_has_its_own_uniform_number(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    model, prompt = tiny_models["gqa"], random_prompt(11)
    sampling = SamplingRow(temperature=3.0, seed=42)

    output = make_driver(model).generate([prompt], num_new_tokens=8, sampling=sampling)[0]

    scores = reference_logits(model, [*prompt, *output[:-1]])[len(prompt) - 1 :] / 3.0
    draws = uniforms(np.full(8, 42, np.uint64), np.zeros(8, np.int32), np.arange(8, dtype=np.int32))
    assert output == draw(scores, draws).tolist()


def test_bfloat16_stays_near_float32(tiny_models: dict[str, TinyModel]) -> None:
    model, prompt = tiny_models["gqa"], random_prompt(20)
    driver = StepDriver(load_worker(ExecutorConfig(model=str(model.directory), dtype="bfloat16", num_device_blocks=8)))
    admission = driver.admission(0, prompt, 3, SamplingRow(num_logprobs=0))

    first = driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 20))))
    second = driver.execute(TableDelta())

    tokens = [int(first.sampled_token_ids[0]), int(second.sampled_token_ids[0])]
    expected = torch.log_softmax(reference_logits(model, [*prompt, tokens[0]])[-2:], -1)
    for index, result in enumerate((first, second)):
        assert result.logprobs is not None
        assert result.logprobs[0] == pytest.approx(float(expected[index, tokens[index]]), abs=0.2)
