"""Real processes and a collector: one trace over all tiers, and none if nobody asked for it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from octavo.admin.v1 import admin_pb2, admin_service_pb2, admin_service_pb2_grpc
from octavo.client import Client
from octavo.generation.v1 import generation_pb2, generation_service_pb2_grpc
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.process.tracing import MAX_FLUSH_S
from scheduler_svc.processes.supervisor import END_S
from tests.support.patience import PATIENCE_S
from tests.support.processes import PORT_LINE, Service, running_service
from tests.support.stack import token_request
from tests.tracing.collector import running_collector
from tests.tracing.spans import CALLER_SPAN_ID, CALLER_TRACE_ID, SAMPLED, SpanRecord, names, trace_of

SECRET = "the walrus sings at noon"

# Runs a service, and says at its end which modules of opentelemetry it has imported.
WITH_LIST_OF_MODULES = """
import importlib, json, sys
from tests.support.patience import PATIENCE_S
code = importlib.import_module(sys.argv.pop(1)).main()
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]))
sys.exit(code)
"""


async def generate(address: str, request: pb.GenerateRequest, got_tokens: asyncio.Event | None = None) -> int:
    """Run a request under the caller's span; return how many tokens came."""
    num_tokens = 0
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        async for event in stub.Generate(request, metadata=(("traceparent", SAMPLED),), wait_for_ready=True):
            num_tokens += len(event.delta.token_ids)
            if got_tokens is not None and num_tokens > 5:
                got_tokens.set()
    return num_tokens


async def attached(admin_address: str, num_executors: int) -> None:
    """Return once so many executors are attached."""
    async with grpc.aio.insecure_channel(admin_address) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        while True:
            state = await stub.GetSchedulerState(admin_service_pb2.GetSchedulerStateRequest(), wait_for_ready=True)
            statuses = [executor.status for executor in state.executors]
            if statuses.count(admin_pb2.EXECUTOR_STATUS_ATTACHED) == num_executors:
                return


