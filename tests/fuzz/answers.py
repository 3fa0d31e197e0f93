"""Answers: what executors say to their scheduler, a core to its fronts, a scheduler to its clients.

A server answers with the bytes of a case, which begin as those of a real service, and the caller is a real one.
"""

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from executor_svc.fake.tokenizer import fake_tokenizer_files
from executor_svc.fake.worker import FakeWorker
from octavo.admin_client import AdminClient
from octavo.calls.scheduler_channel import SchedulerChannel
from octavo.client import Client
from octavo.core.v1 import core_service_pb2 as core
from octavo.errors import OctavoError
from octavo.generation.v1 import generation_service_pb2 as generation
from octavo.top.polling import Poller
from octavo.top.rates import RateMeter
from octavo.top.report import ask_report
from octavo.top.report_text import report_lines
from octavo.top.snapshot import snapshot_json, snapshot_text
from octavo.values.sampling_params import SamplingParams
from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.membership import Membership
from octavo_shared.step_wire.executor_info import ExecutorInfo
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.settings import EngineSettings
from scheduler_svc.executors.client import ExecutorClient
from scheduler_svc.executors.driver_interface import DriverSettings
from scheduler_svc.executors.serving_limits import PlannerSettings
from scheduler_svc.executors.session import SessionTimings
from scheduler_svc.front.output import AnswerOptions
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.output_text import TextOptions
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.link import engine_stream
from scheduler_svc.link.remote_engine import RemoteEngine
from tests.fuzz.calls import method_of, requests
from tests.fuzz.messages import changed
from tests.fuzz.target import Case, LoopTarget
from tests.support.stack import ExecutorProcess, collect, running_stack, token_request

Dial = Callable[[str], Any]
"""Opens a channel to an address."""

# How long it is waited for what may never come.
WAITS_S = 0.25


