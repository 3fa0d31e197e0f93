"""A model that several ranks share gives the tokens and logits of the model in one process, whatever the family."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as FileType

from executor_svc.cache.cache_engine import CacheShape
from executor_svc.config import ExecutorConfig
from executor_svc.models.quantized_linear import QuantizedLinear
from executor_svc.worker.loading import check_model, load_worker
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.step import SamplingRow, StepResult, TableDelta, pairs
from scheduler_svc.executors.serving_limits import PlannerSettings
from scheduler_svc.request.parameters import StopConditions
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import PoisonedCacheEngine, RecordingSampler, StepDriver
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.gguf_models import FAMILIES
from tests.numerics.native import SETTINGS
from tests.numerics.reference import assert_close, random_prompt
from tests.numerics.threaded_group import ThreadedGroup, ThreadedRanks
from tests.support.each_row import each_row
from tests.support.fleet import assert_same_outcomes
from tests.support.gguf_files import of_type, write_gguf_of
from tests.support.schedules import Play, Request, Schedule

PROMPTS = [random_prompt(length, seed=length) for length in (1, 15, 17, 40)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family: most have 4 heads and 2 KV heads, so that of 4 ranks two share one; 97 tokens, so
    that the vocabulary is padded.
    """
    folder = tmp_path_factory.mktemp("families")
    for name, settings in FAMILY_ARCHITECTURES.items():
        save_tiny_architecture(folder / name, name, settings)
    return {name: folder / name for name in FAMILY_ARCHITECTURES}


@pytest.fixture
def cleanup(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
    with ExitStack() as stack:
        yield stack


def config_of(directory: Path, **settings: object) -> ExecutorConfig:
    return ExecutorConfig.model_validate(
        {
            "model": str(directory),
            "block_size_tokens": 4,
            "num_device_blocks": 100,
            "num_host_blocks": 16,
            "max_num_seqs": 8,
            **settings,
        }
    )


def last_logits(worker: TorchWorker) -> torch.Tensor:
    sampler = worker._sampler
    assert isinstance(sampler, RecordingSampler)
    return sampler.logits


def ranks_of(directory: Path, tp: int, cleanup: ExitStack, **settings: object) -> ThreadedRanks:
    ranks = ThreadedRanks(config_of(directory, **settings), tp)
    cleanup.callback(ranks.close)
    return ranks


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILY_ARCHITECTURES)
def test_tokens_equal_those_of_one_process(
    name: str, tp: int, directories: dict[str, Path], cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_svc.worker.assembly.Sampler", RecordingSampler)
    alone = load_worker(config_of(directories[name]))
    assert isinstance(alone, TorchWorker)
    expected = StepDriver(alone).generate(PROMPTS, num_new_tokens=10, chunk_size=7)

    ranks = ranks_of(directories[name], tp, cleanup)
    outputs = StepDriver(ranks).generate(PROMPTS, num_new_tokens=10, chunk_size=7)

    assert outputs == expected
    assert_close(last_logits(ranks.workers[0]), last_logits(alone))
    for worker in ranks.workers[1:]:
        assert np.array_equal(worker.table.token_ids, ranks.table.token_ids)
        assert isinstance(worker._sampler, RecordingSampler)
        assert not worker._sampler.num_logit_rows, "the first rank samples for all"


def test_ranks_that_share_a_kv_head_give_the_tokens_of_one_process(
    directories: dict[str, Path], cleanup: ExitStack
) -> None:
    directory = directories["Qwen3ForCausalLM"]
    expected = StepDriver(load_worker(config_of(directory))).generate(PROMPTS, num_new_tokens=10, chunk_size=7)

    outputs = StepDriver(ranks_of(directory, 4, cleanup)).generate(PROMPTS, num_new_tokens=10, chunk_size=7)

    assert outputs == expected


# Each rank has whole blocks of 256 inputs.
LLAMA_OF_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 8}
DEEPSEEK_OF_BLOCKS = {**FAMILIES["DeepseekV3ForCausalLM"], "intermediate_size": 64, "moe_intermediate_size": 64}


