"""Tokens, tenants, operators and trusted clients at the ports of a scheduler."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from octavo.client import Client
from octavo.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.generation.v1 import generation_service_pb2_grpc
from octavo.values.outputs import Accepted, FailedRequest
from octavo.values.sampling_params import SamplingParams
from scheduler_svc.front.api import generation
from tests.support.certificates import PairFiles, replace
from tests.tls.services import Scheduler, running_pair, running_scheduler, tls_settings

BLUE, GREEN, OPERATOR = "blue-token-0123456", "green-token-012345", "operator-token-012"
TOKENS = f"# of the tests\nblue {BLUE}\n\n  green\t{GREEN}\n* {OPERATOR}\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
LONG = SamplingParams(temperature=0.0, max_tokens=5000)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    return path


@pytest.fixture
async def scheduler(tokens_file: Path) -> AsyncIterator[Scheduler]:
    async with running_pair(tokens_file=tokens_file) as running:
        yield running


async def failure(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


MISSING = (
    grpc.StatusCode.UNAUTHENTICATED,
    "a bearer token is required; send the metadata authorization: Bearer TOKEN (octavo: --token-file, or OCTAVO_TOKEN)",
)
UNKNOWN = (
    grpc.StatusCode.UNAUTHENTICATED,
    "unknown bearer token; ask the operator for a valid one",
)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ((), MISSING),
        ((("authorization", BLUE),), MISSING),
        ((("authorization", f"Basic {BLUE}"),), MISSING),
        ((("authorization", "Bearer "),), MISSING),
        ((*bearer(BLUE), *bearer(GREEN)), MISSING),
        (bearer("blue-token-012345"), UNKNOWN),
        (bearer(BLUE + "7"), UNKNOWN),
        (bearer(BLUE.upper()), UNKNOWN),
    ],
)
async def test_a_call_without_a_known_token_is_refused(
    scheduler: Scheduler, metadata: tuple[tuple[str, str], ...], expected: tuple[grpc.StatusCode, str]
) -> None:
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        assert await failure(stub.GetModel(pb.GetModelRequest(), metadata=metadata)) == expected
        assert await failure(stub.Tokenize(pb.TokenizeRequest(text="hello"), metadata=metadata)) == expected
        assert await failure(stub.Detokenize(pb.DetokenizeRequest(), metadata=metadata)) == expected
        stream = stub.Generate(pb.GenerateRequest(text="hello"), metadata=metadata)
        assert await failure(anext(aiter(stream))) == expected


async def test_a_refused_call_leaves_a_line_with_its_peer_and_without_the_token(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        await failure(stub.GetModel(pb.GetModelRequest(), metadata=bearer("a-token-nobody-knows")))
    [line] = [message for message in caplog.messages if "event=call_refused" in message]
    assert "method=/octavo.generation.v1.GenerationService/GetModel peer=ipv4:127.0.0.1:" in line
    assert "a-token-nobody-knows" not in line


async def test_the_scheme_is_written_in_any_case(scheduler: Scheduler) -> None:
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        answer = await stub.GetModel(pb.GetModelRequest(), metadata=(("authorization", f"bearer {BLUE}"),))
    assert answer.vocab_size > 0


async def test_a_stranger_makes_the_scheduler_do_nothing(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither decoded nor tokenized: the request is not even a message."""
    tokenized = []
    monkeypatch.setattr(generation, "tokenize", lambda *arguments: tokenized.append(arguments))
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        method: Any = channel.unary_stream("/octavo.generation.v1.GenerationService/Generate")
        assert await failure(method(b"\xff\xff").read()) == MISSING
        code, text = await failure(method(b"\xff\xff", metadata=bearer(BLUE)).read())
    assert (code, text) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the request cannot be decoded as this method's message",
    )
    assert tokenized == []
    assert scheduler.service.engine.waiting.num_waiting == 0


