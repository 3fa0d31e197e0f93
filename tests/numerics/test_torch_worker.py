"""What a torch worker reports, refuses and survives."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from executor_svc.cache_engine import CacheShape
from executor_svc.config import ExecutorConfig
from executor_svc.errors import ModelLoadError
from executor_svc.kernels import make_model
from executor_svc.largest_step import largest_step
from executor_svc.model_directory import ModelDirectory
from executor_svc.models import Decoder, parse_config
from executor_svc.warm_up import warm_up
from executor_svc.weights import Checkpoint
from executor_svc.worker import execute
from executor_svc.worker_loading import load_worker
from shared.errors import InvalidStepError, StepFailedError
from shared.step import SamplingRow, Step, TableDelta, pairs
from tests.numerics.conftest import TinyModel
from tests.numerics.driver import fork_of
from tests.numerics.reference import MakeDriver, random_prompt
from tests.numerics.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, save_tiny_model


@pytest.fixture
def model(tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models["gqa"]


def test_info_describes_model_cache_and_limits(model: TinyModel) -> None:
    info = load_worker(
        ExecutorConfig(
            model=str(model.directory), block_size_tokens=8, num_device_blocks=33, num_host_blocks=7, max_num_seqs=5
        )
    ).info

    assert info.model_id == "gqa"
    assert (info.block_size_tokens, info.num_device_blocks, info.num_host_blocks) == (8, 33, 7)
    assert (info.max_model_len, info.vocab_size, info.max_num_seqs) == (MAX_MODEL_LEN, VOCAB_SIZE, 5)
    assert (info.dtype, info.eos_token_ids, info.tp_size) == ("float32", (2,), 1)


def test_cache_size_in_gib_gives_the_number_of_blocks(model: TinyModel) -> None:
    # keys and values * 2 layers * 16 tokens * 2 KV heads * 8 dimensions * 4 bytes
    block_bytes = 2 * 2 * 16 * 2 * 8 * 4

    info = load_worker(
        ExecutorConfig(
            model=str(model.directory),
            kv_cache_gib=10.5 * block_bytes / 2**30,
            host_cache_gib=3.5 * block_bytes / 2**30,
        )
    ).info

    assert (info.num_device_blocks, info.num_host_blocks) == (10, 3)


def test_each_load_is_a_new_instance_of_the_same_model(model: TinyModel) -> None:
    first = load_worker(ExecutorConfig(model=str(model.directory), num_device_blocks=1)).info
    second = load_worker(ExecutorConfig(model=str(model.directory), num_device_blocks=1)).info

    assert first.instance_id != second.instance_id
    assert first.model_hash == second.model_hash


def test_model_hash_differs_between_models(tiny_models: dict[str, TinyModel]) -> None:
    hashes = {
        load_worker(ExecutorConfig(model=str(m.directory), num_device_blocks=1)).info.model_hash
        for m in tiny_models.values()
    }

    assert len(hashes) == len(tiny_models)


def test_model_hash_differs_between_trainings_of_one_configuration(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_tiny_model(tmp_path / str(seed), seed=seed)

    hashes = {
        load_worker(ExecutorConfig(model=str(tmp_path / str(seed)), num_device_blocks=1)).info.model_hash
        for seed in (1, 2)
    }

    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("generation_config", "expected"), [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 7}, (7,)), ({}, (2,))]
)
def test_eos_ids_come_from_generation_config_first(
    generation_config: dict[str, object], expected: tuple[int, ...], model: TinyModel, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(model.directory, tmp_path / "copy"))
    (directory / "generation_config.json").write_text(json.dumps(generation_config))

    assert load_worker(ExecutorConfig(model=str(directory), num_device_blocks=1)).info.eos_token_ids == expected


def test_tokenizer_files_are_those_that_exist(model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model.directory, tmp_path / "copy"))
    assert load_worker(ExecutorConfig(model=str(directory), num_device_blocks=1)).tokenizer_files() == ()
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str().encode()
    (directory / "tokenizer.json").write_bytes(tokenizer)
    (directory / "chat_template.jinja").write_text("hello")

    files = load_worker(ExecutorConfig(model=str(directory), num_device_blocks=1)).tokenizer_files()

    assert {file.name: file.content for file in files if file.name != "generation_config.json"} == {
        "tokenizer.json": tokenizer,
        "chat_template.jinja": b"hello",
    }


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_broken_tokenizer_file_is_named(content: str, model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model.directory, tmp_path / "copy"))
    (directory / "tokenizer.json").write_text(content)

    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_worker(ExecutorConfig(model=str(directory), num_device_blocks=1))


def test_a_cache_larger_than_the_memory_is_refused(model: TinyModel) -> None:
    with pytest.raises(ModelLoadError, match=r"1000000\.0 GiB, but \d+\.\d GiB of memory are available"):
        load_worker(ExecutorConfig(model=str(model.directory), kv_cache_gib=1e6, host_cache_gib=0))


def test_a_host_pool_larger_than_the_memory_is_refused(model: TinyModel) -> None:
    with pytest.raises(ModelLoadError, match=r"GiB of memory are available; .* --host-cache-gib"):
        load_worker(ExecutorConfig(model=str(model.directory), num_device_blocks=1, host_cache_gib=1e6))


@pytest.mark.parametrize("limit", [MAX_MODEL_LEN + 1, 10**6])
def test_max_model_len_beyond_the_model_is_refused(limit: int, model: TinyModel) -> None:
    with pytest.raises(ModelLoadError, match=f"max_model_len is {limit}"):
        load_worker(ExecutorConfig(model=str(model.directory), max_model_len=limit))


def test_a_cache_too_small_for_one_block_is_refused(model: TinyModel) -> None:
    with pytest.raises(ModelLoadError, match="no room for even one block"):
        load_worker(ExecutorConfig(model=str(model.directory), kv_cache_gib=1e-9))


def refused_steps() -> dict[str, Step]:
    return {
        "moves host block 64; there are 64 host": Step(1, 1, TableDelta(), blocks_to_swap_out=pairs((0, 64))),
        "moves host block -1": Step(1, 1, TableDelta(), blocks_to_swap_in=pairs((-1, 0))),
        "moves device block 601": Step(1, 1, TableDelta(), blocks_to_swap_out=pairs((601, 0))),
        "moves device block -2": Step(1, 1, TableDelta(), blocks_to_swap_in=pairs((0, -2))),
        "moves device block 600; there are 600 device": Step(1, 1, TableDelta(), blocks_to_copy=pairs((0, 600))),
        "moves device block -1": Step(1, 1, TableDelta(), blocks_to_copy=pairs((-1, 2))),
        f"slot 1 asks for {VOCAB_SIZE + 1} candidates; the vocabulary has {VOCAB_SIZE}": Step(
            1, 1, TableDelta(beam_forks=(fork_of(0, 1, SamplingRow(num_candidates=VOCAB_SIZE + 1)),))
        ),
        f"token id {VOCAB_SIZE}": Step(1, 1, TableDelta(appended_tokens=pairs((0, VOCAB_SIZE)))),
    }


@pytest.mark.parametrize("message", refused_steps())
def test_a_refused_step_writes_nothing(message: str, model: TinyModel, make_driver: MakeDriver) -> None:
    driver = make_driver(model)
    driver.prefill([[3, 4, 5]], num_new_tokens=3)
    before = driver.worker.table.digest()

    with pytest.raises(InvalidStepError, match=message):
        execute(driver.worker, refused_steps()[message])

    assert driver.worker.table.digest() == before


def test_prompt_tokens_outside_the_vocabulary_are_refused(model: TinyModel, make_driver: MakeDriver) -> None:
    driver = make_driver(model)

    with pytest.raises(InvalidStepError, match=f"token id {VOCAB_SIZE}; ids are 0 to {VOCAB_SIZE - 1}"):
        driver.prefill([[3, VOCAB_SIZE]])

    assert not driver.worker.table.live.any()


def test_a_failing_forward_pass_becomes_step_failed(
    model: TinyModel, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(model)

    def fail(*arguments: object) -> torch.Tensor:
        raise RuntimeError("out of everything")

    monkeypatch.setattr(Decoder, "forward", fail)

    with pytest.raises(StepFailedError, match="step 1 failed: RuntimeError: out of everything") as caught:
        driver.prefill([[3, 4, 5]])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_digest_is_answered_and_another_one_fails_the_step(model: TinyModel, make_driver: MakeDriver) -> None:
    driver = make_driver(model)
    empty_digest = driver.worker.table.digest()

    result = execute(driver.worker, Step(1, 1, TableDelta(), table_digest=empty_digest))

    assert result.table_digest == empty_digest
    with pytest.raises(StepFailedError, match="digest"):
        execute(driver.worker, Step(1, 2, TableDelta(), table_digest=empty_digest ^ 1))


def test_a_step_without_sample_rows_answers_no_tokens(model: TinyModel, make_driver: MakeDriver) -> None:
    driver = make_driver(model)
    admission = driver.admission(0, [3, 4, 5, 6], num_new_tokens=1)

    result = driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 2))))

    assert len(result.sampled_token_ids) == 0
    assert result.logprobs is None


def test_reset_empties_the_table_and_keeps_the_cache(model: TinyModel, make_driver: MakeDriver) -> None:
    driver = make_driver(model)
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    admission = driver.admission(0, prompt, num_new_tokens=1)
    first = driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 9))))

    driver.worker.reset()
    assert not driver.worker.table.live.any()
    cached = type(admission)(0, 1, admission.token_ids, 9, 8, admission.block_ids, SamplingRow())
    again = driver.execute(TableDelta(admissions=(cached,), prefill_chunks=pairs((0, 1))))

    assert np.array_equal(first.sampled_token_ids, again.sampled_token_ids)


def test_logprobs_are_those_of_the_raw_logits_for_rows_that_asked(model: TinyModel, make_driver: MakeDriver) -> None:
    driver = make_driver(model)
    prompt = [3, 4, 5, 6]
    asking = driver.admission(0, prompt, 1, SamplingRow(temperature=2.0, top_k=3, seed=1, num_logprobs=0))
    silent = driver.admission(1, prompt, 1)

    result = driver.execute(TableDelta(admissions=(asking, silent), prefill_chunks=pairs((0, 4), (1, 4))))

    with torch.inference_mode():
        raw = model.reference(torch.tensor([prompt])).logits[0, -1]
    assert result.logprobs is not None
    expected = float(torch.log_softmax(raw, -1)[int(result.sampled_token_ids[0])])
    assert result.logprobs[0] == pytest.approx(expected, abs=1e-4)
    assert np.isnan(result.logprobs[1])


def test_the_largest_step_runs_on_a_cache_of_its_own(model: TinyModel) -> None:
    config = ExecutorConfig(model=str(model.directory), max_num_batched_tokens=300, max_num_seqs=8)
    directory = ModelDirectory(model.directory)
    made = make_model(
        parse_config(directory.config(), model.directory), torch.float32, torch.device("cpu"), cpu_kernels="torch"
    )
    network, backend = made.model, made.attention
    network.load(Checkpoint(model.directory))

    logits = largest_step(network, backend, config, CacheShape(2, 16, 2, 8, torch.float32))

    assert logits is not None
    assert logits.shape == (8, VOCAB_SIZE)
    assert not logits.isnan().any()


def test_a_warm_up_leaves_no_trace_but_in_blocks_that_nobody_has(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    prompts = [random_prompt(length, seed=length) for length in (3, 20)]
    cold, warm = (make_driver(tiny_models["gqa"]) for _ in range(2))
    warm_up(warm.worker)

    assert not warm.worker.table.live.any()
    assert warm.generate(prompts, 6) == cold.generate(prompts, 6)


def test_a_worker_too_small_for_a_warm_up_goes_without(tiny_models: dict[str, TinyModel]) -> None:
    config = ExecutorConfig(
        model=str(tiny_models["gqa"].directory), num_device_blocks=2, block_size_tokens=4, num_host_blocks=0
    )
    worker = load_worker(config)
    warm_up(worker)
    assert not worker.table.live.any()
