"""A scheduler with a lot to do, for pictures of the page: two executors that work, one that is gone."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1.generation_service_pb2 import GenerateRequest
from tests.support.stack import Stack, running_stack, token_request

TENANTS = ("search", "chat", "batch")


@asynccontextmanager
async def lively_stack(step_ms: float) -> AsyncIterator[Stack]:
    """Run a scheduler that has more requests than its executors can run at once, for the length of a block.

    Args:
        step_ms: Time that a step of the larger executor takes, in milliseconds.
    """
    make_worker = functools.partial(FakeWorker, max_model_len=4096, token_us=50.0)
    workers = [
        make_worker(num_device_blocks=900, num_host_blocks=256, max_num_seqs=28, step_ms=step_ms),
        make_worker(num_device_blocks=420, num_host_blocks=128, max_num_seqs=16, step_ms=0.6 * step_ms),
        make_worker(),
    ]
    async with (
        running_stack(*workers, max_num_batched_tokens=512, page_listen="127.0.0.1:0") as stack,
        asyncio.TaskGroup() as tasks,
    ):
        await stack.executors[2].kill()
        clients = [tasks.create_task(_client(stack, client)) for client in range(64)]
        try:
            yield stack
        finally:
            for client in clients:
                client.cancel()


async def _client(stack: Stack, client: int) -> None:
    """Send one request after another, as long as there is somebody to take them."""
    number = 0
    while True:
        tenant = TENANTS[client % len(TENANTS)]
        # Half of a tenant's prompts begin alike.
        request = token_request(
            64 + 37 * ((client * 7 + number) % 9) + (900 if client % 11 == 0 else 0),
            160 + 83 * ((client + number) % 7),
            request_id=f"{tenant}-{client:02}-{number:03}",
            first_id=client % 5 if client % 2 else 5 + (client * 13 + number) % 89,
            n=3 if client % 8 == 3 else 1,
            temperature=0.8 if client % 8 == 3 else 0.0,
            seed=client,
        )
        request.tenant = tenant
        try:
            if client % 9 == 4 and number % 3 == 2:
                await asyncio.wait_for(_read(stack, request), timeout=0.8)
            else:
                await _read(stack, request)
        except (grpc.aio.AioRpcError, TimeoutError):
            await asyncio.sleep(0.05)
        number += 1


async def _read(stack: Stack, request: GenerateRequest) -> None:
    async for _ in stack.generation.Generate(request):
        pass
