"""Both services as real processes: how they end, what survives whom, what they weigh."""

import asyncio
import importlib
import re
import sys
from pathlib import Path

import grpc.aio
import pytest

import octavo
from octavo import Client, SamplingParams
from octavo.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from octavo.errors import UnavailableError
from octavo.values.outputs import Delta, Finished, RequestOutput
from tests.support.each_row import each_row
from tests.support.processes import Service, running_service, start_service

pytestmark = pytest.mark.timeout(300)

FAKE = "executor_svc.fake"
SCHEDULER = "scheduler_svc"
PROMPT = list(range(97, 117))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


async def first_delta(client: Client, max_tokens: int) -> "asyncio.Task[RequestOutput]":
    """Start a request; return its task once the first token has arrived."""
    arrived = asyncio.Event()

    async def run() -> RequestOutput:
        token_ids: list[int] = []
        async for event in client.stream(PROMPT, greedy(max_tokens), request_id="watched"):
            if isinstance(event, Delta):
                token_ids += event.token_ids
                arrived.set()
            elif isinstance(event, Finished):
                assert list(event.outputs[0].token_ids) == token_ids
                return RequestOutput("watched", PROMPT, event.outputs, event.usage)
        raise AssertionError("no last event")

    task = asyncio.create_task(run())
    await asyncio.wait({task, asyncio.create_task(arrived.wait())}, return_when=asyncio.FIRST_COMPLETED)
    return task


async def test_sigterm_ends_streams_that_outlast_the_grace_period_with_unavailable() -> None:
    async with (
        running_service(FAKE, "--step-ms", "20") as executor,
        running_service(SCHEDULER, "--executor", executor.address, "--shutdown-grace-s", "0.5") as scheduler,
        Client(scheduler.address, resume_timeout_s=0.0) as client,
    ):
        await client.wait_until_ready(30)
        stream = await first_delta(client, 8000)
        scheduler.process.terminate()
        with pytest.raises(UnavailableError, match="shut down"):
            await stream
        assert await scheduler.process.wait() == 0


@pytest.mark.slow  # with ranks in test_tensor_parallel_processes.py, with a second executor in test_fleet_processes.py
async def test_an_executor_killed_in_the_middle_of_a_stream_costs_no_token() -> None:
    executor = await start_service(FAKE, "--step-ms", "5")
    async with (
        running_service(SCHEDULER, "--executor", executor.address) as scheduler,
        Client(scheduler.address) as client,
    ):
        await client.wait_until_ready(30)
        undisturbed = await client.generate(PROMPT, greedy(120))
        stream = await first_delta(client, 120)
        await executor.kill()
        async with running_service(FAKE, "--listen", executor.address):
            output = await stream
        assert output.outputs[0].token_ids == undisturbed.outputs[0].token_ids


async def test_a_killed_scheduler_leaves_an_executor_that_the_next_one_takes_over() -> None:
    async with running_service(FAKE) as executor:
        flags = ("--executor", executor.address, "--scheduler-id", "one", "--lease-s", "60")
        first = await start_service(SCHEDULER, *flags)
        async with Client(first.address) as client:
            await client.wait_until_ready(30)
            before = await client.generate(PROMPT, greedy(20))
        await first.kill()
        async with running_service(SCHEDULER, *flags) as second, Client(second.address) as client:
            await client.wait_until_ready(30)
            after = await client.generate(PROMPT, greedy(20))
        assert after.outputs[0].token_ids == before.outputs[0].token_ids


def run_here(module: str, *flags: str) -> object:
    """Run a program in this process, which saves its start; return its exit status."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", [module, *flags])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main()
    return ended.value.code


PROGRAMS = [
    "octavo.cli",
    "scheduler_svc.__main__",
    "executor_svc.__main__",
    "executor_svc.fake.__main__",
]


@each_row(*PROGRAMS)
def test_every_program_says_the_same_version(module: str, *, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(module, "--version") == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


@each_row(
    ("scheduler_svc.__main__", ("--executor", "a:1")),
    ("executor_svc.__main__", ("--model", "m")),
    ("executor_svc.fake.__main__", ()),
)
def test_a_wrong_flag_of_a_service_is_one_line_with_the_nearest_one(
    module: str, needed: tuple[str, ...], *, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(module, *needed, "--listn", "b:1") == 2
    assert capsys.readouterr().err.partition(": ")[2] == "--listn is not a flag; did you mean --listen?\n"


def test_a_wrong_value_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_here("executor_svc.fake.__main__", "--max-num-seqs", "0") == 2
    assert capsys.readouterr() == ("", "octavo fake: --max-num-seqs is 0; it must be at least 1\n")
    monkeypatch.setenv("OCTAVO_EXECUTOR_DTYPE", "float64")
    assert run_here("executor_svc.__main__", "--model", "x") == 2
    sentence = "OCTAVO_EXECUTOR_DTYPE is float64; it must be one of 'auto', 'float32', 'bfloat16' or 'float16'"
    assert capsys.readouterr().err == f"octavo executor: {sentence}\n"


@pytest.mark.slow
@pytest.mark.model
async def test_64_streams_of_the_demo_model_are_complete_and_the_scheduler_stays_small(demo_model: Path) -> None:
    async with (
        running_service("executor_svc", "--model", str(demo_model)) as executor,
        running_service(SCHEDULER, "--executor", executor.address) as scheduler,
        Client(scheduler.address) as client,
    ):
        await client.wait_until_ready(120)
        outputs = await asyncio.gather(
            *(stream_checked(client, f"Story number {i}: once", 3 + i % 5) for i in range(64))
        )
        assert [len(o.outputs[0].token_ids) for o in outputs] == [3 + i % 5 for i in range(64)]
        await assert_all_blocks_free(scheduler)
        assert scheduler.resident_mib() < 250
        assert "torch" not in scheduler.loaded_libraries()
        assert executor.process.stdout is not None
        told = [(await executor.process.stdout.readline()).decode() for _ in range(3)]
        assert told[0] == f"octavo executor loading {demo_model}\n"
        assert re.fullmatch(r"octavo executor kernels: C \(AVX.*\), \d+ threads?; weights in int8-a8, int4\n", told[1])
        assert re.fullmatch(rf"octavo executor loaded {re.escape(str(demo_model))} in [\d.]+ s\n", told[2])


async def stream_checked(client: Client, prompt: str, num_tokens: int) -> RequestOutput:
    """Stream a request and check that its deltas are its output."""
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=num_tokens, ignore_eos=True)
    text = ""
    token_ids: list[int] = []
    async for event in client.stream(prompt, params):
        if isinstance(event, Delta):
            text += event.text
            token_ids += event.token_ids
        elif isinstance(event, Finished):
            assert (event.outputs[0].text, list(event.outputs[0].token_ids)) == (text, token_ids)
            return RequestOutput("", prompt, event.outputs, event.usage)
    raise AssertionError("no last event")


async def assert_all_blocks_free(scheduler: Service) -> None:
    async with grpc.aio.insecure_channel(scheduler.other_addresses["admin"]) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        state = await stub.GetSchedulerState(admin_service_pb2.GetSchedulerStateRequest())
    assert state.num_used_blocks == 0
    assert state.num_free_blocks == state.num_blocks > 0
