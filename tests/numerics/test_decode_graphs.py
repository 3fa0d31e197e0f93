"""Decodes that are replayed equal decodes that are planned anew, and a replay does the same work whatever the batch.

There is no CUDA graph on a CPU: a replay runs the function again, under eyes that see what a capture would forbid.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.config import ExecutorConfig
from executor_svc.worker.graph_capture import ladder
from executor_svc.worker.loading import load_worker
from executor_svc.worker.step_graphs import MAX_BATCH_SIZE
from octavo_shared.step_wire.step import SamplingRow, TableDelta
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import PoisonedCacheEngine, StepDriver
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES, WITH_STATES
from tests.numerics.launch_ahead import Ahead, admit, assert_same, one_at_a_time
from tests.numerics.reference import random_prompt
from tests.numerics.strict_capture import StrictCapture
from tests.numerics.threaded_group import Exchange, ThreadedGroup, ThreadedRanks
from tests.numerics.torch_decode import TorchDecodePlanner


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> StrictCapture:
    made = StrictCapture()
    monkeypatch.setattr("executor_svc.worker.assembly.graph_capture", lambda _: made)
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
    monkeypatch.setattr("executor_svc.models.kernels.TorchAttentionBackend", TorchDecodePlanner)
    return made


def driver_of(directory: Path, cuda_graphs: str) -> StepDriver:
    return StepDriver(load_worker(config_of(directory, cuda_graphs)))


def config_of(directory: Path, cuda_graphs: str) -> ExecutorConfig:
    return ExecutorConfig(
        model=str(directory),
        cpu_kernels="torch",
        block_size_tokens=4,
        num_device_blocks=600,
        max_num_seqs=12,
        cuda_graphs=cuda_graphs,
    )


def generate(
    driver: StepDriver, lengths: Sequence[int], sampling: SamplingRow, num_new_tokens: int = 9
) -> list[list[int]]:
    prompts = [random_prompt(length, seed=length) for length in lengths]
    return driver.generate(prompts, num_new_tokens, 30, sampling)


# With plain torch, where the host sends rows to experts; in Triton: tests/kernels/test_expert_graphs.py.
ON_THE_HOST = {
    **dict.fromkeys(
        [
            *(name for name in FAMILY_ARCHITECTURES if "Moe" in name),
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "Gemma4ForCausalLM",
            "GptOssForCausalLM",
            "MixtralForCausalLM",
        ],
        "the host reads which experts are chosen",
    ),
    **dict.fromkeys(WITH_STATES, "a layer has a state, which is computed on the host"),
}
DENSE = [name for name in FAMILY_ARCHITECTURES if name not in ON_THE_HOST]
SAMPLINGS = {"greedy": SamplingRow(), "random": SamplingRow(temperature=0.9, top_p=0.9, seed=4)}


# Graphs end before the sampler: which one follows is no matter of the family.
CASES = [(name, "greedy") for name in DENSE] + [("LlamaForCausalLM", "random")]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        pytest.param(name, sampling, marks=() if (name, sampling) in CASES else pytest.mark.slow)
        for name in DENSE
        for sampling in SAMPLINGS
    ],
)
def test_every_family_decodes_as_without_graphs(
    name: str, sampling: str, tmp_path: Path, capture: StrictCapture
) -> None:
    save_tiny_architecture(tmp_path, name, FAMILY_ARCHITECTURES[name])
    lengths = (1, 3, 4, 5, 17, 33, 40)
    without = generate(driver_of(tmp_path, "off"), lengths, SAMPLINGS[sampling], num_new_tokens=5)
    assert not capture.num_replays

    assert generate(driver_of(tmp_path, "auto"), lengths, SAMPLINGS[sampling], num_new_tokens=5) == without
    assert capture.num_replays[8] > 0  # 7 rows and one of padding


@pytest.mark.parametrize("name", sorted(ON_THE_HOST))
def test_experts_and_states_run_without_graphs(
    name: str, tmp_path: Path, capture: StrictCapture, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_architecture(tmp_path, name, FAMILY_ARCHITECTURES[name])
    with caplog.at_level("INFO"):
        driver = driver_of(tmp_path, "auto")
    assert f"event=cuda_graphs sizes=0 reason='{ON_THE_HOST[name]}'" in caplog.text
    assert len(generate(driver, (5, 6), SamplingRow())[0]) == 9
    assert not capture.num_replays


class RecordingGroup(ThreadedGroup):
    """A rank whose collectives a graph could hold, and which writes them down."""

    why_not_capturable = None

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(exchange, rank)
        self.collectives: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        self.collectives.append(("all_reduce", tuple(partial.shape)))
        return super().all_reduce(partial)

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor | None:
        self.collectives.append(("gather_columns", tuple(part.shape)))
        return super().gather_columns(part)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_ranks_capture_and_replay_the_same_in_the_same_order(
    name: str, tmp_path: Path, capture: StrictCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_architecture(tmp_path, name, FAMILY_ARCHITECTURES[name])
    without = generate(driver_of(tmp_path, "off"), lengths := (1, 3, 5, 17, 40), SamplingRow())
    captures: list[StrictCapture] = []
    groups: list[RecordingGroup] = []

    def one_more(_: torch.device) -> StrictCapture:
        captures.append(StrictCapture())
        return captures[-1]

    def recording(exchange: Exchange, rank: int) -> RecordingGroup:
        groups.append(RecordingGroup(exchange, rank))
        return groups[-1]

    monkeypatch.setattr("executor_svc.worker.assembly.graph_capture", one_more)
    ranks = ThreadedRanks(config_of(tmp_path, "auto"), 2, recording)
    tokens = generate(StepDriver(ranks), lengths, SamplingRow())
    ranks.close()

    assert tokens == without
    first, second = (each for each in captures if each.sizes)
    assert first.sizes == second.sizes == [12, 8, 4, 2, 1]
    assert first.num_replays == second.num_replays
    assert first.num_replays[8] > 0
    assert groups[0].collectives == groups[1].collectives
    assert set(first.sizes) <= {shape[0] for name, shape in groups[0].collectives if name == "all_reduce"}


def test_ranks_that_exchange_on_the_host_have_no_graphs(
    tmp_path: Path, capture: StrictCapture, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    with caplog.at_level("INFO"):
        ThreadedRanks(config_of(tmp_path, "auto"), 2).close()
    assert "event=cuda_graphs sizes=0 reason='the ranks are threads'" in caplog.text
    assert not capture.sizes


def test_plain_torch_has_no_graphs(
    tmp_path: Path, capture: StrictCapture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("executor_svc.models.kernels.TorchAttentionBackend", TorchAttentionBackend)
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    with caplog.at_level("INFO"):
        driver_of(tmp_path, "auto")
    assert "event=cuda_graphs sizes=0 reason='the attention backend plans its steps on the host'" in caplog.text


def test_every_batch_size_and_steps_with_chunks_beside(
    tmp_path: Path, capture: StrictCapture, device_sampling: None
) -> None:
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    lengths = [1 + index for index in range(12)]
    planned, replayed = driver_of(tmp_path, "off"), driver_of(tmp_path, "auto")
    for num_rows in (1, 2, 3, 7, 9, 12):
        without = generate(planned, lengths[:num_rows], SamplingRow())
        assert generate(replayed, lengths[:num_rows], SamplingRow()) == without
        for driver in (planned, replayed):
            driver.execute(TableDelta(released_slots=np.arange(num_rows, dtype=np.int32)))
    assert sorted(capture.num_replays) == [1, 2, 4, 8, 12]


class FakeGpu:
    """16 MiB, half of it free; each graph takes 64 KiB, for good."""

    def __init__(self, capture: StrictCapture) -> None:
        self.capture = capture
        self.num_peaks = 0

    def total(self) -> int:
        return 2**24

    def free(self) -> int:
        return 2**23 - len(self.capture.sizes) * 2**16

    def used_by_torch(self) -> int:
        return 2**23

    def release(self) -> None:
        pass

    def measure_peak(self, run: Callable[[], object]) -> int:
        run()
        self.num_peaks += 1
        assert not self.capture.num_replays
        return 2**23


def test_a_gpu_gets_the_cache_that_the_largest_steps_and_the_graphs_leave(
    tmp_path: Path, capture: StrictCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(capture)
    monkeypatch.setattr("executor_svc.worker.assembly.gpu_memory", lambda _: gpu)
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})

    def num_blocks(cuda_graphs: str) -> int:
        config = ExecutorConfig(
            model=str(tmp_path),
            cpu_kernels="torch",
            block_size_tokens=1,
            max_num_seqs=12,
            max_num_batched_tokens=64,
            cuda_graphs=cuda_graphs,
            host_cache_gib=0,
        )
        return load_worker(config).info.num_device_blocks

    room = int(2**24 * 0.9) - 2**23
    without = num_blocks("off")
    assert (gpu.num_peaks, capture.sizes) == (1, [])
    # 5 graphs, and what remains of those 2 that were captured to measure.
    assert num_blocks("auto") == pytest.approx(without * (room - 7 * 2**16) / room, rel=1e-3)
    assert (gpu.num_peaks, capture.sizes) == (2, [12, 8, 12, 8, 4, 2, 1])


def test_padding_rows_write_to_no_block_that_sequences_have(
    tmp_path: Path, capture: StrictCapture, device_sampling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[PoisonedCacheEngine] = []

    class KeptCacheEngine(PoisonedCacheEngine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pools.append(self)

    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", KeptCacheEngine)
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    drivers = [driver_of(tmp_path, graphs) for graphs in ("off", "auto")]

    def execute(*deltas: TableDelta) -> None:
        for driver, delta in zip(drivers, deltas, strict=True):
            driver.execute(delta)

    def fill_what_is_not_read() -> None:
        """Give every slot a value of its own, but for the blocks of live sequences."""
        for driver, pool in zip(drivers, pools, strict=True):
            table, generator = driver.worker.table, torch.Generator().manual_seed(1)
            is_free = torch.ones(driver.worker.info.num_device_blocks, dtype=torch.bool)
            for slot in np.flatnonzero(table.live).tolist():
                is_free[torch.from_numpy(table.blocks_of(slot)).long()] = False
            for cache in (cache for layer in pool.layers for cache in (layer.keys, layer.values)):
                values = torch.randn(cache[:-1].shape, generator=generator)
                cache[:-1][is_free] = values[is_free]

    def assert_same_pools() -> None:
        planned, replayed = ([(layer.keys, layer.values) for layer in pool.layers] for pool in pools)
        for ours, theirs in zip(replayed, planned, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine[:-1], other[:-1], equal_nan=True)

    prompts = [random_prompt(2 + index, seed=index) for index in range(7)]
    execute(*(admit(driver, prompts, SamplingRow()) for driver in drivers))
    assert all(0 in driver.free_block_ids for driver in drivers)  # block 0 is nobody's, and seen all the same
    fill_what_is_not_read()
    execute(TableDelta(), TableDelta())  # 7 rows and one of padding
    assert_same_pools()
    gone = TableDelta(released_slots=np.array([4, 5, 6], np.int32))
    execute(gone, gone)  # 4 rows
    fill_what_is_not_read()  # the blocks of those that went have another owner
    joined = [admit(driver, prompts[:1], SamplingRow(), first_slot=7) for driver in drivers]
    execute(*joined)
    execute(TableDelta(), TableDelta())  # 5 rows and three of padding, which were other rows before
    assert_same_pools()
    assert capture.num_replays == {8: 2, 4: 1}


def test_more_rows_than_the_largest_graph_are_planned(
    tmp_path: Path, capture: StrictCapture, device_sampling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_svc.worker.step_graphs.MAX_BATCH_SIZE", 4)
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    lengths = (3, 5, 6, 9, 12)
    without = generate(driver_of(tmp_path, "off"), lengths, SamplingRow())
    assert generate(driver_of(tmp_path, "auto"), lengths, SamplingRow()) == without
    assert not capture.num_replays


def test_replays_feed_tokens_that_the_host_does_not_know_yet(
    tmp_path: Path, capture: StrictCapture, device_sampling: None
) -> None:
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    prompts = [random_prompt(length, seed=length) for length in (2, 9, 30)]
    expected = one_at_a_time(one := driver_of(tmp_path, "off"), decodes(one, prompts))
    ahead = Ahead(driver_of(tmp_path, "auto"))
    for delta in decodes(ahead.driver, prompts):
        ahead.launch(delta)
    assert_same(ahead.finish(), expected)
    assert capture.num_replays == {4: 8}


def decodes(driver: StepDriver, prompts: Sequence[Sequence[int]]) -> list[TableDelta]:
    return [admit(driver, prompts, SAMPLINGS["random"]), *[TableDelta()] * 8]


def test_the_ladder_pads_at_most_7_rows_or_a_fifth() -> None:
    for most in (1, 2, 3, 8, 100, 256, 512, 1000):
        sizes = ladder(most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
        for num_rows in range(9, most + 1):
            size = next(size for size in sizes if size >= num_rows)
            assert size - num_rows <= max(7, size // 5)
    assert len(ladder(MAX_BATCH_SIZE)) <= 24
    assert ladder(7, 8) == [7]
