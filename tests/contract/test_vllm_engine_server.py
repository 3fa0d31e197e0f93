"""VllmEngine on the scheduler's port: what a gateway asks at registration and later, and the switch."""

import asyncio
import dataclasses
import hashlib
import io
import json
import sys
import threading
import zipfile

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

import octavo
from executor_svc.fake.tokenizer import EOS_TOKEN_ID, fake_tokenizer_files
from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1.generation_service_pb2 import GetModelRequest
from scheduler_svc.client_services import VLLM_ENGINE_SERVICE
from scheduler_svc.front.api.vllm_engine.tokenizer_archive import CHUNK_BYTES, archive_chunks
from scheduler_svc.telemetry.metrics import scheduler_families
from shared.errors import OctavoServiceError
from tests.support.stack import Stack, WithoutTokenizer, collect, running_stack, token_request, until
from tests.support.vllm_engine import GatewayStack, engine_request, first_chunk, no_live_request, running_gateway_stack

ENDLESS = 4000


async def test_health_says_why_requests_find_no_executor() -> None:
    async with running_gateway_stack() as gateway:
        healthy = await gateway.stub.HealthCheck(pb.HealthCheckRequest())
        await gateway.stack.engine.start_draining()
        draining = await gateway.stub.HealthCheck(pb.HealthCheckRequest())
    assert (healthy.healthy, healthy.message) == (True, "")
    assert (draining.healthy, draining.message) == (False, "the scheduler is draining")


async def test_the_model_is_described() -> None:
    async with running_gateway_stack() as gateway:
        info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info == pb.GetModelInfoResponse(
        model_path="octavo://fake",
        served_model_name="fake",
        is_generation=True,
        max_context_length=8192,
        max_req_input_len=8191,
        vocab_size=259,
        eos_token_ids=[EOS_TOKEN_ID],
    )


async def test_clients_gateways_and_metrics_know_the_model_by_its_served_name() -> None:
    async with running_gateway_stack(served_model_name="my/assistant") as gateway:
        octavo = await gateway.stack.generation.GetModel(GetModelRequest())
        info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())
        samples = [sample for family in scheduler_families(gateway.stack.engine) for sample in family.samples]
    names = {sample.labels["model_name"] for sample in samples if sample.name.startswith("vllm:")}
    assert (octavo.model_id, info.served_model_name, names) == ("my/assistant", "my/assistant", {"my/assistant"})


async def test_the_server_is_described() -> None:
    async with running_gateway_stack(None, None, max_num_seqs=3) as gateway:
        info = await gateway.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.server_type, info.data_parallel_size) == ("vllm-grpc", 1)
    assert (info.max_num_seqs, info.block_size, info.is_paused) == (6, 16, False)


async def test_the_load_is_that_of_the_fleet() -> None:
    async with running_gateway_stack(FakeWorker(step_ms=1), max_num_seqs=1) as gateway:
        idle = (await gateway.stub.GetLoads(pb.GetLoadsRequest())).loads[0]
        calls = [
            gateway.stub.Generate(
                engine_request(request_id=str(index), prompt=[65 + index] * 20, max_tokens=ENDLESS, stream=True)
            )
            for index in range(3)
        ]
        await first_chunk(calls[0])
        await until(lambda: gateway.stack.engine.waiting.num_waiting >= 2)
        response = await gateway.stub.GetLoads(pb.GetLoadsRequest())
        for call in calls:
            call.cancel()
        await no_live_request(gateway.stack)
    busy = response.loads[0]
    assert (response.version, response.dp_rank_count) == (octavo.__version__, 1)
    assert (idle.num_running_reqs, idle.num_waiting_reqs, idle.token_usage, idle.utilization) == (0, 0, 0.0, 0.0)
    assert (busy.num_running_reqs, busy.num_waiting_reqs, busy.num_total_reqs) == (1, 2, 3)
    assert (busy.max_running_requests, busy.utilization) == (1, 1.0)
    assert busy.num_waiting_uncached_tokens == 40
    assert busy.num_used_tokens >= 20
    assert busy.token_usage == busy.num_used_tokens / busy.max_total_num_tokens


