"""Models with experts decode by graphs as without them; see tests/numerics/test_decode_graphs.py.

The dense part is in Triton, as on a GPU; attention is plain torch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.models.triton_dense import TritonDense
from executor_svc.native.structs import NumberFormat
from executor_svc.parallel.group import TensorParallelGroup
from executor_svc.worker.loading import load_worker
from tests.kernels.device import SLOW_IF_INTERPRETED
from tests.kernels.launches import log_kernels
from tests.kernels.products import add_up_rows_alike
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import PoisonedCacheEngine, StepDriver
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.reference import random_prompt
from tests.numerics.strict_capture import StrictCapture
from tests.numerics.torch_decode import TorchDecodePlanner

QUICK = "MixtralForCausalLM"
WITH_EXPERTS = ("Gemma4ForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM", QUICK)
PROMPTS = [random_prompt(length, seed=length) for length in (1, 3, 6)]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[StrictCapture]:
    """Every capture that a worker makes; models are in Triton."""
    made: list[StrictCapture] = []

    def dense(
        dtype: torch.dtype,
        device: torch.device,
        *,
        number_format: NumberFormat,
        library: None,
        group: TensorParallelGroup,
    ) -> TritonDense:
        return TritonDense(dtype, device, number_format=number_format, is_invariant=True, group=group)

    def one_more(_: torch.device) -> StrictCapture:
        made.append(StrictCapture())
        return made[-1]

    log_kernels(monkeypatch)
    add_up_rows_alike(monkeypatch)
    monkeypatch.setattr("executor_svc.models.kernels.TorchDense", dense)
    monkeypatch.setattr("executor_svc.models.kernels.TorchAttentionBackend", TorchDecodePlanner)
    monkeypatch.setattr("executor_svc.worker.assembly.graph_capture", one_more)
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
    return made


def config_of(directory: Path, cuda_graphs: str) -> ExecutorConfig:
    settings: dict[str, Any] = {"num_device_blocks": 60, "max_num_seqs": 4, "block_size_tokens": 4}
    return ExecutorConfig(model=str(directory), cpu_kernels="torch", cuda_graphs=cuda_graphs, **settings)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else SLOW_IF_INTERPRETED) for name in WITH_EXPERTS]
)
def test_experts_are_replayed(name: str, tmp_path: Path, captures: list[StrictCapture]) -> None:
    save_tiny_architecture(tmp_path, name, FAMILY_ARCHITECTURES[name])
    without = StepDriver(load_worker(config_of(tmp_path, "off"))).generate(PROMPTS, 4)

    tokens = StepDriver(load_worker(config_of(tmp_path, "auto"))).generate(PROMPTS, 4)

    assert tokens == without
    (capture,) = (each for each in captures if each.sizes)
    assert capture.sizes == [4, 2, 1]
    assert capture.num_replays[4] > 0
