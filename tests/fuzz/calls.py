"""Calls to the services: what clients and operators send, fronts to their core, schedulers to executors."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar
from unittest.mock import patch

import grpc
import grpc.aio
import numpy as np
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.core.v1 import core_service_pb2 as core
from octavo.execution.v1 import execution_service_pb2 as execution
from octavo.execution.v1 import execution_service_pb2_grpc as execution_grpc
from octavo.generation.v1 import generation_pb2 as nouns
from octavo.generation.v1 import generation_service_pb2 as generation
from octavo_shared.step_wire.executor_info import Capability
from octavo_shared.step_wire.sampling_row import SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules
from octavo_shared.step_wire.wire import encode_step
from scheduler_svc.link import front_session
from scheduler_svc.link.messages import encode_submission
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from tests.fuzz.messages import changed
from tests.fuzz.target import Case, LoopTarget
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench
from tests.support.stack import ExecutorProcess, collect, running_stack, token_request

# Whoever sends nonsense is told what is wrong with it: these say that we do not know.
OURS = ("UNKNOWN", "DATA_LOSS")
MOST_ANSWERS = 20


def method_of(path: bytes) -> MethodDescriptor:
    """Return the method of a path, /SERVICE/NAME."""
    _, service, name = path.decode().split("/")
    return Default().FindServiceByName(service).methods_by_name[name]


class Calls(LoopTarget):
    """A service that is called. A case is the method and what is sent.

    Attributes:
        said: With which error the last call ended.
    """

    channel: grpc.aio.Channel
    said = ""

    def change(self, case: Case, chance: random.Random) -> Case:
        """Return a call of which one message is spoiled."""
        place = chance.randrange(1, len(case))
        kind = GetMessageClass(method_of(case[0]).input_type)
        return (*case[:place], changed(kind, case[place], chance), *case[place + 1 :])

    async def run(self, case: Case) -> None:
        """Make a call; take some answers."""
        method = method_of(case[0])
        kinds = ["stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)]
        calling: Any = getattr(self.channel, "_".join(kinds))(case[0].decode())
        contents, self.said = list(case[1:]), ""
        try:
            if method.client_streaming:
                await self.talk(calling(), contents)
            elif method.server_streaming:
                await _take(calling(contents[0]))
            else:
                for content in contents:
                    await calling(content)
        except grpc.aio.AioRpcError as error:
            self.said = f"{error.code().name}: {error.details()}"
        assert not self.said.startswith(OURS), self.said
        assert "internal error" not in self.said, self.said

    async def talk(self, call: Any, contents: Sequence[bytes]) -> None:
        """Say all on a stream, and take what comes."""
        for content in contents:
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(content)
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.done_writing()
        await _take(call)


async def _take(call: Any) -> None:
    for _ in range(MOST_ANSWERS):
        if await call.read() is grpc.aio.EOF:
            return
    call.cancel()


async def _take_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def called(path: str, *messages: Message) -> Case:
    """Return the case of a call."""
    return (path.encode(), *(message.SerializeToString() for message in messages))


class ClientCalls(Calls):
    """What clients and operators send to a scheduler."""

    name = "client-calls"

    async def open(self, running: AsyncExitStack) -> Sequence[Case]:
        """Start a scheduler."""
        stack = await running.enter_async_context(running_stack(FakeWorker(max_model_len=300)))
        ports = (stack.address, stack.service.other_addresses["admin"])
        opened = [await running.enter_async_context(grpc.aio.insecure_channel(port)) for port in ports]
        await collect(stack, token_request(3, 4, request_id="known"))
        self._channels = dict(zip((b"generation", b"admin"), opened, strict=True))
        return [*generation_cases(), *admin_cases(stack.executor.address)]

    async def run(self, case: Case) -> None:
        """Call the port that has the method."""
        self.channel = self._channels[case[0].split(b".")[1]]
        await super().run(case)


def generation_cases() -> list[Case]:
    """Return valid calls of GenerationService."""
    service = "/octavo.generation.v1.GenerationService"
    text = generation.GenerateRequest(
        text="hello",
        cache_salt="salt",
        include_prompt_token_ids=True,
        include_provenance=True,
        min_delta_interval_ms=1,
        speculate=False,
        sampling_params=nouns.SamplingParams(
            max_tokens=4, n=2, best_of=3, seed=1, temperature=0.5, top_p=0.9, top_k=9, min_p=0.1, logprobs=2,
            prompt_logprobs=2, presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, stop=["end"],
            stop_token_ids=[5], min_tokens=1,
        ),
    )  # fmt: skip
    search = generation.GenerateRequest(
        token_ids=generation.TokenIds(ids=[40, 41, 42]), sampling_params=nouns.SamplingParams(max_tokens=4)
    )
    search.sampling_params.beam_width = 3
    messages = [
        generation.ChatMessage(role="system", content="short"),
        generation.ChatMessage(role="user", content="hello", name="u"),
        generation.ChatMessage(role="assistant", content="ok"),
        generation.ChatMessage(role="user", content="more"),
    ]
    chat = generation.GenerateRequest(
        messages=generation.ChatMessages(messages=messages, template_kwargs_json="{}"),
        sampling_params=nouns.SamplingParams(max_tokens=4),
    )
    cut = generation.GenerateRequest(
        token_ids=generation.TokenIds(ids=[50, 51, 52]),
        sampling_params=nouns.SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=1, seed=3),
        continuation=generation.Continuation(
            attempt=1,
            max_model_len=300,
            outputs=[
                generation.ContinuedOutput(
                    token_ids=[60, 61], logprobs=[-1, -1], alternative_token_ids=[1, 2], alternative_logprobs=[-2, -2],
                    num_characters=2,
                )
            ],
            prompt_logprobs=nouns.PromptLogprobs(
                logprobs=[-1, -1], alternative_token_ids=[7, 8], alternative_logprobs=[-1, -1]
            ),
        ),
    )  # fmt: skip
    requests = [text, search, chat, cut]
    stream = [generation.StreamRequestsRequest(credits=8)]
    stream += [
        generation.StreamRequestsRequest(number=number, submit=request, include_text=True)
        for number, request in enumerate(requests, 1)
    ]
    stream.append(generation.StreamRequestsRequest(abort=[2], credits=20))
    return [
        *(called(f"{service}/Generate", request) for request in requests),
        *[called(f"{service}/StreamRequests", *stream)] * 3,
        called(f"{service}/Abort", generation.AbortRequest(request_id="none")),
        called(f"{service}/Tokenize", generation.TokenizeRequest(text="hello", add_special_tokens=True)),
        called(f"{service}/Tokenize", generation.TokenizeRequest(messages=chat.messages)),
        called(f"{service}/Detokenize", generation.DetokenizeRequest(token_ids=[40, 41])),
        called(f"{service}/GetModel", generation.GetModelRequest()),
    ]


def admin_cases(executor: str) -> list[Case]:
    """Return valid calls of AdminService, but for Drain: it would end the scheduler."""
    service = "/octavo.admin.v1.AdminService"
    return [
        called(f"{service}/GetSchedulerState", admin.GetSchedulerStateRequest()),
        called(f"{service}/ListRequests", admin.ListRequestsRequest(page_size=3, page_token="1")),
        called(f"{service}/ListEndedRequests", admin.ListEndedRequestsRequest(num_requests=3)),
        called(f"{service}/GetRequest", admin.GetRequestRequest(request_id="known", tenant="")),
        called(f"{service}/ListQueue", admin.ListQueueRequest(page_size=3)),
        called(f"{service}/ExplainRequest", admin.ExplainRequestRequest(request_id="known", tenant="")),
        called(f"{service}/GetStep", admin.GetStepRequest(executor=executor, step_id=1)),
        called(f"{service}/ListSteps", admin.ListStepsRequest(executor=executor, num_steps=3)),
        called(f"{service}/GetBlockMap", admin.GetBlockMapRequest(executor=executor)),
        called(f"{service}/GetBlock", admin.GetBlockRequest(executor=executor, block=1)),
        called(f"{service}/DrainExecutor", admin.DrainExecutorRequest(executor="another:1", undo=True)),
    ]


def submissions(model_hash: str, max_model_len: int) -> list[core.Submission]:
    """Return requests of several kinds, as fronts submit them, numbered from 1 on."""
    return [encode_submission(number, each, model_hash, max_model_len) for number, each in enumerate(requests(250), 1)]


def requests(num_tokens: int = 6) -> list[EngineRequest]:
    """Return requests of several kinds; one has outputs of so many tokens."""
    prompt, ends = np.array([40, 41, 42, 43], np.int32), StopConditions(6, frozenset([5]))
    rules = TokenRules(banned_token_ids=np.array([7], np.int32))
    return [
        EngineRequest("r1", prompt, SamplingRow(num_logprobs=2), ends, num_prompt_logprobs=2, token_rules=rules),
        EngineRequest(
            "r2",
            prompt + 10,
            SamplingRow(temperature=0.5),
            StopConditions(num_tokens),
            num_sequences=2,
            has_stop_strings=True,
        ),
        EngineRequest("r3", prompt + 20, SamplingRow(), ends, beam_search=BeamSearchParams(3)),
    ]


class FrontMessages(Calls):
    """What fronts send to their core. A case is the method and the messages of a session."""

    name = "front-messages"
    waits_s: ClassVar[float] = 0.03

    async def open(self, running: AsyncExitStack) -> Sequence[Case]:
        """Start a scheduler with a standalone front, to join beside it."""
        running.enter_context(patch.object(front_session, "SLOW_FRONT_S", 0.2))  # for a front that takes nothing
        stack = await running.enter_async_context(running_stack(FakeWorker(max_model_len=300), fronts=1))
        assert stack.fronts is not None
        self.channel = await running.enter_async_context(grpc.aio.insecure_channel(stack.fronts.link))
        model = stack.engine.model
        assert model is not None
        self._num_sessions = 0
        hello = core.FrontHello(min_version=1, max_version=1, front_id="fuzz", session=1, pid=1)
        submitted = submissions(model.info.model_hash, model.max_model_len)
        later = core.JoinRequest(
            output_ends=[core.OutputEnd(number=2, output_index=1, num_tokens=0, reason=core.END_REASON_STOP)],
            aborts=[core.RequestAbort(number=3, failure=core.Failure(kind="RequestAbortedError", message="m"))],
            abort_calls=[core.AbortCall(call=1, request_id="r1", tenant="")],
            credits=5,
            is_ready=True,
        )
        messages = [core.JoinRequest(hello=hello, credits=1000), core.JoinRequest(submissions=submitted), later]
        return [called("/octavo.core.v1.CoreService/Join", *messages)]

    async def talk(self, call: Any, contents: Sequence[bytes]) -> None:
        """Join as a new session, and wait a moment for what is computed."""
        self._num_sessions += 1
        for content in contents:
            await asyncio.sleep(self.waits_s / 3 if content is contents[-1] else 0)  # for requests to run
            with contextlib.suppress(DecodeError):
                message = core.JoinRequest.FromString(content)
                if message.hello.session == 1:
                    message.hello.session = self._num_sessions
                    content = message.SerializeToString()
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(content)
        taking = asyncio.create_task(_take_all(call))
        await asyncio.wait([taking], timeout=self.waits_s)
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.done_writing()
        await taking


class SchedulerMessages(Calls):
    """What schedulers send to an executor; each case attaches anew."""

    name = "scheduler-messages"

    async def open(self, running: AsyncExitStack) -> Sequence[Case]:
        """Start an executor."""
        worker = FakeWorker(
            block_size_tokens=4, num_device_blocks=12, num_host_blocks=8, max_model_len=24, max_num_seqs=4
        )
        executor = ExecutorProcess(worker)
        await executor.start()
        running.push_async_callback(executor.kill)
        self.channel = await running.enter_async_context(grpc.aio.insecure_channel(executor.address))
        self._stub = execution_grpc.ExecutionServiceStub(self.channel)
        self._attach = execution.AttachRequest(
            scheduler_id="a", lease_ms=10_000, min_wire_version=1, max_wire_version=2, capabilities=list(Capability)
        )
        service, steps = "/octavo.execution.v1.ExecutionService", recorded_steps()
        start = execution.StreamStart(epoch=1, instance_id=worker.info.instance_id)
        stream = [execution.StreamStepsRequest(step=step) for step in steps]
        opened = execution.StreamStepsRequest(start=start)
        return [
            *[called(f"{service}/ExecuteModel", *steps[:length]) for length in range(1, len(steps), 3)],
            *[called(f"{service}/StreamSteps", opened, *stream[:length]) for length in range(1, len(steps), 6)],
            *[called(f"{service}/Attach", self._attach)] * 3,
            called(f"{service}/Heartbeat", execution.HeartbeatRequest(epoch=1)),
            called(f"{service}/Detach", execution.DetachRequest(epoch=1)),
            called(f"{service}/GetBatchTable", execution.GetBatchTableRequest(include_token_ids=True)),
            called(f"{service}/ListRegisteredBlocks", execution.ListRegisteredBlocksRequest(epoch=1)),
        ]

    async def run(self, case: Case) -> None:
        """Attach, and let the epoch of the case be that of now."""
        epoch = (await self._stub.Attach(self._attach)).epoch
        kind = GetMessageClass(method_of(case[0]).input_type)
        await super().run((case[0], *(_with_epoch(kind, content, epoch) for content in case[1:])))


def _with_epoch(kind: type[Message], content: bytes, epoch: int) -> bytes:
    """Return a message whose epoch 1 is another one."""
    try:
        message: Any = kind.FromString(content)
    except DecodeError:
        return content
    has_kind = kind is execution.StreamStepsRequest and message.WhichOneof("message")
    inner = getattr(message, message.WhichOneof("message")) if has_kind else message
    if getattr(inner, "epoch", 0) == 1:
        inner.epoch = epoch
    changed_content: bytes = message.SerializeToString()
    return changed_content


def recorded_steps() -> list[Any]:
    """Return steps with a bit of everything: several outputs, a beam search, swapped blocks."""
    bench = FleetBench(small_limits(blocks=12, host_blocks=8, vocab_size=259))
    for arrival in range(6):
        bench.add(
            group(
                arrival,
                [40 + arrival, 41, 42, 43, 44][: 3 + arrival % 3],
                max_tokens(8),
                num_sequences=2 if arrival == 1 else 1,
                beam_search=BeamSearchParams(2) if arrival == 2 else None,
            )
        )
    steps, [member] = [], bench.members
    while (step := bench.schedule(member, 0.0)) is not None:
        steps.append(encode_step(step, feature_bits=0))
        bench.execute(member, step)
        bench.process(member)
    return steps