async def test_the_tokenizer_comes_as_a_zip_with_its_digest_last() -> None:
    async with running_gateway_stack() as gateway:
        chunks = [chunk async for chunk in gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        again = [chunk async for chunk in gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    archive = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == again[-1].sha256 == hashlib.sha256(archive).hexdigest()
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        contents = {name: files.read(name) for name in files.namelist()}
    config = json.loads(contents.pop("config.json"))
    assert contents == {file.name: file.content for file in fake_tokenizer_files()}
    assert config == {"vocab_size": 259, "max_position_embeddings": 8192, "eos_token_id": [EOS_TOKEN_ID]}


async def test_the_archive_is_made_once_for_each_model_and_not_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []

    def digest(data: bytes) -> object:
        threads.append(threading.get_ident())
        return sha256(data)

    sha256 = hashlib.sha256
    async with running_gateway_stack() as gateway:
        monkeypatch.setattr("scheduler_svc.front.api.vllm_engine.tokenizer_archive.hashlib.sha256", digest)
        first, second, third = await asyncio.gather(*(archive_of(gateway) for _ in range(3)))
        assert first == second == third
        assert len(threads) == 1
        model = gateway.stack.engine.model
        assert model is not None
        gateway.stack.engine.fleet_model.model = dataclasses.replace(model, max_model_len=77)
        config = json.loads(zipfile.ZipFile(io.BytesIO(await archive_of(gateway))).read("config.json"))
    assert config["max_position_embeddings"] == 77
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_a_model_without_a_tokenizer_has_no_archive() -> None:
    async with running_gateway_stack(WithoutTokenizer()) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await archive_of(gateway)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "has no tokenizer; start the scheduler with --tokenizer" in (caught.value.details() or "")


async def archive_of(gateway: GatewayStack) -> bytes:
    """Fetch the tokenizer's archive."""
    chunks = gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest())
    return b"".join([chunk.data async for chunk in chunks])


def test_a_large_archive_is_cut_and_only_its_last_chunk_has_the_digest() -> None:
    archive = bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"end"
    chunks = list(archive_chunks(archive))
    assert [len(chunk.data) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 3]
    assert b"".join(chunk.data for chunk in chunks) == archive
    assert [chunk.sha256 for chunk in chunks] == ["", "", hashlib.sha256(archive).hexdigest()]


async def test_other_rpcs_are_unimplemented() -> None:
    async with running_gateway_stack() as gateway:
        unary = {
            "Embed": pb.EmbedRequest(),
            "FlushCache": common_pb2.FlushCacheRequest(),
            "StartProfile": common_pb2.StartProfileRequest(),
            "StopProfile": common_pb2.StopProfileRequest(),
        }
        for name, request in unary.items():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await getattr(gateway.stub, name)(request)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED, name
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gateway.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_without_an_executor_the_model_is_unavailable() -> None:
    async with running_gateway_stack(ready=False, executor=("127.0.0.1:1",)) as gateway:
        for call in (
            gateway.stub.GetModelInfo(pb.GetModelInfoRequest()),
            gateway.stub.GetServerInfo(pb.GetServerInfoRequest()),
            gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read(),
            gateway.stub.Generate(engine_request()).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        loads = (await gateway.stub.GetLoads(pb.GetLoadsRequest())).loads[0]
        assert (loads.max_running_requests, loads.token_usage, loads.utilization) == (0, 0.0, 0.0)


# The switch --------------------------------------------------------------------------------------


async def reflected_services(gateway: GatewayStack | Stack) -> set[str]:
    address = gateway.address if isinstance(gateway, Stack) else gateway.stack.address
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        return {service.name async for answer in call for service in answer.list_services_response.service}


async def test_reflection_and_health_know_the_service_and_generation_service_is_there_too() -> None:
    async with running_gateway_stack() as gateway:
        assert VLLM_ENGINE_SERVICE in await reflected_services(gateway)
        async with grpc.aio.insecure_channel(gateway.stack.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            answer = await health.Check(health_pb2.HealthCheckRequest(service=VLLM_ENGINE_SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await collect(gateway.stack, token_request(5, 3))).token_ids


async def test_without_the_setting_the_service_is_not_there() -> None:
    async with running_stack() as stack:
        assert VLLM_ENGINE_SERVICE not in await reflected_services(stack)


async def test_without_the_stubs_the_scheduler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smg_grpc_proto.generated", None)
    with pytest.raises(OctavoServiceError, match=r"install octavo\[openai\]"):
        async with running_stack(vllm_engine=True):
            raise AssertionError("it started")


async def test_a_gateway_tenant_that_is_not_served_is_refused_at_the_start() -> None:
    with pytest.raises(OctavoServiceError, match="--gateway-tenant is empty; it must be one of"):
        async with running_stack(vllm_engine=True, tenant_weights=("web=2",)):
            raise AssertionError("it started")