class Server(grpc.GenericRpcHandler):
    """Answers each call with bytes.

    Attributes:
        answers: Those of each method, in order; one that is called again begins anew.
        first: How many a core says to a front before it has a request.
        num_calls: By method.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[bytes]] = {}
        self.first = 1
        self.num_calls: dict[str, int] = {}

    def service(self, details: Any) -> Any:
        """Return the handler of a call."""
        try:
            method = method_of(details.method.encode())
        except KeyError:
            return None
        path = details.method

        async def one(_: bytes, context: Any) -> bytes:
            return await self._one(path, context)

        async def all_of(asked: Any, context: Any) -> AsyncIterator[bytes]:
            async for answer in self._all(path, asked if method.client_streaming else None, context):
                yield answer

        if not method.server_streaming:
            return grpc.unary_unary_rpc_method_handler(one)
        if not method.client_streaming:
            return grpc.unary_stream_rpc_method_handler(all_of)
        return grpc.stream_stream_rpc_method_handler(all_of)

    async def _one(self, path: str, context: Any) -> bytes:
        answers, place = self.answers.get(path, []), self.num_calls.get(path, 0)
        self.num_calls[path] = place + 1
        if not answers:
            await context.abort(grpc.StatusCode.NOT_FOUND, "none")
        return answers[place % len(answers)]

    async def _all(self, path: str, asked: Any, context: Any) -> AsyncIterator[bytes]:
        self.num_calls[path] = self.num_calls.get(path, 0) + 1
        await context.send_initial_metadata(())
        for place, answer in enumerate(self.answers.get(path, [])):
            if asked is not None and self.is_asked_before(path, place):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WAITS_S):
                        while (message := await anext(asked, None)) is not None and not self.counts(path, message):
                            pass
            yield answer
        if path.endswith("StreamSteps"):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "that was all")

    def is_asked_before(self, path: str, place: int) -> bool:
        """Return whether an answer waits for a message: of steps each, else the first one and what requests bring."""
        return path.endswith("StreamSteps") or place == 0 or (path.endswith("Join") and place == self.first)

    def counts(self, path: str, message: bytes) -> bool:
        """Return whether an answer waits for this message: it has a request, where those are asked for."""
        if path.endswith("StreamRequests"):
            return generation.StreamRequestsRequest.FromString(message).number == 2
        asked = path.endswith("Join") and core.JoinRequest.FromString(message)
        return not asked or asked.HasField("hello") or bool(asked.submissions)


class Recorded:
    """A channel that keeps what is answered on it, as a case of pairs of method and message."""

    def __init__(self, channel: grpc.aio.Channel, told: list[bytes]) -> None:
        self._channel = channel
        self._told = told

    def __getattr__(self, name: str) -> Any:
        found: Any = getattr(self._channel, name)
        if not name.startswith(("unary_", "stream_")):
            return found

        def method(path: str, response_deserializer: Callable[[bytes], Any], **options: Any) -> Any:
            def deserialize(content: bytes) -> Any:
                self._told.extend((path.encode(), content))
                return response_deserializer(content)

            return found(path, response_deserializer=deserialize, **options)

        return method

    async def __aenter__(self) -> "Recorded":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


class Answers(LoopTarget, ABC):
    """A caller. A case is pairs: a method, and what it is answered."""

    complaints = ("engine_failed",)

    async def open(self, running: AsyncExitStack) -> Sequence[Case]:
        """Record what a real service answers, and start the server that answers instead."""
        self.server, server = Server(), grpc.aio.server()
        server.add_generic_rpc_handlers([self.server])
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        running.push_async_callback(server.stop, 0)
        told: list[bytes] = []
        async with AsyncExitStack() as real:
            await self.record(real, lambda address: Recorded(grpc.aio.insecure_channel(address), told), told)
        return [tuple(told)]

    @abstractmethod
    async def record(self, real: AsyncExitStack, dial: Dial, told: list[bytes]) -> None:
        """Let the caller have a real service."""

    @abstractmethod
    async def play(self, address: str, dial: Dial) -> None:
        """Let the caller do all that it does."""

    def change(self, case: Case, chance: random.Random) -> Case:
        """Return answers of which one is spoiled."""
        place = 2 * chance.randrange(len(case) // 2)
        kind = GetMessageClass(method_of(case[place]).output_type)
        return (*case[: place + 1], changed(kind, case[place + 1], chance), *case[place + 2 :])

    async def run(self, case: Case) -> None:
        """Answer the caller."""
        self.server.answers, self.server.num_calls = {}, {}
        for path, content in zip(case[::2], case[1::2], strict=True):
            self.server.answers.setdefault(path.decode(errors="replace"), []).append(content)
        await self.play(self.address, grpc.aio.insecure_channel)


async def soon(condition: Callable[[], object]) -> bool:
    """Wait a moment until a condition holds; return whether it does."""
    end_s = asyncio.get_running_loop().time() + WAITS_S
    while not condition() and asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(0.001)
    return bool(condition())


async def load_tokenizer(_: ExecutorInfo, fetch: Callable[[], Awaitable[Any]]) -> None:
    """Load what was fetched."""
    Tokenizer(await fetch())


async def nothing(*_: object) -> None:
    """Do nothing."""


class ExecutorAnswers(Answers):
    """What executors answer to a scheduler."""

    name = "executor-answers"

    async def record(self, real: AsyncExitStack, dial: Dial, told: list[bytes]) -> None:
        """Drive an executor, which is attached to again with blocks that it has kept."""
        executor = ExecutorProcess(FakeWorker(block_size_tokens=2, max_model_len=300, instance_id="i"))
        await executor.start()
        real.push_async_callback(executor.kill)
        await self.play(executor.address, grpc.aio.insecure_channel)
        await self.play(executor.address, dial)

    async def play(self, address: str, dial: Dial) -> None:
        """Attach to an executor, and let it compute some requests."""
        timings = SessionTimings(resume_timeout_s=WAITS_S, connect_timeout_s=WAITS_S, detach_timeout_s=WAITS_S)
        engine = Engine(
            Membership([address], 1.0),
            lambda address: ExecutorClient(address, "a", timings, 2**23, open_channel=dial, key_fingerprint=b"k"),
            EngineSettings(PlannerSettings(), DriverSettings(1), FcfsPolicy(), 100),
            load_tokenizer,
            nothing,
        )
        task = asyncio.create_task(engine.run())
        self.sinks = [Mock() for _ in requests()]
        try:
            if await soon(lambda: engine.fleet.planners or engine.last_trouble) and engine.fleet.planners:
                assert engine.model is not None
                for request, sink in zip(requests(), self.sinks, strict=True):
                    with contextlib.suppress(OctavoServiceError):  # a mock looks for no stop strings
                        await engine.submit(replace(request, has_stop_strings=False), sink, engine.model)
                await soon(lambda: all(sink.end.called for sink in self.sinks) or engine.last_trouble)
            if task.done():
                await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class EngineAnswers(Answers):
    """What a core says to a front."""

    name = "core-answers"

    async def record(self, real: AsyncExitStack, dial: Dial, told: list[bytes]) -> None:
        """Join a core as a front."""
        stack = await real.enter_async_context(running_stack(FakeWorker(max_model_len=300), fronts=1))
        assert stack.fronts is not None
        self._told = told
        self._stopping = patch.multiple(engine_stream, FIRST_PAUSE_S=0.0, LONGEST_PAUSE_S=0.0)
        await self.play(stack.fronts.link, dial)
        self._told = []

    async def play(self, address: str, dial: Dial) -> None:
        """Join, submit some requests, and join again when the session ends."""
        with self._stopping:
            front = RemoteEngine(lambda: dial(address), "fuzz", load_tokenizer, lambda: None)
            task = asyncio.create_task(front.run())
            submitted: list[asyncio.Task[None]] = []
            try:
                if await soon(lambda: front.model or front.engine_trouble) and front.model is not None:
                    if self._told:
                        self.server.first = self._told[::2].count(b"/octavo.core.v1.CoreService/Join")
                    self.sinks = [Response(request, *_options(request)) for request in requests()]
                    submitted = [
                        asyncio.create_task(front.submit(request, sink, front.model))
                        for request, sink in zip(requests(), self.sinks, strict=True)
                    ]
                    await soon(lambda: all(sink.ended for sink in self.sinks) or self._num_joins > 1)
                if not self._told:
                    await soon(lambda: self._num_joins > 1)
                if task.done():
                    await task
            finally:
                for each in (task, *submitted):
                    each.cancel()
                ended = await asyncio.gather(task, *submitted, return_exceptions=True)
        wrong = [each for each in ended if each and not isinstance(each, OctavoServiceError | asyncio.CancelledError)]
        assert not wrong, repr(wrong)

    @property
    def _num_joins(self) -> int:
        return self.server.num_calls.get("/octavo.core.v1.CoreService/Join", 0)


def _options(request: Any) -> tuple[AnswerOptions, Tokenizer]:
    num_sampled = 0 if request.beam_search else request.num_sequences
    stop = ("\x00",) if request.has_stop_strings else ()
    num_returned = 3 if request.beam_search else request.num_sequences
    return AnswerOptions(num_returned, num_sampled, True, TextOptions(stop)), Tokenizer(fake_tokenizer_files())


class SchedulerAnswers(Answers):
    """What a scheduler answers to its clients and operators."""

    name = "scheduler-answers"

    async def record(self, real: AsyncExitStack, dial: Dial, told: list[bytes]) -> None:
        """Ask a scheduler, which has a request that ended."""
        stack = await real.enter_async_context(running_stack())
        await collect(stack, token_request(3, 4, request_id="known"))
        self._executor = stack.executor.address
        await self.play(stack.address, dial, stack.service.other_addresses["admin"])

    async def play(self, address: str, dial: Dial, admin_address: str = "") -> None:
        """Make every call, each whatever became of the others, and show what operators see."""
        params = SamplingParams(max_tokens=3, n=2, logprobs=2, prompt_logprobs=1, temperature=0.5, seed=1)
        with patch.object(SchedulerChannel, "_dial", lambda _, target: dial(target)):
            async with Client(address, resume_timeout_s=0) as client, AdminClient(admin_address or address) as operator:

                async def many() -> None:
                    async for _ in client.stream_many(["one", [40, 41]], params):
                        pass

                async def picture() -> None:
                    poller, meter = Poller(operator), RateMeter()
                    meter.add(await poller.take(wants_ended=True))
                    found = meter.add(await poller.take(wants_ended=True))
                    snapshot_text(found, address, 100)
                    snapshot_json(found, address)

                async def report() -> None:
                    report_lines(await ask_report(operator, "known"))

                for call in (
                    client.get_model, lambda: client.tokenize("hello"), lambda: client.detokenize([40]),
                    lambda: client.generate("hello", params, include_provenance=True), many, picture, report,
                    lambda: operator.list_requests(9), lambda: operator.get_block_map(self._executor),
                    lambda: operator.get_block(self._executor, 1),
                ):  # fmt: skip
                    with contextlib.suppress(OctavoError):
                        await call()
