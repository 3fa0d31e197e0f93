"""A request id belongs to its tenant: others may use it too, and learn nothing of its request."""

import asyncio
import threading
from typing import Any

import grpc
import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.generation.v1 import generation_service_pb2 as pb
from scheduler_svc.front.api import generation
from tests.support.stack import Stack, collect, running_stack, token_request, until

ENDLESS = 100_000


def of(tenant: str) -> pb.GenerateRequest:
    request = token_request(5, ENDLESS, request_id="same", first_id=len(tenant))
    request.tenant = tenant
    return request


async def error_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def tenants_of_live(stack: Stack) -> list[str]:
    return [request.tenant for request in (await stack.admin.ListRequests(admin.ListRequestsRequest())).requests]


@pytest.mark.parametrize("fronts", [0, 1])
async def test_two_tenants_have_a_request_of_one_id_and_one_tenant_has_not(fronts: int) -> None:
    async with running_stack(FakeWorker(step_ms=1), fronts=fronts) as stack:
        running = [asyncio.create_task(collect(stack, of(tenant))) for tenant in ("blue", "green")]
        await until(lambda: len(stack.engine.requests) == 2)
        code, text = await error_of(collect(stack, of("blue")))
        assert (code, text) == (
            grpc.StatusCode.ALREADY_EXISTS,
            "request_id 'same' is in use by a live request",
        )
        assert sorted(await tenants_of_live(stack)) == ["blue", "green"]
        # Without tokens everybody acts for all tenants.
        assert (await stack.generation.Abort(pb.AbortRequest(request_id="same"))).was_live
        for call in running:
            assert (await error_of(call))[0] is grpc.StatusCode.ABORTED
        assert not stack.engine.requests
        assert not stack.engine.requests.named("same", None)


async def test_operators_say_whose_request_they_mean_and_are_told_whose_there_are() -> None:
    async with running_stack(FakeWorker(step_ms=1)) as stack:
        running = {tenant: asyncio.create_task(collect(stack, of(tenant))) for tenant in ("blue", "green")}
        await until(lambda: len(stack.engine.requests) == 2)
        calls: list[tuple[Any, Any]] = [
            (stack.admin.GetRequest, admin.GetRequestRequest),
            (stack.admin.ExplainRequest, admin.ExplainRequestRequest),
        ]
        for ask, kind in calls:
            code, text = await error_of(ask(kind(request_id="same")))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert text.startswith("tenant is not set; it must be one of ")
            assert all(name in text for name in ("'blue'", "'green'", "each has a request 'same'"))
            assert (await error_of(ask(kind(request_id="same", tenant="red"))))[0] is grpc.StatusCode.NOT_FOUND
            assert await ask(kind(request_id="same", tenant="green"))
        found = await stack.admin.GetRequest(admin.GetRequestRequest(request_id="same", tenant="green"))
        assert found.request.tenant == "green"
        assert await stack.engine.abort_request("same", "blue")
        assert (await error_of(running["blue"]))[0] is grpc.StatusCode.ABORTED
        found = await stack.admin.GetRequest(admin.GetRequestRequest(request_id="same"))
        assert found.request.tenant == "green"  # the one that lives
        found = await stack.admin.GetRequest(admin.GetRequestRequest(request_id="same", tenant="blue"))
        assert (found.request.tenant, found.request.status) == ("blue", admin_pb2.REQUEST_STATUS_ENDED)
        await stack.engine.abort_request("same", None)
        await error_of(running["green"])


async def test_requests_of_one_id_are_checked_at_the_same_time_for_two_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an Abort ends each of them when its check is over."""
    checking: list[str] = []
    may_end = threading.Event()
    check = generation.check_request

    def held(request: pb.GenerateRequest, *arguments: Any) -> Any:
        checking.append(request.tenant)
        may_end.wait()
        return check(request, *arguments)

    monkeypatch.setattr(generation, "check_request", held)
    async with running_stack(FakeWorker()) as stack:
        running = [asyncio.create_task(collect(stack, of(tenant))) for tenant in ("blue", "green")]
        await until(lambda: sorted(checking) == ["blue", "green"])
        assert (await error_of(collect(stack, of("blue"))))[0] is grpc.StatusCode.ALREADY_EXISTS
        assert (await stack.generation.Abort(pb.AbortRequest(request_id="same"))).was_live
        may_end.set()
        for call in running:
            assert (await error_of(call))[0] is grpc.StatusCode.ABORTED
