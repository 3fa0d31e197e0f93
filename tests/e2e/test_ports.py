"""The ports of the real processes: what answers where, until when, and what a taken one means."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from octavo.generation.v1 import generation_pb2, generation_service_pb2, generation_service_pb2_grpc
from tests.support.patience import PATIENCE_S
from tests.support.processes import Service, running_service

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
EXECUTOR_INFO = "/octavo.execution.v1.ExecutionService/GetExecutorInfo"
GET_MODEL = "/octavo.generation.v1.GenerationService/GetModel"
HEALTH = ("--health-listen", "127.0.0.1:0")


async def health_of(address: str, name: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
    status: int = answer.status
    return status


async def until_ready(address: str) -> None:
    async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="readiness")):
            if answer.status == SERVING:
                return


async def services_at(address: str) -> set[str]:
    """Return what reflection lists."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for answer in call:
            return {service.name for service in answer.list_services_response.service}
    raise AssertionError("no answer")


async def answer_to(address: str, method: str) -> grpc.StatusCode:
    """Return the status of an empty message to a method."""
    async with grpc.aio.insecure_channel(address) as channel:
        multicallable: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        return await multicallable(b"", timeout=PATIENCE_S).code()


async def run_to_its_end(module: str, *flags: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    return process.returncode, errors.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services() -> AsyncIterator[tuple[Service, Service]]:
    """A fake executor and its scheduler, with a port for probes each."""
    async with (
        running_service("executor_svc.fake", *HEALTH) as executor,
        running_service("scheduler_svc", "--executor", executor.address, *HEALTH) as scheduler,
    ):
        yield executor, scheduler


@pytest.mark.asyncio(loop_scope="module")
async def test_probes_have_a_port_of_their_own_with_health_alone(services: tuple[Service, Service]) -> None:
    for service in services:
        await until_ready(service.other_addresses["health"])
        assert await health_of(service.other_addresses["health"], "liveness") == SERVING
        assert await health_of(service.address, "readiness") == SERVING
        for method in (EXECUTOR_INFO, GET_MODEL):
            assert await answer_to(service.other_addresses["health"], method) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.asyncio(loop_scope="module")
async def test_operators_have_a_port_of_their_own(services: tuple[Service, Service]) -> None:
    _, scheduler = services
    names = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert await services_at(scheduler.address) == {"octavo.generation.v1.GenerationService", *names}
    assert await services_at(scheduler.other_addresses["admin"]) == {"octavo.admin.v1.AdminService", *names}
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin_service_pb2_grpc.AdminServiceStub(channel).GetSchedulerState(
                admin_service_pb2.GetSchedulerStateRequest()
            )
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_probes_and_operators_are_answered_while_the_scheduler_drains() -> None:
    async with (
        running_service("executor_svc.fake", "--step-ms", "20") as executor,
        running_service("scheduler_svc", "--executor", executor.address, *HEALTH) as scheduler,
    ):
        await until_ready(scheduler.other_addresses["health"])
        async with grpc.aio.insecure_channel(scheduler.address) as channel:
            request = generation_service_pb2.GenerateRequest(
                token_ids=generation_service_pb2.TokenIds(ids=[65]),
                sampling_params=generation_pb2.SamplingParams(max_tokens=40),
            )
            call = generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            events = aiter(call)
            assert (await anext(events)).HasField("accepted")
            scheduler.process.send_signal(signal.SIGTERM)
            await until_draining(scheduler)
            assert await health_of(scheduler.other_addresses["health"], "liveness") == SERVING
            async with grpc.aio.insecure_channel(scheduler.other_addresses["admin"]) as admin:
                state = await admin_service_pb2_grpc.AdminServiceStub(admin).GetSchedulerState(
                    admin_service_pb2.GetSchedulerStateRequest()
                )
            assert state.num_running_requests == 1
            last = [event async for event in events][-1]
            assert len(last.finished.outputs[0].token_ids) == 40
        assert await scheduler.process.wait() == 0
        assert await executor.terminate() == 0


@pytest.mark.parametrize("module", ["scheduler_svc", "executor_svc.fake"])
async def test_who_watches_the_health_does_not_hold_up_the_end(module: str) -> None:
    async with (
        running_service(module, "--shutdown-grace-s", "600") as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await watch.read()).status == SERVING
        async with asyncio.timeout(PATIENCE_S):
            assert await service.terminate() == 0


async def until_draining(scheduler: Service) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await health_of(scheduler.other_addresses["health"], "readiness") != NOT_SERVING:
            await asyncio.sleep(0.01)


SLOW_PORTS = [pytest.param(flag, marks=pytest.mark.slow) for flag in ("--listen", "--health-listen")]


@pytest.mark.parametrize("flag", ["--admin-listen", "--page-listen", *SLOW_PORTS])
async def test_a_taken_port_is_one_sentence_and_no_other_port_stays_open(flag: str) -> None:
    # Whoever allowed others on its port as well would share this one.
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        ports = {"--listen": "127.0.0.1:0", "--admin-listen": "127.0.0.1:0", "--health-listen": "127.0.0.1:0"}
        ports[flag] = taken
        flags = [word for pair in ports.items() for word in pair]
        status, errors = await run_to_its_end("scheduler_svc", "--executor", "127.0.0.1:1", *flags)
    assert status == 1
    last = errors.strip().splitlines()[-1]
    why = f"cannot listen on {taken}: it is in use, or not an address of this machine; set {flag} to another one"
    assert last == f"octavo scheduler: {why}"


async def test_log_lines_can_be_json() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "scheduler_svc", "--listen", "0.0.0.0:0", "--admin-listen", "127.0.0.1:0"),
        *("--executor", "127.0.0.1:1", "--log-format", "json", "--exit-on-stdin-close"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdin is not None
    words = [json.loads(await process.stdout.readline())["message"] for _ in range(2)]
    log = [json.loads(await process.stderr.readline()) for _ in range(2)]
    process.stdin.close()
    output, errors = await process.communicate()
    assert [json.loads(line) for line in (output + errors).splitlines()]
    assert words[0].startswith("octavo scheduler serving admin on ")
    assert words[1].startswith("octavo scheduler listening on ")
    assert [line["event"] for line in log] == ["listens_without_tls", "no_executor"], "the warning comes once"
    line = log[1]
    assert line["address"] == "127.0.0.1:1"
    assert line["level"] == "warning"
    assert line["logger"] == "scheduler_svc.executors.driver"
    assert line["time"].endswith("+00:00")
