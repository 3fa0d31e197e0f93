from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from executor_svc.checkpoint.gguf import tokenizer_cache
from executor_svc.config import ExecutorConfig
from executor_svc.worker.loading import load_worker
from tests.numerics.driver import PoisonedCacheEngine, RecordingSampler, StepDriver
from tests.numerics.launch_ahead import draw_in_torch
from tests.numerics.tiny_models import VARIANTS, save_tiny_model


@dataclass(frozen=True, slots=True)
class TinyModel:
    directory: Path
    reference: LlamaForCausalLM


@pytest.fixture(scope="session", autouse=True)
def _own_tokenizer_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave the user's cache of converted tokenizers as it is."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setattr(tokenizer_cache, "user_cache_directory", lambda: directory)
        yield


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """All variants, made once."""
    models = {}
    for name, overrides in VARIANTS.items():
        directory = tmp_path_factory.mktemp("models") / name
        models[name] = TinyModel(directory, save_tiny_model(directory, **overrides))
    return models


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RecordingSampler:
    """The sampler of every worker that is loaded in this test."""
    sampler = RecordingSampler()
    monkeypatch.setattr("executor_svc.worker.assembly.Sampler", lambda *_: sampler)
    return sampler


@pytest.fixture
def make_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StepDriver]:
    """Load a model with a cache full of NaN and return a driver for it."""
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)

    def make(model: TinyModel, block_size_tokens: int = 4, num_device_blocks: int = 600, seed: int = 0) -> StepDriver:
        worker = load_worker(
            ExecutorConfig(
                model=str(model.directory),
                block_size_tokens=block_size_tokens,
                num_device_blocks=num_device_blocks,
                num_host_blocks=64,
                max_num_seqs=64,
            )
        )
        return StepDriver(worker, seed)

    return make


@pytest.fixture
def device_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every worker of this test sample as on a GPU."""
    monkeypatch.setattr("executor_svc.worker.assembly.device_sampling", lambda _: draw_in_torch)
