"""Steps with prompts in recorded pieces equal steps that are launched anew, whatever step came before."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, LayerCache, Rotation
from executor_svc.attention.key_value_write import write_in_torch
from executor_svc.attention.torch_backend import TorchAttentionPlan
from executor_svc.config import ExecutorConfig
from executor_svc.models.decoder import Decoder
from executor_svc.parallel.group import SINGLE_RANK, SingleRank
from executor_svc.worker.loading import load_worker
from executor_svc.worker.step_graphs import GraphPlan
from octavo_shared.step_wire.step import SamplingRow, TableDelta, pairs
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import PoisonedCacheEngine, StepDriver
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.launch_ahead import Ahead, assert_same, draw_in_torch, one_at_a_time
from tests.numerics.reference import random_prompt
from tests.numerics.strict_capture import PiecewiseCapture
from tests.numerics.torch_decode import TorchDecodePlanner


class TorchReadPlan(TorchAttentionPlan):
    """See `executor_svc.attention.interface.ReadPlan`."""

    def read(self, query: torch.Tensor, cache: LayerCache, layer: AttentionLayer, output: torch.Tensor) -> None:
        output.copy_(self.attend(query, None, cache, replace(layer, reads_only=True)))


class TorchCacheReader(TorchDecodePlanner):
    """The torch backend as a `CacheReader`."""

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> TorchReadPlan:
        return TorchReadPlan(metadata, cache)

    def write(
        self, qkv: torch.Tensor, rotation: Rotation | None, slot_mapping: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        return write_in_torch(qkv, rotation, slot_mapping, cache).query


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> PiecewiseCapture:
    """Let the workers of this test be as on a GPU, whose graphs are recorded by their operations."""
    made = PiecewiseCapture()
    monkeypatch.setattr("executor_svc.worker.assembly.graph_capture", lambda _: made)
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
    monkeypatch.setattr("executor_svc.worker.assembly.device_sampling", lambda _: draw_in_torch)
    monkeypatch.setattr("executor_svc.models.kernels.TorchAttentionBackend", TorchCacheReader)
    return made


def driver_of(directory: Path, cuda_graphs: str) -> StepDriver:
    config = ExecutorConfig(
        model=str(directory),
        cpu_kernels="torch",
        block_size_tokens=4,
        num_device_blocks=600,
        max_num_seqs=12,
        max_num_batched_tokens=64,
        cuda_graphs=cuda_graphs,
    )
    return StepDriver(load_worker(config))


def deltas(driver: StepDriver) -> list[TableDelta]:
    """Return steps of many tokens and of few: prompts in chunks beside decodes, in sizes that need padding."""
    asking = SamplingRow(temperature=0.8, num_logprobs=2, seed=4)
    prompts = [random_prompt(length, seed=length) for length in (41, 5, 23, 1)]
    admissions = [driver.admission(slot, prompt, 12, asking) for slot, prompt in enumerate(prompts)]
    admissions[1].num_prompt_logprobs = 1
    return [
        TableDelta(admissions=tuple(admissions[:2]), prefill_chunks=pairs((0, 39), (1, 5))),
        TableDelta(prefill_chunks=pairs((0, 2))),  # 3 tokens where 44 were
        TableDelta(admissions=(admissions[2],), prefill_chunks=pairs((2, 10))),
        TableDelta(),
        TableDelta(prefill_chunks=pairs((2, 13)), admissions=(admissions[3],)),
        TableDelta(prefill_chunks=pairs((3, 1))),
        TableDelta(released_slots=np.array([0, 1, 2], np.int32)),
    ]


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3ForCausalLM", "BloomForCausalLM", "OPTForCausalLM"]
)
def test_prompts_in_pieces_are_prompts_at_once(name: str, tmp_path: Path, capture: PiecewiseCapture) -> None:
    save_tiny_architecture(tmp_path, name, FAMILY_ARCHITECTURES[name])
    expected = one_at_a_time(whole := driver_of(tmp_path, "off"), deltas(whole))
    assert not capture.pieces

    ahead = Ahead(driver_of(tmp_path, "auto"))
    for delta in deltas(ahead.driver):
        ahead.launch(delta)
    found = ahead.finish()
    assert_same(found, expected, tolerance=1e-3)  # products of other sizes round otherwise
    model = ahead.driver.worker._runner.model  # type: ignore[attr-defined]
    assert isinstance(model, Decoder)
    num_pieces = 1 + len(model.config.layers)  # a layer is a piece and a read
    assert {len(pieces) for pieces in capture.pieces.values()} == {num_pieces}
    assert sorted(capture.pieces) == [8, 16, 24, 32, 40, 48, 56, 64]
    assert capture.num_launched == 5 * num_pieces


class OneOfTwo(SingleRank):
    """A rank whose neighbour has a larger part of the model."""

    def least(self, number: int) -> int:
        del number
        return 0


def test_no_rank_has_pieces_unless_all_gain(tmp_path: Path, capture: PiecewiseCapture) -> None:
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    model = driver_of(tmp_path, "off").worker._runner.model  # type: ignore[attr-defined]
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_num_blocks": 4}
    plans = [GraphPlan.of(model, TorchCacheReader(), capture, group, **sizes) for group in (SINGLE_RANK, OneOfTwo())]

    assert [plan is not None and list(plan.piece_sizes) for plan in plans] == [[8, 16], []]
