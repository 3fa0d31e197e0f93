"""One tenant has filled the waiting queue, and another one comes: over gRPC and HTTP, with fronts and without."""

import asyncio
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_service_pb2 as pb
from tests.contract.openai.api import Api, running_api
from tests.support.stack import token_request, until

ENDLESS = 8000


def secret_of(tenant: str) -> str:
    return f"{tenant}-secret-of-the-test"


def generate(
    api: Api, tenant: str, num: int, max_tokens: int = 3
) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
    request = token_request(4, max_tokens, request_id=f"{tenant}{num}", first_id=num)
    return api.stack.generation.Generate(request, metadata=[("authorization", f"Bearer {secret_of(tenant)}")])


async def answer_of(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> int:
    """Return how many tokens a call brings until it ends in order."""
    return sum([len(event.delta.token_ids) async for event in call])


@pytest.mark.parametrize("fronts", [0, 2])
async def test_a_tenant_that_fills_the_queue_gives_way_to_another_one_up_to_its_share(
    fronts: int, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{tenant} {secret_of(tenant)}\n" for tenant in ("red", "blue")))
    tokens.chmod(0o600)
    settings = {"max_num_seqs": 1, "max_waiting_requests": 4, "tokens_file": tokens, "fronts": fronts}
    async with running_api(FakeWorker(step_ms=1), **settings) as api:
        requests = api.stack.engine.requests
        running = generate(api, "red", 0, ENDLESS)
        await until(lambda: api.stack.engine.load.num_running == 1)
        reds = []
        for num in range(1, 4):
            reds.append(asyncio.create_task(answer_of(generate(api, "red", num))))
            await until(lambda: len(requests) == 1 + len(reds))
        headers = {"Authorization": f"Bearer {secret_of('red')}"}
        body = {"model": "fake", "prompt": [70, 71], "max_tokens": 3}
        newest = asyncio.create_task(api.send("POST", "/v1/completions", json=body, headers=headers))
        await until(lambda: len(requests) == 5)

        blues = [asyncio.create_task(answer_of(generate(api, "blue", num))) for num in (5, 6)]
        refused = await newest
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.error["message"] == (
            "the waiting queue of tenant 'red' is full, and the request was displaced by another tenant's request (4 "
            "requests); retry in 1 s"
        )
        with pytest.raises(
            grpc.aio.AioRpcError, match=(r"was displaced by another tenant's request \(3 requests\)")
        ) as caught:
            await reds.pop()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(caught.value.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.ToMilliseconds() > 0

        for tenant in ("red", "blue"):  # both have their halves
            with pytest.raises(grpc.aio.AioRpcError, match=r"the waiting queue is full \(4 requests\)"):
                await answer_of(generate(api, tenant, 9))
        running.cancel()
        assert await asyncio.gather(*reds, *blues) == [3] * 4