async def test_every_entry_is_compared_in_constant_time(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, original = [], hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return original(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    async with Client(scheduler.address, token=BLUE) as client:
        await client.get_model()
    assert len(compared) == 3, "the first entry fits; the others are compared all the same"
    assert {len(digest) for pair in compared for digest in pair} == {32}


async def test_a_request_belongs_to_the_tenant_of_its_token(scheduler: Scheduler) -> None:
    requests = scheduler.service.engine.requests
    async with Client(scheduler.address, token=BLUE) as client:
        stream = client.stream("hello", LONG, request_id="named", tenant="blue")
        await anext(stream)
        unnamed = client.stream("hello", LONG, request_id="unnamed")
        await anext(unnamed)
        assert {request.group.tenant for request in requests.values()} == {"blue"}
        with pytest.raises(PermissionDeniedError) as caught:
            await client.generate("hello", GREEDY, tenant="green")
        await stream.aclose()
        await unnamed.aclose()
    assert str(caught.value) == (
        "the token belongs to tenant 'blue', the request names tenant 'green'; omit the tenant, or use that tenant's "
        "token"
    )


async def test_each_request_of_a_stream_belongs_to_the_tenant_of_its_token(scheduler: Scheduler) -> None:
    requests = scheduler.service.engine.requests
    async with Client(scheduler.address, token=BLUE) as client, client.request_stream() as stream:
        for tenant in ("blue", "", "green"):
            await stream.submit("hello", LONG, tenant=tenant)
        events = aiter(stream)
        while not isinstance(event := (await anext(events))[1], FailedRequest):
            pass
        assert isinstance(event.error, PermissionDeniedError)
        assert str(event.error).startswith("the token belongs to tenant 'blue', the request names tenant 'green'; ")
        assert [request.group.tenant for request in requests.values()] == ["blue", "blue"]
    async with Client(scheduler.address, token="unknown-token-0123") as client:
        with pytest.raises(UnauthenticatedError, match="unknown bearer token"):
            async for _ in client.stream_many(["hello"] * 50):
                pass


async def test_tenants_are_not_told_why_there_is_no_executor(tokens_file: Path) -> None:
    async with running_scheduler(tokens_file=tokens_file) as scheduler:
        await scheduler.trouble()
        async with grpc.aio.insecure_channel(scheduler.address) as channel:
            stub = generation_service_pb2_grpc.GenerationServiceStub(channel)

            async def generate(token: str) -> object:
                return await stub.Generate(pb.GenerateRequest(text="x"), metadata=bearer(token)).read()

            async def get_model(token: str) -> object:
                return await stub.GetModel(pb.GetModelRequest(), metadata=bearer(token))

            async def tokenize(token: str) -> object:
                return await stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=bearer(token))

            async def generate_on_a_stream(token: str) -> object:
                async with Client(scheduler.address, token=token, resume_timeout_s=0) as client:
                    [(_, failed)] = [pair async for pair in client.stream_many(["x"])]
                assert isinstance(failed, FailedRequest)
                assert isinstance(failed.error, UnavailableError)
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=str(failed.error)
                )

            for call in (generate, generate_on_a_stream, get_model, tokenize):
                code, told = await failure(call(BLUE))
                assert code is grpc.StatusCode.UNAVAILABLE
                assert "no executor" in told
                assert "127.0.0.1" not in told
                assert "127.0.0.1" in (await failure(call(OPERATOR)))[1]


async def test_an_operator_acts_for_any_tenant(scheduler: Scheduler) -> None:
    requests = scheduler.service.engine.requests
    async with Client(scheduler.address, token=OPERATOR) as client:
        streams = [client.stream("hello", LONG, tenant=tenant) for tenant in ("", "blue", "anybody")]
        for stream in streams:
            assert isinstance(await anext(stream), Accepted)
        assert [request.group.tenant for request in requests.values()] == ["", "blue", "anybody"]
        for stream in streams:
            await stream.aclose()


