"""Requests are counted by API, reason and tenant where their calls are held: each door, and each kind of front."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.generation.v1 import generation_service_pb2_grpc as pb_grpc
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.link import engine_stream
from scheduler_svc.processes.front_process import FrontService
from tests.monitoring.live import scrape
from tests.support.patience import PATIENCE_S
from tests.support.stack import Stack, running_stack, token_request, until

PLACES = pytest.mark.parametrize("place", ["the scheduler's process", "its fronts", "a standalone front"])
SECRETS = {"ml": "ml-secret-of-the-test", "*": "operator-secret-of-the-test"}
COMPLETION: dict[str, Any] = {"model": "fake", "prompt": [70, 71], "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@dataclass(frozen=True, slots=True)
class Doors:
    """Where clients call, and the page that has what is counted there."""

    stack: Stack
    stub: Any
    http: aiohttp.ClientSession
    metrics: str

    async def page(self) -> str:
        return await scrape(self.metrics)

    async def counts(self) -> dict[tuple[str, ...], float]:
        """Return the metrics of requests that are not 0: refused ones, answered ones, and refused ones by tenant."""
        samples = [
            sample
            for family in text_string_to_metric_families(await self.page())
            for sample in family.samples
            if re.fullmatch(r"octavo_(.*requests_refused_total|api_request_duration_seconds_count)", sample.name)
        ]
        return {tuple(sample.labels.values()): sample.value for sample in samples if sample.value}

    async def counted(self, **expected: float) -> None:
        """Return once the counts are these: a front tells its own at times."""
        wanted = {tuple(name.split("__")): value for name, value in expected.items()}
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.counts()) != wanted:
                assert all(value <= wanted.get(name, 0) for name, value in found.items()), found
                await asyncio.sleep(0.01)

    async def post(self, path: str, tenant: str | None = "ml", **body: Any) -> int:
        headers = {} if tenant is None else {"Authorization": f"Bearer {SECRETS[tenant]}"}
        async with self.http.post(path, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def generate(self, request: pb.GenerateRequest, tenant: str | None = "ml") -> grpc.StatusCode:
        call = self.stub.Generate(request, metadata=metadata_of(tenant))
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def one_running_one_waiting(self) -> list[asyncio.Task[grpc.StatusCode]]:
        """Fill the one slot there is, and then one place in the queue."""
        engine, calls = self.stack.engine, []
        for number in (0, 1):
            calls.append(asyncio.create_task(self.generate(token_request(4, 8000, first_id=9 * number))))
            await until(lambda: engine.load.num_running == 1 and engine.load.num_requests == len(calls))
        return calls

    async def stream(self, requests: Iterable[pb.GenerateRequest]) -> list[int]:
        """Return the numbers of the requests that failed, of those sent on one stream."""
        call = self.stub.StreamRequests(metadata=metadata_of("ml"))
        for number, request in enumerate(requests):
            await call.write(pb.StreamRequestsRequest(number=number, submit=request))
        await call.done_writing()
        return [failure.number async for message in call for failure in message.failed]


def metadata_of(tenant: str | None) -> list[tuple[str, str]]:
    return [] if tenant is None else [("authorization", f"Bearer {SECRETS[tenant]}")]


@asynccontextmanager
async def doors(place: str, folder: Path, worker: FakeWorker | None = None, **settings: Any) -> AsyncIterator[Doors]:
    tokens = folder / "tokens"
    tokens.write_text("".join(f"{tenant} {secret}\n" for tenant, secret in SECRETS.items()))
    tokens.chmod(0o600)
    ports = dict.fromkeys(("metrics_listen", "engine_listen", "openai_listen"), "127.0.0.1:0")
    settings |= ports | {"engine_insecure": True, "tokens_file": tokens, "fronts": int(place == "its fronts")}
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_stack(worker, **settings))
        others, address = running.service.other_addresses, running.address
        if place == "a standalone front":
            address, others = await stack.enter_async_context(standalone_front([others["fronts"]], tokens))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{others['openai']}"))
        yield Doors(running, pb_grpc.GenerationServiceStub(channel), http, others["metrics"])


@asynccontextmanager
async def standalone_front(engines: list[str], tokens: Path | None = None) -> AsyncIterator[tuple[str, dict[str, str]]]:
    """Run one in this process; gives its addresses."""
    ports = dict.fromkeys(("listen", "metrics_listen", "openai_listen"), "127.0.0.1:0")
    settings = {"engine": engines, "tokens_file": tokens, "shutdown_grace_s": 1.0, **ports}
    front = FrontService(FrontConfig.model_validate(settings))
    stopping: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(front.run(stopping))
    await front.is_ready.wait()
    await front.is_listening.wait()
    try:
        yield front.address, front.ports.other_addresses
    finally:
        stopping.set_result("the test ends")
        await running


@pytest.fixture(autouse=True)
def _fronts_tell_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stream, "METRICS_INTERVAL_S", 0.01)


@PLACES
async def test_every_request_counts_by_its_api_and_a_refused_one_by_its_reason(place: str, tmp_path: Path) -> None:
    good, wrong = token_request(4, 3), token_request(4, 3, top_p=7.0)
    async with doors(place, tmp_path, FakeWorker(has_pooling=True)) as client:
        assert await client.generate(good) is grpc.StatusCode.OK
        assert await client.generate(wrong) is grpc.StatusCode.INVALID_ARGUMENT
        assert await client.generate(good, None) is grpc.StatusCode.UNAUTHENTICATED
        foreign = token_request(4, 3)
        foreign.tenant = "red"
        assert await client.generate(foreign) is grpc.StatusCode.PERMISSION_DENIED
        assert await client.generate(wrong_of("red"), "*") is grpc.StatusCode.INVALID_ARGUMENT
        assert await client.generate(token_request(100_000, 3)) is grpc.StatusCode.INVALID_ARGUMENT
        assert await client.stream([good, wrong, good, wrong, wrong]) == [1, 3, 4]
        assert await client.post("/v1/completions", **COMPLETION) == 200
        assert await client.post("/v1/completions", **COMPLETION, stream=True) == 200
        assert await client.post("/v1/completions", **COMPLETION | {"model": "another"}) == 404
        assert await client.post("/v1/completions", **COMPLETION | {"prompt": [70] * 100_000}) == 400
        assert await client.post("/v1/completions", None, **COMPLETION) == 401
        assert await client.post("/v1/chat/completions", **CHAT) == 200
        assert await client.post("/v1/chat/completions", **CHAT | {"temperature": -1}) == 400
        assert await client.post("/tokenize", prompt="hello") == 200
        assert await client.post("/v1/nothing") == 404
        embeddings: dict[str, Any] = {"model": "fake", "input": ["two", "inputs"]}
        assert await client.post("/v1/embeddings", **embeddings) == 200
        assert await client.post("/v1/embeddings", **embeddings | {"input": "x" * 3000}) == 400
        assert await client.post("/v1/rerank", model="fake", query="q", documents=["a"]) == 200
        assert await client.post("/v1/score", model="fake", text_1="q", text_2="") == 400
        pairs = pb.ScoreRequest(queries=["q"], documents=["a"])
        await client.stub.Score(pairs, metadata=metadata_of("ml"))
        await client.stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")]), metadata=metadata_of("ml"))
        assert await client.post("/health") == 405, "who asks the process is no request"
        await client.counted(
            generate=1,
            generate__invalid=2,
            generate__unauthenticated=1,
            generate__permission_denied=1,
            generate__too_long=1,
            stream_requests=2,
            stream_requests__invalid=3,
            completions=2,
            completions__not_found=1,
            completions__too_long=1,
            completions__unauthenticated=1,
            chat_completions=1,
            chat_completions__invalid=1,
            tokenize=1,
            embed=1,
            embeddings=1,
            embeddings__too_long=1,
            rerank=1,
            score=1,
            score__invalid=1,
            other__not_found=1,
            ml=11,
            red=1,
            **{"": 3},  # two had no token, and a path that nobody serves is nobody's
        )


def wrong_of(tenant: str) -> pb.GenerateRequest:
    request = token_request(4, 3, top_p=7.0)
    request.tenant = tenant
    return request


@PLACES
async def test_a_full_queue_and_a_drain_count_at_every_door(place: str, tmp_path: Path) -> None:
    settings = {"max_num_seqs": 1, "max_waiting_requests": 1}
    async with doors(place, tmp_path, FakeWorker(step_ms=1), **settings) as client:
        engine = client.stack.engine
        endless = await client.one_running_one_waiting()
        statuses = await asyncio.gather(*(client.post("/v1/completions", **COMPLETION) for _ in range(39)))
        assert statuses == [429] * 39
        assert await client.generate(token_request(4, 3)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await client.counted(completions__queue_full=39, generate__queue_full=1, ml=40)
        for call in endless:
            call.cancel()
        await until(lambda: not engine.requests)
        await engine.start_draining()
        while await client.post("/v1/chat/completions", **CHAT) != 503:  # a front hears of it a little later
            pass
        assert await client.generate(token_request(4, 3)) is grpc.StatusCode.UNAVAILABLE
        refused = {("chat_completions", "draining"), ("generate", "draining")}
        async with asyncio.timeout(PATIENCE_S):
            while not refused <= set(await client.counts()):
                await asyncio.sleep(0.01)


async def test_what_a_front_counts_is_served_once(tmp_path: Path) -> None:
    """The scheduler serves what its own fronts count; a standalone one serves its own, and may have many schedulers."""
    async with doors("a standalone front", tmp_path) as client:
        assert await client.post("/v1/completions", **COMPLETION) == 200
        await client.counted(completions=1)
        await asyncio.sleep(0.1)  # ten times as long as a front takes to tell it
        served = await scrape(client.stack.service.other_addresses["metrics"])
        assert 'octavo_api_request_duration_seconds_count{api="completions"} 0.0' in served
        assert 'octavo_fronts_joined{kind="standalone"} 1.0' in served
        assert 'octavo_tenant_requests_total{tenant="ml"} 1.0' in served
        assert 'octavo_tenant_output_tokens_total{tenant="ml"} 3.0' in served


async def test_a_front_of_several_schedulers_serves_the_sums_under_vllms_names() -> None:
    settings: dict[str, Any] = {"engine_listen": "127.0.0.1:0", "engine_insecure": True, "fronts": 0}
    async with (
        running_stack(FakeWorker(num_device_blocks=100, max_model_len=1024), scheduler_id="one", **settings) as one,
        running_stack(FakeWorker(num_device_blocks=160, max_model_len=1024), scheduler_id="two", **settings) as two,
        standalone_front([stack.service.other_addresses["fronts"] for stack in (one, two)]) as (_, others),
        asyncio.timeout(PATIENCE_S),
    ):
        while 'num_gpu_blocks="260"' not in await scrape(others["metrics"]):
            await asyncio.sleep(0.01)
        await one.executor.kill()
        while 'num_gpu_blocks="160"' not in await scrape(others["metrics"]):
            await asyncio.sleep(0.01)


# What the endpoint picker of the Gateway API inference extension reads, as text.
PICKED = re.compile(
    r'^vllm:num_requests_waiting\{engine="0",model_name="fake"\} 1\.0$.*'
    r'^vllm:num_requests_running\{engine="0",model_name="fake"\} 1\.0$.*'
    r'^vllm:kv_cache_usage_perc\{engine="0",model_name="fake"\} 0\.[0-9]+$.*'
    r'^vllm:cache_config_info\{block_size="16",engine="0",model_name="fake",num_gpu_blocks="[0-9]+"\} 1\.0$',
    re.MULTILINE | re.DOTALL,
)


@PLACES
async def test_an_endpoint_picker_finds_its_four_metrics_at_every_kind_of_front(place: str, tmp_path: Path) -> None:
    async with doors(place, tmp_path, FakeWorker(step_ms=1), max_num_seqs=1) as client:
        endless = await client.one_running_one_waiting()

        async def pages() -> list[str]:
            """The metrics port, and that of OpenAI's API, which a picker reads."""
            headers = {"Authorization": f"Bearer {SECRETS['*']}"}
            async with client.http.get("/metrics", headers=headers) as answer:
                return [await client.page(), await answer.text()]

        async with asyncio.timeout(PATIENCE_S):
            while not all(map(PICKED.search, await pages())):
                await asyncio.sleep(0.05)
        for page in await pages():
            assert re.findall("^# TYPE (vllm:.*)$", page, re.MULTILINE) == [
                "vllm:num_requests_waiting gauge",
                "vllm:num_requests_running gauge",
                "vllm:kv_cache_usage_perc gauge",
                "vllm:cache_config_info gauge",
            ]
        for call in endless:
            call.cancel()
        await client.stack.executor.kill()
        async with asyncio.timeout(PATIENCE_S):
            while any("vllm:num_requests_waiting{" in page for page in await pages()):
                await asyncio.sleep(0.05)
