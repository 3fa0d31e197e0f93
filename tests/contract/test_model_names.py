"""Several models behind one front: clients choose by name, and a model without engines is in nobody's way."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_svc.fake.worker import FakeWorker
from octavo.client import Client
from octavo.errors import InvalidRequestError, RequestAbortedError, UnavailableError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.generation.v1 import generation_service_pb2_grpc as pb_grpc
from octavo.values.outputs import Accepted, ChatMessage, Delta, FailedRequest, Finished
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.front.api.models import peek_model
from scheduler_svc.processes.front_process import FrontService
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S
from tests.support.stack import Stack, running_stack, until

HELLO = [ChatMessage(role="user", content="hello")]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Shouter(FakeWorker):
    """Another model: other answers, another chat template, which knows tools, and shorter sequences."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(eos_probability=0.01, max_model_len=256, **fields)

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return files with a template that shouts."""
        files = super().tokenizer_files()
        config = next(file for file in files if file.name == "tokenizer_config.json")
        content = json.loads(config.content)
        content["chat_template"] = (
            '{% if tools %}{{ tools | tojson }}<tool_call>\n{"name": 0, "arguments": 0}\n</tool_call>{% endif %}'
            "{% for message in messages %}{{ message['content'] | upper }}!{% endfor %}"
        )
        return tuple(replace(file, content=json.dumps(content).encode()) if file is config else file for file in files)


@asynccontextmanager
async def engine_of(*workers: FakeWorker, name: str, **settings: Any) -> AsyncIterator[Stack]:
    """Run a scheduler that fronts may join, and an executor for each worker."""
    async with running_stack(
        *workers,
        fronts=0,
        engine_listen="127.0.0.1:0",
        engine_insecure=True,
        scheduler_id=name,
        lease_s=60.0,
        **settings,
    ) as stack:
        yield stack


def engine_address(stack: Stack) -> str:
    return stack.service.other_addresses["fronts"]


@dataclass(frozen=True, slots=True)
class RunningFront:
    """A front, and how to call it."""

    service: FrontService
    stop: Callable[[], Any]
    http: aiohttp.ClientSession
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return self.service.address

    @property
    def generation(self) -> "pb_grpc.GenerationServiceAsyncStub":
        return pb_grpc.GenerationServiceStub(self.channel)

    def client(self, model: str = "") -> Client:
        return Client(self.address, model=model, resume_timeout_s=0)

    async def send(self, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        async with self.http.request("GET" if body is None else "POST", path, json=body) as response:
            return response.status, json.loads(await response.text())

    async def is_serving(self) -> bool:
        stub = health_pb2_grpc.HealthStub(self.channel)  # type: ignore[no-untyped-call]
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="readiness"))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def front_of(*engine: str, awaits: tuple[str, ...] = ()) -> AsyncIterator[RunningFront]:
    """Run a front until the models of these names have engines."""
    config = FrontConfig.model_validate(
        {"listen": "127.0.0.1:0", "openai_listen": "127.0.0.1:0", "engine": engine, "shutdown_grace_s": 1.0}
    )
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    service = FrontService(config)
    running = asyncio.create_task(service.run(told))

    async def stop() -> None:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(stop)
        await service.is_listening.wait()
        for name in awaits:
            await until(lambda name=name: not service.cells[name].why_not_ready)  # type: ignore[misc]
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                "http://" + service.ports.other_addresses["openai"], timeout=aiohttp.ClientTimeout(total=PATIENCE_S)
            )
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(service.address))
        yield RunningFront(service, stop, http, channel)


@asynccontextmanager
async def two_models(step_ms: int = 0) -> AsyncIterator[tuple[Stack, Stack, RunningFront]]:
    workers = FakeWorker(step_ms=step_ms), Shouter(step_ms=step_ms)
    async with engine_of(workers[0], name="one") as small, engine_of(workers[1], name="two") as large:
        engines = f"small={engine_address(small)}", f"org/Large-2={engine_address(large)}"
        async with front_of(*engines, awaits=("small", "org/Large-2")) as front:
            yield small, large, front


async def test_each_name_has_its_own_model_tokenizer_template_and_limits_on_both_ports() -> None:
    async with two_models() as (small, large, front):
        for name, stack, longest, prompt in (
            ("small", small, 8192, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
            ("org/Large-2", large, 256, "HELLO!"),
        ):
            async with Client(stack.address) as at_home, front.client(name) as client:
                model = await client.get_model()
                assert (model.model_id, model.max_model_len) == (name, longest)
                assert replace(model, model_id="fake") == await at_home.get_model()
                tokens = await client.tokenize([{"role": "user", "content": "hello"}])
                assert await client.detokenize(tokens.token_ids, skip_special_tokens=False) == prompt
                wanted = await at_home.generate(HELLO, max_tokens=20, temperature=0)
                assert (await client.generate(HELLO, max_tokens=20, temperature=0)).outputs == wanted.outputs
                with pytest.raises(InvalidRequestError, match=f"at most {longest - 1}|length is {longest} tokens"):
                    await client.generate([40] * 8300)
                many = [event async for _, event in client.stream_many([HELLO, HELLO], max_tokens=20, temperature=0)]
                finished = [event for event in many if isinstance(event, Finished)]
                assert [event.outputs for event in finished] == [wanted.outputs] * 2
            chat = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
            status, answer = await front.send("/v1/chat/completions", {**chat, "temperature": 0})
            assert (status, answer["model"]) == (200, name)
            assert answer["choices"][0]["message"]["content"] == wanted.outputs[0].text
            status, answer = await front.send("/tokenize", {"model": name, "messages": chat["messages"]})
            assert (status, answer["tokens"]) == (200, list(tokens.token_ids))
            status, answer = await front.send(f"/v1/models/{name}")
            assert (status, answer["id"], answer["max_model_len"]) == (200, name, longest)
            status, answer = await front.send(f"/tokenizer_info?model={name}")
            assert (status, answer["model_max_length"]) == (200, longest)
            status, _ = await front.send("/v1/chat/completions", {**chat, "tools": [TOOL]})
            assert status == (400 if name == "small" else 200), "its template knows no tools, or it does"
        status, listed = await front.send("/v1/models")
        assert (status, [model["id"] for model in listed["data"]]) == (200, ["small", "org/Large-2"])


async def test_another_name_is_refused_with_those_that_there_are() -> None:
    known = '"small" or "org/Large-2"'
    async with two_models() as (_, _, front):
        for name in ("", "medium"):
            told = f'model is "{name}"; it must be {known}'
            async with front.client(name) as client:
                for call in (
                    client.get_model(),
                    client.generate("hello"),
                    client.generate([40] * 20_000),  # not read on the event loop
                    client.tokenize("hello"),
                    client.detokenize([40]),
                ):
                    with pytest.raises(InvalidRequestError) as refused:
                        await call
                    assert (str(refused.value), refused.value.field) == (told, "model")
                [(_, failed)] = [each async for each in client.stream_many(["hello"])]
                assert isinstance(failed, FailedRequest)
                assert str(failed.error) == told
            for path, body in (
                ("/v1/completions", {"model": name, "prompt": "hello"}),
                ("/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "hello"}]}),
                ("/tokenize", {"model": name, "prompt": "hello"}),
                ("/detokenize", {"model": name, "tokens": [40]}),
                (f"/v1/models/{name}", None),
                (f"/tokenizer_info?model={name}", None),
            ):
                status, answer = await front.send(path, body)
                error = {"message": told, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
                assert (status, answer) == (404, {"error": error}), path
        status, answer = await front.send("/v1/completions", {"prompt": "hello"})
        assert (status, answer["error"]["param"]) == (400, "model")
        assert "small or org/Large-2" in answer["error"]["message"]


async def test_a_model_without_a_name_is_refused_by_any_but_its_own() -> None:
    async with engine_of(FakeWorker(), name="one", served_model_name="own") as stack:
        async with front_of(engine_address(stack), awaits=("",)) as front:
            for address in (stack.address, front.address):
                for name in ("", "own"):
                    async with Client(address, model=name) as client:
                        assert (await client.get_model()).model_id == "own"
                        assert (await client.generate("hello", max_tokens=1)).outputs
                        assert (await client.tokenize("hello")).token_ids
                async with Client(address, model="other") as client:
                    for call in (client.get_model(), client.generate("hello"), client.detokenize([40])):
                        with pytest.raises(InvalidRequestError, match='model is "other"; it must be "own", the served'):
                            await call
        async with front_of(f"front={engine_address(stack)}", awaits=("front",)) as front:
            status, listed = await front.send("/v1/models")
            assert [model["id"] for model in listed["data"]] == ["front"], "clients know the front's name"
            async with front.client() as client:
                assert (await client.get_model()).model_id == "front"
            status, _ = await front.send("/v1/completions", {"model": "own", "prompt": "hello"})
            assert status == 404


async def test_an_engine_that_refuses_or_is_silent_is_in_nobodys_way() -> None:
    """Of the same model, and of others."""
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(socket.socket()) as refusing:
        refusing.bind(("127.0.0.1", 0))  # and does not listen
        absent, mute = (f"127.0.0.1:{one.getsockname()[1]}" for one in (refusing, silent))
        async with engine_of(FakeWorker(), name="one", loses_soon=True) as stack:
            engines = (
                *(f"away={absent}", f"mute={mute}"),
                *(f"small={absent}", f"small={mute}", f"small={engine_address(stack)}"),
            )
            async with front_of(*engines, awaits=("small",)) as front, asyncio.timeout(PATIENCE_S):
                begun_s = asyncio.get_running_loop().time()
                assert await front.is_serving()
                assert (await front.send("/health"))[0] == 200
                async with front.client("small") as client:
                    assert (await client.generate("hello", max_tokens=3)).outputs
                    assert not await client.abort("unknown")
                status, listed = await front.send("/v1/models")
                known = [(model["id"], model["max_model_len"]) for model in listed["data"]]
                assert (status, known) == (200, [("away", None), ("mute", None), ("small", 8192)])
                for name in ("away", "mute"):
                    async with front.client(name) as client:
                        with pytest.raises(UnavailableError, match="the engine does not answer"):
                            await client.generate("hello")
                    status, _ = await front.send("/v1/completions", {"model": name, "prompt": "hello"})
                    assert status == 503
                assert asyncio.get_running_loop().time() - begun_s < 5
                assert "away: the engine does not answer" in front.service.last_trouble
                await stack.executor.kill()
                await until(lambda: not front.service.is_ready.is_set())
                assert not await front.is_serving()
                assert (await front.send("/health"))[0] == 503


async def test_abort_finds_a_request_of_any_model_and_an_id_lives_in_each() -> None:
    async with two_models(step_ms=20) as (_, _, front), AsyncExitStack() as stack:
        streams = {}
        for name in ("small", "org/Large-2"):
            client = await stack.enter_async_context(front.client(name))
            streams[name] = client.stream([40], request_id=f"of {name}", max_tokens=200, ignore_eos=True)
            assert isinstance(await anext(streams[name]), Accepted)
        for name, stream in streams.items():
            assert (await front.generation.Abort(pb.AbortRequest(request_id=f"of {name}"))).was_live
            with pytest.raises(RequestAbortedError):
                async for _ in stream:
                    pass
        assert not (await front.generation.Abort(pb.AbortRequest(request_id="of small"))).was_live


async def test_an_answer_of_a_named_model_goes_on_at_another_front() -> None:
    async with engine_of(FakeWorker(), name="one") as small, engine_of(Shouter(step_ms=2), name="two") as large:
        engines = f"small={engine_address(small)}", f"large={engine_address(large)}"
        async with (
            front_of(*engines, awaits=("small", "large")) as first,
            front_of(*engines, awaits=("small", "large")) as second,
            Client([first.address, second.address], model="large") as client,
        ):
            whole = await client.generate([60, 61], max_tokens=150, temperature=0, ignore_eos=True)
            told = []
            async for event in client.stream([60, 61], max_tokens=150, temperature=0, ignore_eos=True):
                told.append(event)
                if sum(isinstance(one, Delta) for one in told) == 5:
                    await first.stop()
    finished = told[-1]
    assert isinstance(finished, Finished)
    assert (finished.outputs, finished.num_resumptions) == (whole.outputs, 1)


async def test_one_engine_may_serve_under_two_names_and_metrics_tell_them_apart() -> None:
    async with engine_of(FakeWorker(), name="one") as stack:
        names = ("new", "old")
        async with front_of(*(f"{name}={engine_address(stack)}" for name in names), awaits=names) as front:
            for name in names:
                async with front.client(name) as client:
                    assert (await client.generate("hello", max_tokens=3)).outputs
            await until(lambda: not any(cell.load.num_requests for cell in front.service.cells.values()))
            async with front.http.get("/metrics") as response:
                lines = (await response.text()).splitlines()
            for name in names:
                assert f'octavo_front_engine_used{{model="{name}",scheduler="one"}} 1.0' in lines
                assert f'vllm:num_requests_running{{engine="0",model_name="{name}"}} 0.0' in lines


@each_row(
    (pb.GenerateRequest(text="a" * 300, model="x"), "x"),
    (pb.GenerateRequest(text="a"), ""),
    (pb.DetokenizeRequest(token_ids=range(5000), model="räume"), "räume"),
    (pb.TokenizeRequest(text="", model="x"), "x"),
)
def test_a_name_is_read_before_the_request_is(request: Any, name: str) -> None:
    content = request.SerializeToString()
    assert peek_model(content, type(request)) == name
    for cut in range(len(content)):
        assert name.startswith(peek_model(content[:cut], type(request)).rstrip("\ufffd"))
