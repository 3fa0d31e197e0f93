"""What a torch worker reports, refuses and survives."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from executor_svc.cache.cache_engine import CacheEngine
from executor_svc.config import ExecutorConfig
from executor_svc.fake.worker import FakeWorker
from executor_svc.models.decoder import Decoder
from executor_svc.models.native_forward import NativeForward
from executor_svc.sampler.device_sampler import DeviceSampler
from executor_svc.sampler.likeliest import Ranked
from executor_svc.sampler.sample_rows import SampleRows
from executor_svc.sampler.torch_backend import KnownTokens
from executor_svc.worker.interface import RunningStep, Worker, execute
from executor_svc.worker.largest_step import run_largest_steps
from executor_svc.worker.loading import load_worker
from executor_svc.worker.warm_up import warm_up
from octavo_shared.errors import DeviceLostError, InvalidStepError, ModelLoadError, StepFailedError
from octavo_shared.step_wire.step import Int32Array, SamplingRow, Step, TableDelta, pairs
from tests.numerics.conftest import TinyModel
from tests.numerics.driver import fork_of
from tests.numerics.launch_ahead import draw_in_torch
from tests.numerics.reference import MakeDriver, random_prompt
from tests.numerics.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, save_tiny_model


@pytest.fixture
def model(tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models["gqa"]


def loaded(directory: Path, **settings: Any) -> Worker:
    if "kv_cache_gib" not in settings:
        settings = {"num_device_blocks": 1, **settings}
    return load_worker(ExecutorConfig.model_validate({"model": str(directory), **settings}))


def test_info_describes_model_cache_and_limits(model: TinyModel) -> None:
    sizes = {"block_size_tokens": 8, "num_device_blocks": 33, "num_host_blocks": 7, "max_num_seqs": 5}
    info = loaded(model.directory, **sizes).info

    assert info.model_id == "gqa"
    assert (info.block_size_tokens, info.num_device_blocks, info.num_host_blocks) == (8, 33, 7)
    assert (info.max_model_len, info.vocab_size, info.max_num_seqs) == (MAX_MODEL_LEN, VOCAB_SIZE, 5)
    assert (info.dtype, info.eos_token_ids, info.tp_size) == ("float32", (2,), 1)


def test_weights_that_are_stored_in_another_format_are_converted_and_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path)
    with caplog.at_level("INFO"):
        assert loaded(tmp_path).info.dtype == "float32"
        assert "weights_converted" not in caplog.text
        assert loaded(tmp_path, dtype="bfloat16").info.dtype == "bfloat16"
    assert "event=weights_converted stored=F32 weights=bfloat16" in caplog.text


def test_cache_size_in_gib_gives_the_number_of_blocks(model: TinyModel) -> None:
    # keys and values * 2 layers * 16 tokens * 2 KV heads * 8 dimensions * 4 bytes
    block_bytes = 2 * 2 * 16 * 2 * 8 * 4

    sizes = {"kv_cache_gib": 10.5 * block_bytes / 2**30, "host_cache_gib": 3.5 * block_bytes / 2**30}
    info = loaded(model.directory, **sizes).info

    assert (info.num_device_blocks, info.num_host_blocks) == (10, 3)


def test_each_load_is_a_new_instance_of_the_same_model(model: TinyModel) -> None:
    first, second = loaded(model.directory).info, loaded(model.directory).info

    assert first.instance_id != second.instance_id
    assert first.model_hash == second.model_hash


def test_model_hash_differs_between_models_and_trainings_of_one(
    tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, seed=1)
    directories = [tmp_path, *(each.directory for each in tiny_models.values())]

    assert len({loaded(each).info.model_hash for each in directories}) == len(directories)


@pytest.mark.parametrize(
    ("generation_config", "expected"), [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 7}, (7,)), ({}, (2,))]
)
def test_eos_ids_come_from_generation_config_first(
    generation_config: dict[str, object], expected: tuple[int, ...], model: TinyModel, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(model.directory, tmp_path / "copy"))
    (directory / "generation_config.json").write_text(json.dumps(generation_config))

    assert loaded(directory).info.eos_token_ids == expected


def test_tokenizer_files_are_those_that_exist(model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model.directory, tmp_path / "copy"))
    assert loaded(directory).tokenizer_files() == ()
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str().encode()
    (directory / "tokenizer.json").write_bytes(tokenizer)
    (directory / "chat_template.jinja").write_text("hello")

    files = {file.name: file.content for file in loaded(directory).tokenizer_files()}

    found = {name: files[name] for name in files if name not in ("config.json", "generation_config.json")}
    assert found == {"tokenizer.json": tokenizer, "chat_template.jinja": b"hello"}


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_broken_tokenizer_file_is_named(content: str, model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model.directory, tmp_path / "copy"))
    (directory / "tokenizer.json").write_text(content)

    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        loaded(directory)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_gib": 1e6, "host_cache_gib": 0}, r"1000000\.0 GiB, but \d+\.\d GiB of memory are available"),
        ({"num_device_blocks": 1, "host_cache_gib": 1e6}, r"GiB of memory are available; .* --host-cache-gib"),
        ({"kv_cache_gib": 1e-9}, "too small for a single block"),
        ({"max_model_len": MAX_MODEL_LEN + 1}, f"max_model_len is {MAX_MODEL_LEN + 1}"),
    ],
)
def test_settings_that_the_machine_or_the_model_cannot_have_are_refused(
    settings: dict[str, Any], words: str, model: TinyModel
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        loaded(model.directory, **settings)


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

    def fail(*arguments: object) -> None:
        raise RuntimeError("out of everything")

    monkeypatch.setattr(NativeForward, "__call__", fail)

    with pytest.raises(StepFailedError, match="step 1 failed: RuntimeError: out of everything") as caught:
        driver.prefill([[3, 4, 5]])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert type(caught.value) is StepFailedError  # the device computes


def test_a_forward_pass_that_fails_on_a_dead_device_is_the_loss_of_the_device(
    model: TinyModel, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("executor_svc.worker.assembly.device_probe", lambda _: dead)
    driver = make_driver(model)
    monkeypatch.setattr(NativeForward, "__call__", dead)
    with pytest.raises(DeviceLostError, match="the device is lost: an illegal memory access"):
        driver.prefill([[3, 4, 5]])


def test_a_failed_step_leaves_no_tensor_behind(
    model: TinyModel, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(model)
    activations: list[weakref.ref[torch.Tensor]] = []

    def fail(*_: object) -> None:
        large = torch.zeros(1)
        activations.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(NativeForward, "__call__", fail)
    try:
        driver.prefill([[3, 4, 5]])
    except StepFailedError as error:
        kept = error  # as by a stream that ends with it
    assert activations[0]() is None
    assert "out of memory" in str(kept)


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


class WatchedSampler(DeviceSampler):
    """Notes how many rows it samples, and gives candidates to, in each step."""

    def __init__(self) -> None:
        super().__init__(draw_in_torch)
        self.num_sampled: list[int] = []
        self.num_beams: list[int] = []

    def sample(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, known: KnownTokens
    ) -> torch.Tensor:
        assert rows.are_processed().all()
        assert (rows.sampling["num_logprobs"] > 0).all()
        self.num_sampled.append(len(logits))
        return super().sample(logits, logit_rows, rows, known)

    def candidates(self, logits: torch.Tensor, *arguments: Any) -> Ranked:
        self.num_beams.append(len(logits))
        return super().candidates(logits, *arguments)


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "num_prompts"),
    [(100, 8, 64, 8), (40, 8, 64, 8), (100, 1, 64, 1), (20, 20, 64, 20), (100, 3, 20, 3), (7, 2, 2, 2)],
)
def test_the_largest_steps_have_all_the_tokens_and_rows_that_a_step_may_have(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    num_prompts: int,
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = WatchedSampler()
    monkeypatch.setattr("executor_svc.worker.assembly.device_sampling", lambda _: draw_in_torch)
    monkeypatch.setattr("executor_svc.worker.assembly.DeviceSampler", lambda _: sampler)
    worker = loaded(
        model.directory,
        cpu_kernels="torch",
        num_device_blocks=8,
        num_host_blocks=2,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    passes: list[tuple[int, int, int]] = []
    moves: list[tuple[int, int]] = []
    forward, move = Decoder.forward, CacheEngine.move

    def watched_forward(self: Decoder, token_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        passes.append((len(token_ids), int(positions.max()), len(rest[2])))  # of the wanted tokens
        return forward(self, token_ids, positions, *rest)

    def watched_move(self: CacheEngine, step: Step) -> None:
        moves.append((len(step.blocks_to_swap_out), len(step.blocks_to_swap_in)))
        move(self, step)

    monkeypatch.setattr(Decoder, "forward", watched_forward)
    monkeypatch.setattr(CacheEngine, "move", watched_move)
    run_largest_steps(worker)

    num_tokens = min(max_num_batched_tokens, num_prompts * (max_model_len - 1))
    last_position = max_model_len - 2 if num_tokens > num_prompts else 0
    # Log-probabilities of a prompt want the hidden state of every token.
    assert passes == [(num_tokens, last_position, num_tokens), (num_tokens, last_position, num_prompts)]
    assert (sampler.num_sampled, sampler.num_beams) == ([num_prompts], [num_prompts])
    assert moves == [(0, 0), (0, 0), (1, 0), (0, 1)]
    assert not worker.table.live.any()


def test_a_warm_up_leaves_no_trace_but_in_blocks_that_nobody_has(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver
) -> None:
    prompts = [random_prompt(length, seed=length) for length in (3, 20)]
    cold, warm = (make_driver(tiny_models["gqa"]) for _ in range(2))
    warm_up(warm.worker)

    assert not warm.worker.table.live.any()
    assert warm.generate(prompts, 6) == cold.generate(prompts, 6)


def test_a_warm_up_runs_every_kind_of_step() -> None:
    class Watched(FakeWorker):
        def launch(self, step: Step) -> RunningStep:
            table = self.table
            num_decodes, chunks = int(table.active.sum()), step.delta.prefill_chunks
            running = super().launch(step)
            samplings = {float(table.sampling["temperature"][slot]) for slot in np.flatnonzero(table.active)}
            steps.append((len(chunks), num_decodes, len(samplings)))
            return running

    steps: list[tuple[int, int, int]] = []
    warm_up(Watched())
    # Prompts, decodes beside them, ways to sample: each way from the second step on.
    assert steps == [(1, 0, 1), (1, 1, 2), (157, 2, 2), (1, 159, 2), (0, 160, 2), (0, 160, 2)]


def test_a_device_that_compiles_kernels_is_warmed_up_before_anybody_uses_it(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[Worker] = []
    monkeypatch.setattr("executor_svc.worker.assembly.warm_up", warmed.append)
    loaded(model.directory)
    assert not warmed
    monkeypatch.setattr("executor_svc.worker.assembly.compiles_kernels", lambda _: True)
    worker = loaded(model.directory)
    assert warmed == [worker]


def test_eos_ids_that_the_model_does_not_have_end_nothing(model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model.directory, tmp_path / "model"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, VOCAB_SIZE, -1]}))

    assert loaded(directory).info.eos_token_ids == (2,)


def test_a_worker_too_small_for_a_warm_up_goes_without(tiny_models: dict[str, TinyModel]) -> None:
    sizes = {"num_device_blocks": 2, "block_size_tokens": 4, "num_host_blocks": 0}
    worker = loaded(tiny_models["gqa"].directory, **sizes)
    warm_up(worker)
    assert not worker.table.live.any()
