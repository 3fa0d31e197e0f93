"""A gateway's side of `vllm.grpc.engine.VllmEngine`, for tests of the scheduler's side."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from executor_svc.worker.interface import Worker
from tests.support.stack import Stack, running_stack, until

PROMPT = list(range(97, 117))


@dataclass(slots=True)
class GatewayStack:
    """A running scheduler with --vllm-engine, and the stub of it."""

    stack: Stack
    stub: "vllm_engine_pb2_grpc.VllmEngineStub"


@dataclass(slots=True)
class EngineAnswer:
    """All that one call brought, by output index; `order` has the kind and the index of each response."""

    chunks: dict[int, list[pb.GenerateStreamChunk]] = field(default_factory=dict)
    completes: dict[int, pb.GenerateComplete] = field(default_factory=dict)
    order: list[tuple[str, int]] = field(default_factory=list)

    def streamed(self, index: int = 0) -> list[int]:
        """The tokens of the chunks."""
        return [token_id for chunk in self.chunks.get(index, []) for token_id in chunk.token_ids]

    def token_ids(self, index: int = 0) -> list[int]:
        """The tokens of the last response."""
        return list(self.completes[index].output_ids)


@asynccontextmanager
async def running_gateway_stack(*workers: Worker | None, **settings: Any) -> AsyncIterator[GatewayStack]:
    """Run the scheduler with --vllm-engine and an executor for each worker; none or None: a fake one."""
    async with (
        running_stack(*workers, vllm_engine=True, **settings) as stack,
        grpc.aio.insecure_channel(stack.address) as channel,
    ):
        yield GatewayStack(stack, vllm_engine_pb2_grpc.VllmEngineStub(channel))  # type: ignore[no-untyped-call]


def engine_request(
    *,
    request_id: str = "chatcmpl-1",
    stream: bool = False,
    prompt: list[int] | None = None,
    max_tokens: int | None = 12,
    **params: object,
) -> pb.GenerateRequest:
    """Return a request with what SMG 1.13.0 sends for a chat without options; greedy unless told."""
    values = {
        "temperature": 0.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "n": 1,
        **params,
    }
    sampling = pb.SamplingParams(**values)  # type: ignore[arg-type]
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    tokenized = pb.TokenizedInput(original_text="a text", input_ids=PROMPT if prompt is None else prompt)
    return pb.GenerateRequest(request_id=request_id, tokenized=tokenized, sampling_params=sampling, stream=stream)


def sampled(**params: object) -> pb.GenerateRequest:
    """Return a request at the model's own temperature."""
    request = engine_request(**{"seed": 7, **params})  # type: ignore[arg-type]
    request.sampling_params.ClearField("temperature")
    return request


async def ask(gateway: GatewayStack, request: pb.GenerateRequest) -> EngineAnswer:
    """Run a request to its end and check what holds for every answer."""
    answer = EngineAnswer()
    async for response in gateway.stub.Generate(request):
        kind = response.WhichOneof("response")
        message = response.chunk if kind == "chunk" else response.complete
        answer.order.append((kind, message.index))
        assert message.index not in answer.completes, "something came after the end of an output"
        assert message.prompt_tokens == len(request.tokenized.input_ids)
        if kind == "complete":
            answer.completes[message.index] = message
            assert message.completion_tokens == len(message.output_ids)
        else:
            answer.chunks.setdefault(message.index, []).append(message)
            assert message.token_ids, "a chunk says nothing"
            assert message.completion_tokens == len(answer.streamed(message.index)), "the count is not cumulative"
    assert sorted(answer.completes) == list(range(max(1, request.sampling_params.n)))
    for index in answer.completes:
        assert answer.streamed(index) == (answer.token_ids(index) if request.stream else [])
    return answer


async def first_chunk(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> None:
    """Read the first response of a streamed call."""
    response = await call.read()
    assert isinstance(response, pb.GenerateResponse)
    assert response.HasField("chunk")


async def no_live_request(stack: Stack) -> None:
    """Return once no request is live."""
    await until(lambda: not stack.engine.requests)
