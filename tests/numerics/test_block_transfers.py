"""Blocks of a real model arrive at another executor bit for bit, and the other one goes on as the first would."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.transfers.messages import BlockFormat
from executor_svc.worker.interface import Worker
from executor_svc.worker.loading import load_worker
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import PoisonedCacheEngine
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.threaded_group import ThreadedRanks
from tests.support.joined_ranks import joined
from tests.support.transfer_executors import CachedPrompt, TransferExecutor

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def cleanup(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
    with ExitStack() as stack:
        yield stack


def load(directory: Path, cleanup: ExitStack, tp: int = 1, **settings: object) -> Worker:
    """Load a model, with several ranks as processes have it: joined by sockets."""
    sizes = {"num_device_blocks": 30, "num_host_blocks": 0, "state_cache_gib": 0.001, "max_num_seqs": 4}
    config = ExecutorConfig.model_validate(
        {"model": str(directory), "num_threads": 1, "block_size_tokens": CachedPrompt.BLOCK_SIZE, **sizes, **settings}
    )
    if tp == 1:
        return load_worker(config)
    ranks = ThreadedRanks(config, tp)
    cleanup.callback(ranks.close)
    return cleanup.enter_context(joined(ranks.workers))


async def check_going_on(worker: Worker, other_worker: Worker) -> None:
    """Compute a prompt on one executor, and go on with its blocks on another one."""
    async with TransferExecutor(worker) as one, TransferExecutor(other_worker) as other:
        ours, theirs = CachedPrompt(one, seed=1), CachedPrompt(other, seed=2)
        expected = await ours.compute()
        await other.receive(theirs.moved)
        await one.send(other, ours.moved)
        assert (await one.end(), await other.end()) == ("sent", "arrived")
        for our, their in zip(ours.moved, theirs.moved, strict=True):
            assert any(one.content([our])), "there is something in the block"
            assert other.content([their]) == one.content([our])
        assert await theirs.go_on() == expected


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
async def test_a_prompt_that_another_executor_has_computed_need_not_be_computed_again(
    kv_cache_dtype: str, cpu_kernels: str, tmp_path: Path, cleanup: ExitStack
) -> None:
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", FAMILY_ARCHITECTURES["LlamaForCausalLM"])
    one, other = (load(tmp_path, cleanup, kv_cache_dtype=kv_cache_dtype, cpu_kernels=cpu_kernels) for _ in range(2))
    await check_going_on(one, other)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Lfm2ForCausalLM", "NemotronHForCausalLM"])
async def test_windows_states_and_shares_of_ranks_travel_too(
    name: str, tp: int, tmp_path: Path, cleanup: ExitStack
) -> None:
    save_tiny_architecture(tmp_path, name, FAMILY_ARCHITECTURES[name])
    await check_going_on(*(load(tmp_path, cleanup, tp) for _ in range(2)))


async def test_groups_of_other_sizes_exchange_nothing(tmp_path: Path, cleanup: ExitStack) -> None:
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", FAMILY_ARCHITECTURES["LlamaForCausalLM"])
    workers = [load(tmp_path, cleanup, tp) for tp in (1, 2)]
    formats = [BlockFormat(each.info, each.info.pools(agreed=True), each.block_bytes) for each in workers]
    assert formats[0].words().replace("float32:", "float32, in shares of 2 ranks:") == formats[1].words()
    async with TransferExecutor(workers[0]) as one, TransferExecutor(workers[1]) as other:
        await other.receive([4])
        await one.send(other, [3])
        assert (await one.end(), await other.end()) == ("cancelled", "cancelled")
