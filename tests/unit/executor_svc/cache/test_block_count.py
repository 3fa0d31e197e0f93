"""The KV cache gets what is configured, or what the memory has room for."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from executor_svc.cache import block_count
from executor_svc.cache.block_count import (
    BlockCounts,
    check_cache_settings,
    count_blocks,
    cpu_cache_bytes,
    gpu_cache_bytes,
    why_short,
)
from executor_svc.cache.cache_engine import CacheShape
from executor_svc.config import ExecutorConfig
from executor_svc.worker.graph_capture import Capture, Replay, measure_graph_bytes
from octavo_shared.errors import ModelLoadError
from tests.support.each_row import each_row

GIB = 2**30
# 2 * 2 layers * 16 tokens * 2 heads * 32 dimensions * 4 bytes = 16 KiB
SHAPE = CacheShape(num_layers=2, block_size=16, num_kv_heads=2, head_dim=32, dtype=torch.float32)


def config(**settings: object) -> ExecutorConfig:
    return ExecutorConfig.model_validate({"model": "any", "host_cache_gib": 0, **settings})


def never() -> int:
    raise AssertionError("nobody has to look at the memory")


class FakeGpu:
    """80 GiB: 3 of another process, 20 of weights in torch's hands, 5 more while a step runs.

    A graph takes 2 GiB, the next one 0.25, and 0.125 stay for good.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.graphs: list[int] = []

    def total(self) -> int:
        return 80 * GIB

    def free(self) -> int:
        return 80 * GIB - 3 * GIB - self.used_by_torch() - sum(self.graphs)

    def used_by_torch(self) -> int:
        return 21 * GIB  # some of it kept for later

    def measure_peak(self, run: Callable[[], object]) -> int:
        run()
        return 25 * GIB

    def release(self) -> None:
        pass

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        run()
        self.graphs.append(GIB // 4 if self.graphs else 2 * GIB)
        return run

    def make_two_graphs(self, capture: Capture) -> None:
        for _ in range(2):
            capture(lambda: torch.zeros(1))
        self.graphs = [GIB // 8]

    def run_step(self) -> None:
        self.num_steps += 1


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_count, "available_memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(block_count, "total_memory_bytes", lambda: 8 * GIB)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_device_blocks": 7, "num_host_blocks": 3}, BlockCounts(7, 3)),
        ({"num_device_blocks": 7, "kv_cache_gib": 1.0}, BlockCounts(7, 0)),
        ({"kv_cache_gib": 1.0, "host_cache_gib": 0.5}, BlockCounts(65_536, 32_768)),
    ],
)
@pytest.mark.usefixtures("memory")
def test_what_is_configured_counts(settings: dict[str, object], expected: BlockCounts) -> None:
    assert count_blocks(config(**settings), SHAPE, never) == expected


@each_row(
    # A quarter of the cache, and a quarter of the host pool.
    (64, {"kv_cache_gib": 1.0, "host_cache_gib": 0.5}, BlockCounts(49_152, 24_576, 4_096, 2_048)),
    # As many as blocks, where they are small: a GiB of 16 and 1 KiB.
    (1, {"kv_cache_gib": 1.0}, BlockCounts(61_681, 0, 61_680, 0)),
    (64, {"kv_cache_gib": 1.0, "state_cache_gib": 0.5}, BlockCounts(32_768, 0, 8_192, 0)),
    (64, {"kv_cache_gib": 1.0, "host_cache_gib": 0.5, "state_cache_gib": 0}, BlockCounts(65_536, 32_768)),
    # So many blocks, and states on top of them.
    (64, {"num_device_blocks": 300, "num_host_blocks": 30}, BlockCounts(300, 30, 25, 2)),
    (64, {"num_device_blocks": 300, "state_cache_gib": 0.5}, BlockCounts(300, 0, 8_192, 0)),
    (1, {"num_device_blocks": 300}, BlockCounts(300, 0, 300, 0)),
)
def test_saved_states_have_a_part_of_the_cache(
    state_kib: int, settings: dict[str, object], counts: BlockCounts
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_count, "available_memory_bytes", lambda: 8 * GIB)
        assert count_blocks(config(**settings), replace(SHAPE, state_bytes=state_kib * 1024), never) == counts


@pytest.mark.usefixtures("memory")
def test_saved_states_count_where_memory_is_short() -> None:
    shape = replace(SHAPE, state_bytes=64 * 1024)
    with pytest.raises(ModelLoadError, match=r"would take 9\.0 GiB, but 8\.0 GiB of memory are available"):
        count_blocks(config(kv_cache_gib=9.0), shape, never)
    check_cache_settings(config(state_cache_gib=7.5), shape)
    with pytest.raises(ModelLoadError, match=r"would take 8\.5 GiB"):
        check_cache_settings(config(state_cache_gib=8.5), shape)
    with pytest.raises(ModelLoadError, match=r"too small for a single block; set at least --kv-cache-gib 0\.51, or"):
        count_blocks(config(kv_cache_gib=0.5, state_cache_gib=0.5), shape, never)
    said = (
        "holds 48 tokens of the model's 64; set --kv-cache-gib 0.000082, or --kv-cache-dtype bfloat16, which holds 96"
    )
    assert why_short(shape, 3, 64) == f"the KV cache {said}"
    counts = count_blocks(config(kv_cache_gib=0.000082), shape, never)
    assert counts.device >= 4


