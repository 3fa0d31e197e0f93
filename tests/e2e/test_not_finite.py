"""A real model whose embedding of one token is NaN: the requests that have this token end, and no executor is lost."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.worker.loading import load_worker
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.step_wire.step import RowFlag
from tests.numerics.test_not_finite import NAN_TOKEN, save_model_with_nan
from tests.support.stack import Stack, collect, running_stack, token_request

# They neither have the token nor sample it.
OTHERS = [
    token_request(8, 60, first_id=first_id, logprobs=0, banned_token_ids=[NAN_TOKEN])
    for first_id in (18, 26, 34, 42, 48, 55)
]


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    save_model_with_nan(tmp_path)
    config = ExecutorConfig(model=str(tmp_path), num_device_blocks=64, max_num_seqs=8)
    async with running_stack(load_worker(config), load_worker(config)) as stack:
        yield stack


async def answers(stack: Stack) -> list[object]:
    found = await asyncio.gather(*(collect(stack, request) for request in OTHERS))
    return [(answer.token_ids, answer.logprobs) for answer in found]


async def test_a_broken_token_ends_its_requests_and_no_executor(stack: Stack) -> None:
    whole, is_over = await answers(stack), asyncio.Event()

    async def run_others() -> None:
        while not is_over.is_set():
            assert await answers(stack) == whole

    asking: list[dict[str, Any]] = [
        {},
        {"logprobs": 0},
        {"logprobs": 2, "n": 2, "temperature": 1.0},
        {"beam_width": 2},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 1, "logprobs": 0},
    ]
    others = asyncio.create_task(run_others())
    for options in asking:
        request = token_request(9, 20, first_id=12, **options)
        assert NAN_TOKEN in request.token_ids.ids
        with pytest.raises(grpc.aio.AioRpcError, match=r"the model's logits for .* are not finite at token") as caught:
            await _run(stack, request)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
    is_over.set()
    await others

    assert stack.engine.meter.num_flagged[RowFlag.NOT_FINITE] == len(asking)
    assert [stack.driver_of(executor).num_losses for executor in stack.executors] == [0, 0]


async def _run(stack: Stack, request: pb.GenerateRequest) -> None:
    async for _ in stack.generation.Generate(request):
        pass