def executions(spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    return [span for span in spans if span.name == "execute"]


async def executor_of(admin_address: str, request_id: str) -> str:
    """Return where a live request is."""
    async with grpc.aio.insecure_channel(admin_address) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        answer = await stub.GetRequest(admin_service_pb2.GetRequestRequest(request_id=request_id))
    return answer.request.executor


async def test_one_trace_spans_the_tiers_through_losses_errors_and_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = pb.GenerateRequest(
        request_id="text", text=SECRET, sampling_params=generation_pb2.SamplingParams(max_tokens=5, temperature=0)
    )
    refused = pb.GenerateRequest(
        request_id="refused", text=SECRET, sampling_params=generation_pb2.SamplingParams(stop=[""])
    )
    long = [token_request(20, 150, first_id=first, request_id=f"long{first}") for first in (1, 2)]
    aborted = token_request(20, 4000, first_id=3, request_id="aborted")
    traced = ["--tracing", "otlp"]
    async with running_collector() as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # so that what comes was flushed at the end
        async with (
            running_service("executor_svc.fake", "--step-ms", "5", *traced) as first,
            running_service("executor_svc.fake", "--step-ms", "5", *traced) as second,
            running_service("scheduler_svc", "--executor", f"{first.address},{second.address}", *traced) as scheduler,
        ):
            await attached(scheduler.other_addresses["admin"], 2)
            assert await generate(scheduler.address, text) == 5
            with pytest.raises(grpc.aio.AioRpcError, match="must be"):
                await generate(scheduler.address, refused)
            streaming = [asyncio.Event() for _ in range(3)]
            calls = [
                asyncio.create_task(generate(scheduler.address, request, event))
                for request, event in zip([*long, aborted], streaming, strict=True)
            ]
            for event in streaming:
                await event.wait()
            calls[2].cancel()
            at = await executor_of(scheduler.other_addresses["admin"], "long1")
            lost, kept = (first, second) if first.address == at else (second, first)
            assert await lost.terminate() == 0  # what it has goes on with the other one
            assert [await call for call in calls[:2]] == [150, 150]
            assert await scheduler.terminate() == 0
            assert await kept.terminate() == 0
        spans = collector.spans

    requests = {
        request_id: trace_of(spans, request_id) for request_id in ("text", "refused", "long1", "long2", "aborted")
    }
    for trace in requests.values():
        assert (trace.request.trace_id, trace.request.parent_id) == (CALLER_TRACE_ID, CALLER_SPAN_ID)
        assert trace.request.resource["service.name"] == "octavo-scheduler"
        for execution in trace.executions:
            assert execution.resource["service.name"] == "octavo-executor"
            assert trace.request.begin_ns < execution.begin_ns
    assert names(requests["text"]) == ["tokenize", "queue", "prefill", "decode"]
    assert requests["text"].request.attributes["gen_ai.usage.output_tokens"] == 5
    assert requests["refused"].request.attributes["error.type"] == "INVALID_ARGUMENT"
    assert requests["aborted"].request.attributes["error.type"] == "ABORTED"

    losers = [trace for name, trace in requests.items() if trace.request.attributes.get("octavo.num_losses") == 1]
    assert any(trace.request.attributes["octavo.request_id"].startswith("long") for trace in losers)
    for trace in losers:
        assert trace.executions[0].description == "the executor shut down"
    recovered = next(trace for trace in losers if not trace.request.is_error)
    before, after = recovered.executions
    assert (before.is_error, after.is_error) == (True, False)
    assert before.resource["service.instance.id"] != after.resource["service.instance.id"]
    assert len({span.resource["service.instance.id"] for span in executions(spans)}) == 2
    assert not any("walrus" in span.all_text for span in spans)


async def test_fronts_send_their_traces_before_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert END_S > MAX_FLUSH_S, "a front is killed while it may still send"
    traced = ["--tracing", "otlp"]
    async with running_collector() as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # so that what comes was flushed at the end
        async with (
            running_service("executor_svc.fake") as executor,
            running_service(
                *(
                    "scheduler_svc",
                    "--executor",
                    executor.address,
                    "--fronts",
                    "1",
                    "--engine-listen",
                    "127.0.0.1:0",
                    "--engine-insecure",
                ),
                *traced,
            ) as scheduler,
            running_service(
                "scheduler_svc.processes.front_process", "--engine", scheduler.other_addresses["fronts"], *traced
            ) as front,
        ):
            for name, address in (("started", scheduler.address), ("own", front.address)):
                async with Client(address) as client:
                    await client.wait_until_ready(timeout_s=PATIENCE_S)
                assert await generate(address, token_request(20, 5, request_id=name)) == 5
            assert await front.terminate() == 0
            assert await scheduler.terminate() == 0
        for name in ("started", "own"):
            assert trace_of(collector.spans, name).request.resource["service.name"] == "octavo-scheduler"


async def test_nothing_is_imported_or_sent_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_collector() as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        async with (
            listing_modules("executor_svc.fake.__main__") as executor,
            listing_modules("scheduler_svc.__main__", "--executor", executor.address) as scheduler,
        ):
            await attached(scheduler.other_addresses["admin"], 1)
            assert await generate(scheduler.address, token_request(20, 5)) == 5
            outputs = [(await service.process.communicate(b""))[0] for service in (scheduler, executor)]

    assert [json.loads(output.splitlines()[-1]) for output in outputs] == [[], []]
    assert [service.process.returncode for service in (scheduler, executor)] == [0, 0]
    assert not collector.spans


@asynccontextmanager
async def listing_modules(module: str, *flags: str) -> AsyncIterator[Service]:
    """Run a service that ends with its standard input and then prints what it has imported."""
    listen = ["--listen=127.0.0.1:0"] + (["--admin-listen=127.0.0.1:0"] if module.startswith("scheduler") else [])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", WITH_LIST_OF_MODULES, module, "--exit-on-stdin-close", *listen, *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    service = Service(process, "")
    try:
        assert process.stdout is not None
        while not service.address:
            line = (await process.stdout.readline()).decode()
            match = PORT_LINE.fullmatch(line.strip())
            assert match, f"{module} ended before it served"
            if match["port"] is None:
                service.address = match["address"]
            else:
                service.other_addresses[match["port"]] = match["address"]
        yield service
    finally:
        if process.returncode is None:
            await service.kill()