@pytest.mark.usefixtures("memory")
def test_else_the_memory_counts() -> None:
    assert count_blocks(config(), SHAPE, lambda: 10 * SHAPE.bytes_per_block + 5) == BlockCounts(10, 0)


@each_row(
    (4, torch.float32, None),
    (
        3,
        torch.float32,
        "holds 48 tokens of the model's 60; set --kv-cache-gib 0.000062, or --kv-cache-dtype bfloat16, which holds 96",
    ),
    (1, torch.float32, "holds 16 tokens of the model's 60; set --kv-cache-gib 0.000062"),
    (2, torch.bfloat16, "holds 32 tokens of the model's 60; set --kv-cache-gib 0.000031"),
    (
        3,
        torch.bfloat16,
        "holds 48 tokens of the model's 60; set --kv-cache-gib 0.000031, or --kv-cache-dtype int8, which holds 80",
    ),
)
def test_a_cache_that_is_too_short_for_the_model_says_what_would_hold_it(
    num_blocks: int, dtype: torch.dtype, said: str | None
) -> None:
    shape = replace(SHAPE, dtype=dtype)
    assert why_short(shape, num_blocks, 60) == (None if said is None else f"the KV cache {said}")


@each_row(-5 * GIB, 0, SHAPE.bytes_per_block - 1)
def test_no_room_for_a_block_is_refused(free: int) -> None:
    with pytest.raises(
        ModelLoadError, match=r"too small for a single block; set at least --kv-cache-gib 0\.000016, or"
    ):
        count_blocks(config(), SHAPE, lambda: free)


@pytest.mark.usefixtures("memory")
def test_the_size_that_a_refusal_names_has_room_for_a_block() -> None:
    assert count_blocks(config(kv_cache_gib=0.000016), SHAPE, never).device == 1


@pytest.mark.usefixtures("memory")
def test_more_than_the_memory_of_the_machine_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"would take 9\.0 GiB, but 8\.0 GiB of memory are available"):
        count_blocks(config(kv_cache_gib=8.5, host_cache_gib=0.5), SHAPE, never)
    on_gpu = config(kv_cache_gib=8.5, host_cache_gib=0.5, device="cuda")
    assert count_blocks(on_gpu, SHAPE, never).device == 8.5 * GIB // SHAPE.bytes_per_block


@pytest.mark.usefixtures("memory")
def test_all_ranks_of_the_machine_count() -> None:
    settings = config(kv_cache_gib=2.5, host_cache_gib=0.5, tp=3)
    assert count_blocks(settings, SHAPE, never, local_size=2).device == 2.5 * GIB // SHAPE.bytes_per_block
    sentence = r"would take 9\.0 GiB \(3\.0 GiB for each of 3 ranks\), but 8\.0 GiB of memory are available"
    with pytest.raises(ModelLoadError, match=sentence):
        check_cache_settings(settings, SHAPE, local_size=3)
    on_gpu = config(kv_cache_gib=50.0, host_cache_gib=3.0, tp=3, device="cuda")
    with pytest.raises(ModelLoadError, match=sentence):
        count_blocks(on_gpu, SHAPE, never, local_size=3)


@pytest.mark.usefixtures("memory")
def test_a_cpu_gives_a_quarter_of_the_memory_shared_by_its_ranks() -> None:
    assert cpu_cache_bytes(local_size=1) == 2 * GIB
    assert cpu_cache_bytes(local_size=4) == GIB // 2


@pytest.mark.parametrize(
    ("free_gib", "cache_gib"), [(15.9, 4.0), (12.0, 4.0), (8.0, 4.0), (7.9, 2.0), (4.0, 2.0), (3.9, 1.0), (0.5, 0.25)]
)
def test_the_cache_of_a_cpu_is_the_same_again_unless_much_less_is_free(
    free_gib: float, cache_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_count, "available_memory_bytes", lambda: int(free_gib * GIB))
    monkeypatch.setattr(block_count, "total_memory_bytes", lambda: 16 * GIB)
    assert cpu_cache_bytes(local_size=1) == cache_gib * GIB


def test_without_word_from_the_system_a_cpu_gives_a_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_count, "available_memory_bytes", lambda: None)

    assert cpu_cache_bytes(local_size=1) == GIB


def test_a_gpu_gives_what_its_share_leaves_beside_the_largest_step_and_others() -> None:
    gpu = FakeGpu()

    num_bytes = gpu_cache_bytes(gpu, 0.9, gpu.run_step, lambda _: 4 * GIB)

    assert num_bytes == 72 * GIB - 25 * GIB - 3 * GIB - 4 * GIB
    assert gpu.num_steps == 1
    assert gpu_cache_bytes(gpu, 0.3, gpu.run_step, lambda _: 0) < 0


def test_graphs_take_what_the_largest_does_and_for_each_other_what_the_next_does() -> None:
    gpu = FakeGpu()
    assert measure_graph_bytes(gpu, gpu.capture, 9, gpu.make_two_graphs) == 2 * GIB + 8 * GIB // 4 + GIB // 8


def test_a_single_graph_takes_what_it_does() -> None:
    gpu = FakeGpu()

    def make_one(capture: Capture) -> None:
        capture(lambda: torch.zeros(1))
        gpu.graphs.clear()

    assert measure_graph_bytes(gpu, gpu.capture, 1, make_one) == 2 * GIB