async def test_the_log_of_a_bug_names_the_request_behind_access_control(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(generation, "tokenize", stumble)
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        request = pb.GenerateRequest(request_id="unlucky", text="x")
        code, _ = await failure(stub.Generate(request, metadata=bearer(BLUE)).read())
        assert code is grpc.StatusCode.INTERNAL
        assert sum("event=rpc_failed" in line and "request_id=unlucky" in line for line in caplog.messages) == 1
        call: Any = stub.StreamRequests(metadata=bearer(BLUE))
        await call.write(pb.StreamRequestsRequest(number=1, submit=request))
        [failed] = (await call.read()).failed
        assert failed.code == grpc.StatusCode.INTERNAL.value[0]
        assert sum("event=rpc_failed" in line and "request_id=unlucky" in line for line in caplog.messages) == 2
        call.cancel()


async def test_only_their_own_tenant_and_operators_end_a_request(scheduler: Scheduler) -> None:
    async with (
        Client(scheduler.address, token=BLUE) as blue,
        Client(scheduler.address, token=GREEN) as green,
        Client(scheduler.address, token=OPERATOR) as operator,
    ):
        for name, aborter in {"first": blue, "second": operator}.items():
            stream = blue.stream("hello", LONG, request_id=name)
            await anext(stream)
            assert await green.abort(name) is False
            assert await green.abort("nothing") is False
            assert ("blue", name) in scheduler.service.engine.requests
            assert await aborter.abort(name) is True
            await stream.aclose()


async def test_operators_alone_see_the_admin_service(scheduler: Scheduler) -> None:
    async with grpc.aio.insecure_channel(scheduler.admin_address) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        request = admin_service_pb2.GetSchedulerStateRequest()
        assert await failure(stub.GetSchedulerState(request)) == MISSING
        assert await failure(stub.GetSchedulerState(request, metadata=bearer(BLUE))) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "the token belongs to tenant 'blue'; octavo.admin.v1.AdminService requires a token of tenant * in "
            "--tokens-file",
        )
        state = await stub.GetSchedulerState(request, metadata=bearer(OPERATOR))
    assert len(state.executors) == 1


async def test_probes_have_a_port_without_tls_and_tokens(server_files: PairFiles, ca: Path, tokens_file: Path) -> None:
    settings = tls_settings(server_files, client_ca=ca) | {"tokens_file": tokens_file, "health_listen": "127.0.0.1:0"}
    async with running_pair(**settings) as scheduler:
        probes = scheduler.service.other_addresses["health"]
        async with grpc.aio.insecure_channel(probes) as channel:
            health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            answer = await health.Check(health_pb2.HealthCheckRequest(service="readiness"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            code, _ = await failure(
                generation_service_pb2_grpc.GenerationServiceStub(channel).GetModel(pb.GetModelRequest())
            )
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_health_is_open_and_reflection_is_not(scheduler: Scheduler) -> None:
    for address in (scheduler.address, scheduler.admin_address):
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            answer = await health.Check(health_pb2.HealthCheckRequest(service="readiness"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watch = health.Watch(health_pb2.HealthCheckRequest(service="liveness"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()

            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
            ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
            assert await failure(reflection.ServerReflectionInfo(iter(ask)).read()) == MISSING
            listed = await reflection.ServerReflectionInfo(iter(ask), metadata=bearer(BLUE)).read()
            assert "grpc.health.v1.Health" in {service.name for service in listed.list_services_response.service}


async def test_new_tokens_count_at_once_and_broken_ones_not_at_all(
    scheduler: Scheduler, tokens_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        Client(scheduler.address, token=BLUE) as old,
        Client(scheduler.address, token="red-token-01234567") as new,
    ):
        replace(tokens_file, b"red short\n")
        await old.get_model()
        await old.get_model()
        (warning,) = [record.getMessage() for record in caplog.records if "files_not_reloaded" in record.getMessage()]
        assert f"--tokens-file {tokens_file}, line 1: the token is 5 characters long" in warning

        replace(tokens_file, b"red red-token-01234567\n")
        await new.get_model()
        with pytest.raises(UnauthenticatedError):
            await old.get_model()


async def test_identities_of_calls_at_the_same_time_do_not_mix(scheduler: Scheduler) -> None:
    async with Client(scheduler.address, token=BLUE) as blue, Client(scheduler.address, token=GREEN) as green:
        streams = [
            client.stream("hello", LONG, request_id=f"{i}")  # which is unique for each of them only
            for i in range(8)
            for client in (blue, green)
        ]
        await asyncio.gather(*map(anext, streams))
        tenants = {key: request.group.tenant for key, request in scheduler.service.engine.requests.items()}
        assert tenants == {(name, f"{i}"): name for i in range(8) for name in ("blue", "green")}
        for stream in streams:
            await stream.aclose()