@each_row(
    ("LlamaForCausalLM", LLAMA_OF_BLOCKS, FileType.Q8_0),
    ("LlamaForCausalLM", LLAMA_OF_BLOCKS, FileType.Q5_1),
    ("LlamaForCausalLM", LLAMA_OF_BLOCKS, FileType.Q4_K),
    ("DeepseekV3ForCausalLM", DEEPSEEK_OF_BLOCKS, FileType.Q8_0),
)
def test_ranks_that_share_a_gguf_file_give_the_tokens_of_one_process(
    name: str,
    sizes: Mapping[str, Any],
    kind: FileType,
    *,
    cleanup: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("executor_svc.worker.assembly.Sampler", RecordingSampler)
    save_tiny_architecture(tmp_path / kind.name, name, sizes)
    file = write_gguf_of(tmp_path / kind.name, tmp_path / f"{kind.name}.gguf", of_type(kind))
    alone = load_worker(config_of(file))
    assert isinstance(alone, TorchWorker)
    expected = StepDriver(alone).generate(PROMPTS, num_new_tokens=10, chunk_size=7)

    ranks = ranks_of(file, 2, cleanup)
    outputs = StepDriver(ranks).generate(PROMPTS, num_new_tokens=10, chunk_size=7)

    assert outputs == expected
    exact, ours = last_logits(alone), last_logits(ranks.workers[0])
    assert float((ours - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("number_format", SETTINGS)
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [n if n == "Gemma2ForCausalLM" else pytest.param(n, marks=pytest.mark.slow) for n in FAMILY_ARCHITECTURES],
)
def test_outputs_of_ranks_have_the_bits_of_those_alone(
    name: str, tp: int, number_format: str, directories: dict[str, Path], cleanup: ExitStack
) -> None:
    ranks = ranks_of(directories[name], tp, cleanup, **SETTINGS[number_format])

    def emptied() -> ThreadedRanks:
        ranks.reset()
        return ranks

    sampling = SamplingRow(temperature=1.0, top_p=0.9, seed=3, num_logprobs=2)
    requests = [Request(prompt, StopConditions(8, ignore_eos=True), sampling) for prompt in PROMPTS]
    lone = Schedule(100, settings=PlannerSettings(prefix_caching=False))
    alone = [Play(lone, [request], emptied).run().outcome_of(0) for request in requests]

    chunked = PlannerSettings(long_prefill_threshold=7, max_long_prefills=4)
    for schedule in (Schedule(100), Schedule(100, settings=chunked), Schedule(30, num_steps_in_flight=2)):
        play = Play(schedule, requests, emptied).run()
        assert_same_outcomes(map(play.outcome_of, range(len(requests))), alone, f"{schedule}")


def test_int8_products_of_every_rank_are_in_c(
    directories: dict[str, Path], cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_svc.worker.assembly.Sampler", RecordingSampler)
    alone = load_worker(config_of(directories["LlamaForCausalLM"]))
    assert isinstance(alone, TorchWorker)
    StepDriver(alone).prefill(PROMPTS)
    monkeypatch.setattr(QuantizedLinear, "__init__", None)  # what restores its weight in each call

    ranks = ranks_of(directories["LlamaForCausalLM"], 2, cleanup, quantization="int8")
    StepDriver(ranks).prefill(PROMPTS)

    exact, ours = last_logits(alone), last_logits(ranks.workers[0])
    assert 1e-4 < float((ours - exact).norm() / exact.norm()) < 0.05


def test_each_rank_has_its_part_of_the_memory(directories: dict[str, Path], cleanup: ExitStack) -> None:
    whole = load_worker(config_of(directories["LlamaForCausalLM"]))

    halves = ranks_of(directories["LlamaForCausalLM"], 2, cleanup).workers
    quarters = ranks_of(directories["LlamaForCausalLM"], 4, cleanup).workers

    def kv_heads(worker: object) -> int:
        return worker._cache_engine.layers[0].keys.shape[2]  # type: ignore[attr-defined, no-any-return]

    assert kv_heads(whole) == 2
    assert [kv_heads(worker) for worker in halves] == [1, 1]
    assert [kv_heads(worker) for worker in quarters] == [1, 1, 1, 1]  # two ranks have the same one
    assert halves[0].info.tp_size == 2


@pytest.mark.parametrize("num_blocks", [(50, 70), (70, 50)])
def test_the_least_number_of_blocks_counts(
    num_blocks: tuple[int, int], directories: dict[str, Path], cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with unequal memory agree on what the smallest has room for."""
    shape_of_rank = CacheShape(2, 4, 1, 8, torch.float32)  # of two KV heads a rank has one
    loading = threading.local()  # each rank has a thread of its own

    def load_rank(config: ExecutorConfig, group: ThreadedGroup) -> TorchWorker:
        loading.cache_bytes = num_blocks[group.rank] * shape_of_rank.bytes_per_block
        worker = load_worker(config, group)
        assert isinstance(worker, TorchWorker)
        return worker

    monkeypatch.setattr("tests.numerics.threaded_group.load_worker", load_rank)
    monkeypatch.setattr("executor_svc.worker.assembly.cpu_cache_bytes", lambda *_: loading.cache_bytes)

    ranks = ranks_of(directories["LlamaForCausalLM"], 2, cleanup, num_device_blocks=None)

    assert [worker.info.num_device_blocks for worker in ranks.workers] == [50, 50]
    assert len({len(worker._cache_engine.layers[0].keys) for worker in ranks.workers}) == 1


def test_log_probabilities_of_the_prompt_come_from_all_ranks(directories: dict[str, Path], cleanup: ExitStack) -> None:
    sampling = SamplingRow(temperature=0.8, seed=5, num_logprobs=3)

    def run(driver: StepDriver) -> StepResult:
        admission = replace(driver.admission(0, PROMPTS[3], num_new_tokens=2, sampling=sampling), num_prompt_logprobs=2)
        return driver.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, len(PROMPTS[3])))))

    expected = run(StepDriver(load_worker(config_of(directories["Qwen3ForCausalLM"]))))
    actual = run(StepDriver(ranks_of(directories["Qwen3ForCausalLM"], 2, cleanup)))

    assert actual.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
    assert expected.prompt_logprobs is not None
    assert actual.prompt_logprobs is not None
    assert len(actual.prompt_logprobs) == len(PROMPTS[3]) - 1
    torch.testing.assert_close(
        torch.from_numpy(actual.prompt_logprobs), torch.from_numpy(expected.prompt_logprobs), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("tp", "reason"), [(3, "4 attention heads"), (8, "4 attention heads"), (6, "4 attention heads")]
)
def test_ranks_that_cannot_share_the_heads_are_refused(tp: int, reason: str, directories: dict[str, Path]) -> None:
    config = config_of(directories["LlamaForCausalLM"], tp=tp)

    with pytest.raises(
        ModelLoadError, match=(f"tp is {tp}, but .*config.json has {reason}, which is not divisible among")
    ):
        check_model(config)


def test_ranks_that_cannot_share_the_kv_heads_are_refused(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {"hidden_size": 48, "num_attention_heads": 6})

    with pytest.raises(
        ModelLoadError, match=(r"tp is 3, but .*config.json has 2 KV heads, which is not divisible among")
    ):
        check_model(config_of(tmp_path, tp=3))


def test_ranks_that_cannot_share_a_delta_net_are_refused(tmp_path: Path) -> None:
    settings = {**FAMILY_ARCHITECTURES["Qwen3_5ForCausalLM"], "linear_num_key_heads": 3}
    save_tiny_architecture(tmp_path, "Qwen3_5ForCausalLM", settings)

    with pytest.raises(
        ModelLoadError, match=r"tp is 2, but .*config.json has 3 key heads in a delta net, which is not divisible among"
    ):
        check_model(config_of(tmp_path, tp=2))


def test_ranks_that_memory_lacks_for_are_refused(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.models.memory_needs.available_memory_bytes", lambda: 2**29)
    config = config_of(directories["LlamaForCausalLM"], tp=2, num_device_blocks=None, kv_cache_gib=0.25)

    with pytest.raises(
        ModelLoadError, match=r" needs 0.9 GB of memory, .* and 0.5 GB are free; .*lower --kv-cache-gib"
    ):
        check_model(config)
    check_model(config, are_ranks_here=False)  # the others may be on machines that have more


def test_ranks_that_cannot_share_the_mlp_are_refused(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {"intermediate_size": 50})

    with pytest.raises(ModelLoadError, match="an intermediate_size of 50"):
        check_model(config_of(tmp_path, tp=4))
