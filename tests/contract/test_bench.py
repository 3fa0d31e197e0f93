"""`octavo bench` from its command line to its reports, against the real scheduler and an OpenAI-compatible server."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.bench.config import BenchError, DatasetName
from octavo.bench.octavo_target import OctavoTarget, OneStreamTarget
from octavo.bench.openai_target import OpenAIApi, OpenAITarget
from octavo.bench.plan import load_dataset
from octavo.bench.record import PlannedRequest, RequestRecord, Target
from octavo.bench.report import to_json
from octavo.bench.session import run_session
from octavo.bench.summary import summarize
from octavo.client import Client
from octavo.errors import DeadlineError, OctavoError
from tests.support.stack import running_stack, until
from tests.unit.octavo.bench.openai_server import openai_server
from tests.unit.octavo.bench.settings import bench_config


@dataclass(frozen=True)
class Ended:
    status: int | None
    stdout: str
    stderr: str


@asynccontextmanager
async def started(*args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "octavo.cli", "bench", *args)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> Ended:
    stdout, stderr = await process.communicate()
    return Ended(process.returncode, stdout.decode(), stderr.decode())


async def measured(target: Target, **fields: Any) -> dict[str, Any]:
    """Run a load in this process and return its JSON report with every sample."""
    config = bench_config(**fields)
    session = await run_session(config, target, asyncio.Event(), lambda load, title: nullcontext())
    report = to_json(config, session, summarize(session.load, config.slo), with_samples=True)
    loaded: dict[str, Any] = json.loads(json.dumps(report, allow_nan=False))
    return loaded


def octavo_target(address: str) -> OctavoTarget:
    return OctavoTarget(Client(address), temperature=0.0, ignore_eos=True, timeout_s=60.0, account={})


def one_stream_target(address: str, timeout_s: float = 60.0, **account: Any) -> OneStreamTarget:
    return OneStreamTarget(Client(address), temperature=0.0, ignore_eos=True, timeout_s=timeout_s, account=account)


def openai_target(url: str, *, api: OpenAIApi = OpenAIApi.COMPLETIONS, ignore_eos: bool = True) -> OpenAITarget:
    return OpenAITarget(
        url, api=api, api_key="secret", model=None, temperature=0.0, ignore_eos=ignore_eos, timeout_s=60.0
    )


@pytest.mark.parametrize("target_of", [octavo_target, one_stream_target])
async def test_an_open_loop_over_grpc_has_the_lengths_and_times_that_were_planned(
    target_of: Callable[[str], OctavoTarget | OneStreamTarget],
) -> None:
    lengths: dict[str, Any] = {"input_len": "uniform:10:40", "output_len": "uniform:2:9", "shared_prefix_len": 32}
    async with running_stack() as stack, target_of(stack.address) as target:
        report = await measured(target, rate=100.0, num_requests=40, warmup=2, **lengths)
    summary, samples = report["summary"], report["samples"]
    assert (summary["num_completed"], summary["num_failed"]) == (40, 0)
    assert report["target"]["model_id"] == "fake"
    for sample in samples:
        assert sample["num_output_tokens"] == sample["max_tokens"] == sum(sample["event_num_tokens"])
        assert 42 <= sample["num_prompt_tokens"] <= 72
        assert 0 < sample["ttft_s"] <= sample["e2e_s"]
        assert sample["event_times_s"] == sorted(sample["event_times_s"])
        assert sample["sent_s"] >= sample["scheduled_s"] - 0.01
    # The prefix was computed once, in the warm-up.
    assert {sample["num_cached_tokens"] for sample in samples} == {32}
    assert summary["output_tokens"]["mean"] * 40 == sum(sample["max_tokens"] for sample in samples)
    assert summary["lateness_s"]["count"] == 40


@pytest.mark.parametrize("target_of", [octavo_target, one_stream_target])
async def test_tokens_that_an_encoder_reads_are_prompt_tokens(
    target_of: Callable[[str], OctavoTarget | OneStreamTarget],
) -> None:
    worker = FakeWorker(max_encoder_tokens=60)
    async with running_stack(worker) as stack, target_of(stack.address) as target:
        report = await measured(target, num_requests=6, input_len="uniform:10:40", output_len="5")
        with pytest.raises(BenchError, match="the encoder of fake takes at most 60"):
            await measured(target, input_len="61")
    summary, samples = report["summary"], report["samples"]
    num_prompt_tokens = [sample["num_prompt_tokens"] for sample in samples]
    assert all(11 <= number <= 41 for number in num_prompt_tokens)  # the decoder's start token is one
    assert len(set(num_prompt_tokens)) > 1
    assert {sample["num_output_tokens"] for sample in samples} == {5}
    assert round(summary["total_tokens_per_s"] * summary["duration_s"]) == sum(num_prompt_tokens) + 30


@pytest.mark.slow  # unit/octavo/bench has datasets
async def test_the_dataset_is_sent_as_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abcd", "max_tokens": 3}\n{"prompt": "abcdefgh"}\n', "utf-8")
    async with running_stack() as stack, octavo_target(stack.address) as target:
        report = await measured(target, dataset=path, num_requests=None, output_len="5")
    samples = report["samples"]  # the fake model's tokens are bytes
    assert [(s["num_prompt_tokens"], s["num_output_tokens"]) for s in samples] == [(4, 3), (8, 5)]


@pytest.mark.parametrize("target_of", [octavo_target, one_stream_target])
async def test_speculation_is_compared_over_grpc_and_a_planted_difference_is_found(
    target_of: Callable[[str], OctavoTarget | OneStreamTarget],
) -> None:
    load: dict[str, Any] = {"compares_speculation": True, "concurrency": 1, "num_requests": 6, "output_len": "40"}
    async with running_stack(FakeWorker(max_allowance=8), speculate="on") as stack, target_of(stack.address) as target:
        found = (await measured(target, **load))["summary"]["comparison"]
        assert (found["num_pairs"], found["num_tokens"], found["differences"]) == (6, 240, [])
        drafted = [request.num_draft_tokens > 0 for request in stack.engine.ended.newest(12)]
        assert drafted == [False, True, True, False] * 3
        send = target.send

        async def send_with_a_wrong_token(record: RequestRecord) -> None:
            await send(record)
            if record.planned.index == 4 and record.planned.speculate:
                assert record.token_ids is not None
                record.token_ids[17] += 1

        target.send = send_with_a_wrong_token  # type: ignore[method-assign]
        [difference] = (await measured(target, **load))["summary"]["comparison"]["differences"]
        assert (difference["index"], difference["position"]) == (4, 17)
        assert difference["with_speculation"] == difference["without"] + 1


@pytest.mark.parametrize("name", list(DatasetName))
async def test_every_prompt_that_comes_with_octavo_is_answered(name: DatasetName) -> None:
    async with running_stack() as stack, octavo_target(stack.address) as target:
        report = await measured(target, dataset=name, num_requests=None, concurrency=16)
    assert report["summary"]["errors"] == []
    assert report["summary"]["num_completed"] == len(load_dataset(name.path))


async def test_schemas_and_conversations_reach_an_openai_compatible_server() -> None:
    flags = ("--dataset-name", "schema", "--num-requests", "1")
    async with openai_server() as server, started("--openai", server.url, *flags) as process:
        found = await ended(process)
    assert (found.status, found.stderr) == (0, "")
    [entry, *_] = load_dataset(DatasetName.SCHEMA.path)
    body = server.bodies[-1]
    assert (body["messages"], "ignore_eos" in body) == ([{"role": "user", "content": entry.prompt}], False)
    schema = {"name": "answer", "schema": entry.json_schema, "strict": True}
    assert body["response_format"] == {"type": "json_schema", "json_schema": schema}


async def test_prompts_that_are_too_long_are_refused_with_the_limit() -> None:
    async with running_stack() as stack, octavo_target(stack.address) as target:
        with pytest.raises(BenchError, match="9000 prompt tokens and 4 output tokens, and fake takes at most 8192"):
            await measured(target, input_len="9000")


@pytest.mark.parametrize("flags", [(), ("--one-stream",)], ids=["calls", "one stream"])
async def test_what_the_scheduler_refuses_is_said_of_the_flag(flags: tuple[str, ...]) -> None:
    async with running_stack() as stack, started("--address", stack.address, "--priority", "3", *flags) as process:
        found = await ended(process)
    assert found.status == 1
    assert found.stderr.startswith(
        f"octavo: nothing was measured: the first request failed at {stack.address}: --priority is 3; "
    )


@pytest.mark.parametrize("target_of", [octavo_target, one_stream_target])
async def test_failures_are_grouped_and_the_rest_counts(
    target_of: Callable[[str], OctavoTarget | OneStreamTarget],
) -> None:
    async with running_stack(max_waiting_requests=1, max_num_seqs=1) as stack, target_of(stack.address) as target:
        report = await measured(target, concurrency=8, num_requests=16, output_len="50")
    [error] = report["summary"]["errors"]
    assert "queue" in error["message"]
    assert report["summary"]["num_completed"] + error["num_requests"] == 16


async def test_on_one_stream_a_time_limit_aborts_its_request_and_nothing_is_left() -> None:
    async with running_stack() as stack:
        async with one_stream_target(stack.address) as target:
            target._timeout_s = 0.05
            record = RequestRecord(PlannedRequest(0, [40, 41], 2, 8_000, None), None)
            with pytest.raises(DeadlineError, match="the answer was not complete within the time limit"):
                await target.send(record)
            await until(lambda: not stack.engine.requests)
            target._timeout_s = 60.0
            report = await measured(target, num_requests=4)
            assert report["summary"]["num_completed"] == 4
            assert report["target"]["api"] == "octavo-stream"
        await until(lambda: not stack.engine.requests)


async def test_a_stream_that_breaks_fails_all_its_requests() -> None:
    async with running_stack(shutdown_grace_s=0.0) as stack, one_stream_target(stack.address) as target:
        sending = [
            asyncio.create_task(target.send(RequestRecord(PlannedRequest(index, [40 + index], 1, 8_000, None), None)))
            for index in range(3)
        ]
        await until(lambda: len(stack.engine.requests) == 3)
        await stack.service.stop("the test says so")
        results = await asyncio.wait_for(asyncio.gather(*sending, return_exceptions=True), 10)
        assert all(isinstance(result, OctavoError) for result in results), results
        with pytest.raises(OctavoError):
            await target.send(RequestRecord(PlannedRequest(3, [40], 1, 1, None), None))


@pytest.mark.parametrize("api", list(OpenAIApi))
async def test_an_openai_compatible_server_is_measured(api: OpenAIApi) -> None:
    async with openai_server(key="secret") as server, openai_target(server.url, api=api) as target:
        report = await measured(target, rate=100.0, num_requests=12, input_len="20", output_len="6")
    summary = report["summary"]
    assert (report["target"]["api"], report["target"]["model_id"]) == (api, "small")
    assert (summary["num_completed"], summary["itl_s"]["count"]) == (12, 60)
    assert (summary["prompt_tokens"]["mean"], summary["output_tokens"]["mean"]) == (20, 6)
    assert "secret" not in json.dumps(report)


async def test_a_server_that_refuses_ignore_eos_is_found_by_the_first_request() -> None:
    async with openai_server(knows_ignore_eos=False) as server:
        async with openai_target(server.url) as target:
            with pytest.raises(BenchError, match=r"nothing was measured: .*ignore_eos needs --no-ignore-eos"):
                await measured(target)
        assert len(server.bodies) == 1
        async with openai_target(server.url, ignore_eos=False) as target:
            assert (await measured(target, num_requests=2))["summary"]["num_completed"] == 2


async def test_a_closed_loop_prints_a_table_and_writes_its_files(tmp_path: Path) -> None:
    plot, report = tmp_path / "plot.svg", tmp_path / "report.json"
    flags = ("--concurrency", "3", "--num-requests", "9", "--output-len", "4", "--slo", "ttft=60s,itl=60s")
    files = ("--plot", str(plot), "--json", str(report), "--cache-salt", "secret", "--cache-salt=secret")
    async with running_stack() as stack, started("--address", stack.address, *flags, *files) as process:
        found = await ended(process)
    assert (found.status, found.stderr) == (0, "")
    for text in ("fake at", "closed loop, 3 at once", "TTFT", "9 completed, 0 failed", "100.0%"):
        assert text in found.stdout
    assert plot.read_text("utf-8").startswith("<?xml")
    written = json.loads(report.read_text("utf-8"))
    assert (written["summary"]["num_completed"], written["summary"]["max_running"]) == (9, 3)
    assert written["command"].endswith("--json report.json --cache-salt ... --cache-salt=...")


async def test_ctrl_c_stops_the_load_and_reports_what_was_completed() -> None:
    flags = ("--concurrency", "4", "--num-requests", "1000000", "--output-len", "32", "--json", "-")
    async with running_stack() as stack:
        async with started("--address", stack.address, *flags) as process:
            await until(lambda: stack.num_groups_on(stack.executor) == 4)
            process.send_signal(signal.SIGINT)
            found = await ended(process)
        await until(lambda: stack.num_groups_on(stack.executor) == 0)
    assert found.status == 130
    report = json.loads(found.stdout)
    assert report["is_interrupted"]
    assert report["summary"]["num_cancelled"] == 4
    assert "octavo: interrupted; the report has what was completed until then" in found.stderr


async def test_a_load_without_a_success_says_why() -> None:
    flags = ("--concurrency", "1", "--num-requests", "2")
    async with openai_server() as server, started("--openai", server.url, *flags) as process:
        await until(lambda: len(server.bodies) == 1)
        server.refusal = (503, "application/json", '{"error": {"message": "restarting"}}')
        found = await ended(process)
    assert found.status == 1
    assert "0 completed, 2 failed" in found.stdout
    assert found.stderr == "octavo: no request succeeded: HTTP 503: restarting\n"
