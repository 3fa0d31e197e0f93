"""An executor of several ranks as real processes: it answers like one process, and its ranks end together."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.worker.loading import load_worker
from octavo import Client, SamplingParams
from octavo.values.outputs import Delta, Finished
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import StepDriver
from tests.support.patience import PATIENCE_S
from tests.support.processes import Service, running_service, start_service
from tests.support.tokenizers import byte_level_backend
from tests.support.transfer_executors import AttachedExecutor, CachedPrompt

pytestmark = pytest.mark.timeout(300)

EXECUTOR = "executor_svc"
SCHEDULER = "scheduler_svc"
PROMPT = list(range(97, 117))
NUM_LONG_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of bytes."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_level_backend()
    vocab_size = tokenizer.get_vocab_size()
    settings = {"vocab_size": vocab_size, "max_position_embeddings": 8192, "num_hidden_layers": 3}
    save_tiny_architecture(directory, "LlamaForCausalLM", settings)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@asynccontextmanager
async def running_client(executor_address: str) -> AsyncIterator[Client]:
    """Run a scheduler on an executor; yield a client once both are ready."""
    async with (
        running_service(SCHEDULER, "--executor", executor_address) as scheduler,
        Client(scheduler.address) as client,
    ):
        await client.wait_until_ready(60)
        yield client


def flags(model: Path, tp: int, *more: str) -> list[str]:
    return ["--model", str(model), "--tp", str(tp), "--kv-cache-gib", "0.1", "--num-threads", "1", *more]


def children_of(service: Service) -> list[int]:
    """Return the process ids of the other ranks, whichever thread started them (Linux)."""
    paths = Path(f"/proc/{service.process.pid}/task").glob("*/children")
    return [int(pid) for path in paths for pid in path.read_text(encoding="ascii").split()]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until_loaded(address: str) -> None:
    """Wait until an executor takes a scheduler."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with AttachedExecutor(address):
                return
        await asyncio.sleep(0.1)


async def tokens_of(client: Client) -> list[int]:
    output = await client.generate(PROMPT, GREEDY)
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """What the model of one process answers."""
    driver = StepDriver(load_worker(ExecutorConfig(model=str(model), num_device_blocks=64)))
    assert GREEDY.max_tokens is not None
    return driver.generate([PROMPT], GREEDY.max_tokens)[0]


async def test_two_ranks_answer_like_one_process_and_the_next_two_go_on_when_one_of_them_is_killed(
    model: Path, expected: list[int]
) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=NUM_LONG_TOKENS, ignore_eos=True)
    executor = await start_service(EXECUTOR, *flags(model, 2))
    async with running_client(executor.address) as client:
        assert await tokens_of(client) == expected  # of one process
        token_ids: list[int] = []
        arrived = asyncio.Event()

        async def watch() -> list[int]:
            async for event in client.stream(PROMPT, long):
                if isinstance(event, Delta):
                    token_ids.extend(event.token_ids)
                    arrived.set()
                elif isinstance(event, Finished):
                    return list(event.outputs[0].token_ids)
            raise AssertionError("no last event")

        stream = asyncio.create_task(watch())
        await asyncio.wait({stream, asyncio.create_task(arrived.wait())}, return_when=asyncio.FIRST_COMPLETED)
        [other] = children_of(executor)
        os.kill(other, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert await executor.process.wait() == 1
        num_before = len(token_ids)
        assert num_before < NUM_LONG_TOKENS
        async with running_service(EXECUTOR, *flags(model, 2, "--listen", executor.address)) as successor:
            assert await stream == token_ids
            assert len(token_ids) == NUM_LONG_TOKENS
            # The same prompt once more, without a loss in the middle.
            undisturbed = await client.generate(PROMPT, long)
            assert list(undisturbed.outputs[0].token_ids) == token_ids
            others = children_of(successor)
            assert len(others) == 1
            assert await successor.terminate() == 0
            assert not any(map(is_running, others))


async def test_groups_send_each_other_blocks_and_one_that_loses_a_rank_gets_none(model: Path) -> None:
    size = flags(model, 2, "--block-size-tokens", str(CachedPrompt.BLOCK_SIZE))
    one, other = await asyncio.gather(start_service(EXECUTOR, *size), start_service(EXECUTOR, *size))
    await asyncio.gather(until_loaded(one.address), until_loaded(other.address))
    async with AttachedExecutor(one.address) as sender, AttachedExecutor(other.address) as receiver:
        ours, theirs = CachedPrompt(sender, seed=1), CachedPrompt(receiver, seed=2)
        expected = await ours.compute()
        await receiver.receive(theirs.moved)
        await sender.send(receiver, ours.moved)
        assert (await sender.end(), await receiver.end()) == ("sent", "arrived")
        assert await theirs.go_on() == expected

        [rank] = children_of(other)
        os.kill(rank, signal.SIGSTOP)  # it writes nothing more
        free = [block_id for block_id in range(16) if block_id not in theirs.moved][:4]
        await receiver.run(released_slots=[0])
        await receiver.receive(free, transfer_id=8)
        await sender.send(receiver, ours.moved, transfer_id=8)
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert await other.process.wait() == 1
            assert await sender.end(transfer_id=8) == "cancelled"
    assert await one.terminate() == 0


@pytest.mark.slow
async def test_a_frozen_rank_ends_the_group_within_seconds(model: Path) -> None:
    executor = await start_service(EXECUTOR, *flags(model, 2))
    async with running_client(executor.address) as client:
        await tokens_of(client)
        [other] = children_of(executor)
        os.kill(other, signal.SIGSTOP)
        try:
            async with asyncio.timeout(30):
                assert await executor.process.wait() == 1
            assert not is_running(other)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)


@pytest.mark.slow
async def test_a_group_whose_machine_slept_goes_on(model: Path, expected: list[int]) -> None:
    async with running_service(EXECUTOR, *flags(model, 2)) as executor, running_client(executor.address) as client:
        await tokens_of(client)
        ranks = [executor.process.pid, *children_of(executor)]
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(13)  # longer than a rank may be silent
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        await client.wait_until_ready(60)  # the scheduler has given it up meanwhile, and attaches again
        assert await tokens_of(client) == expected
        assert executor.process.returncode is None


@pytest.mark.slow
async def test_a_launcher_starts_one_process_for_each_rank(model: Path, expected: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    environments = [
        {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(2)
    ]
    command = [sys.executable, "-P", "-m", EXECUTOR, *flags(model, 2, "--listen", "127.0.0.1:0")]
    ranks = [
        await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        for environment in environments
    ]
    try:
        assert ranks[0].stdout is not None
        line = (await ranks[0].stdout.readline()).decode()
        async with running_client(line.partition("listening on ")[2].partition(",")[0]) as client:
            assert await tokens_of(client) == expected
        ranks[1].terminate()  # as a cluster does it, to all; rank 0 decides
        ranks[0].terminate()
        assert [await rank.wait() for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()


@pytest.mark.slow  # numerics/test_tensor_parallel.py has the sentence, test_fake_process.py one that ends the process
async def test_ranks_that_cannot_share_the_model_are_one_sentence(model: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", EXECUTOR, *flags(model, 3, "--listen", "127.0.0.1:0")),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    _, stderr = await process.communicate()

    assert process.returncode == 1
    sentences = [line for line in stderr.decode().splitlines() if not line.startswith("time=")]
    assert sentences == [
        f"octavo executor: tp is 3, but {model / 'config.json'} has 4 attention heads, which is not divisible among "
        "the ranks"
    ]
