"""Both tiers as processes, with their metrics: what they answer after some work."""

import asyncio
import urllib.request
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from octavo.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from octavo.generation.v1 import generation_service_pb2_grpc
from tests.support.certificates import Authority
from tests.support.patience import PATIENCE_S
from tests.support.processes import running_service
from tests.support.stack import token_request

NUM_REQUESTS = 8
_METRICS = ("--metrics-listen", "127.0.0.1:0")
_FRONTS = ("--engine-listen", "127.0.0.1:0", "--engine-insecure")


@dataclass(frozen=True, slots=True)
class Scrapes:
    """What /metrics answered: the scheduler, its fake executor, and another one that speaks TLS and is idle."""

    scheduler: str
    executor: str
    tls_executor: str


async def scrape_all(directory: Path) -> Scrapes:
    """Start the services, run requests, and return what their metrics say afterwards."""
    files = Authority().issue("executor").write(directory)
    tls = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    async with AsyncExitStack() as services:
        executor, tls_executor = await asyncio.gather(
            services.enter_async_context(running_service("executor_svc.fake", *_METRICS)),
            services.enter_async_context(running_service("executor_svc.fake", *_METRICS, *tls)),
        )
        scheduler = await services.enter_async_context(
            running_service("scheduler_svc", "--executor", executor.address, *_METRICS, *_FRONTS)
        )
        channel = await services.enter_async_context(grpc.aio.insecure_channel(scheduler.address))
        await asyncio.gather(*(_generate(channel, number) for number in range(NUM_REQUESTS)))
        await _last_step_answered(scheduler.other_addresses["admin"])
        pages = [await scrape(service.other_addresses["metrics"]) for service in (scheduler, executor, tls_executor)]
    return Scrapes(*pages)


async def _last_step_answered(admin_address: str) -> None:
    """Return once no step is in flight: the one behind the last token may still be."""
    async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(admin_address) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        while True:
            state = await stub.GetSchedulerState(admin_service_pb2.GetSchedulerStateRequest())
            if not any(executor.num_steps_in_flight for executor in state.executors):
                return


async def scrape(address: str) -> str:
    """Return what /metrics answers; an error of HTTP is raised."""
    return await asyncio.to_thread(get, f"http://{address}/metrics")


def get(url: str) -> str:
    """Return a page. Raises: urllib.error.HTTPError: another status than 200."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as page:
        text: str = page.read().decode()
    return text


def value_of(page: str, name: str, **labels: str) -> float:
    """Return the one sample of a page with a name and these labels."""
    [found] = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


async def _generate(channel: grpc.aio.Channel, number: int) -> None:
    stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                events = [event async for event in stub.Generate(token_request(20, 30, first_id=number))]
                assert events[-1].HasField("finished")
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:  # no executor is attached yet
                    raise
