"""VllmEngine on the scheduler's port: Generate and Abort as a gateway meets them."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from executor_svc.fake.tokenizer import EOS_TOKEN_ID
from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_pb2, generation_service_pb2
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api.vllm_engine.servicer import VllmEngineServicer
from tests.support.stack import collect, until
from tests.support.vllm_engine import (
    PROMPT,
    ask,
    engine_request,
    first_chunk,
    no_live_request,
    running_gateway_stack,
    sampled,
)

NUM_TOKENS = 12
ENDLESS = 4000


def octavo_request(**params: int) -> generation_service_pb2.GenerateRequest:
    return generation_service_pb2.GenerateRequest(
        token_ids=generation_service_pb2.TokenIds(ids=PROMPT),
        sampling_params=generation_pb2.SamplingParams(temperature=0.0, **params),  # type: ignore[arg-type]
    )


# Generate ----------------------------------------------------------------------------------------


async def test_an_answer_in_one_piece_and_a_streamed_one_are_those_of_generation_service() -> None:
    async with running_gateway_stack() as gateway:
        octavo = await collect(
            gateway.stack,
            octavo_request(max_tokens=NUM_TOKENS),
        )
        whole = await ask(gateway, engine_request())
        streamed = await ask(gateway, engine_request(stream=True))
    assert whole.token_ids() == streamed.token_ids() == octavo.token_ids
    assert whole.order == [("complete", 0)]
    assert len(streamed.chunks[0]) > 1
    assert whole.completes[0].finish_reason == streamed.completes[0].finish_reason == "length"
    assert not whole.completes[0].HasField("matched_stop_str")


async def test_a_prompt_of_text_is_tokenized() -> None:
    async with running_gateway_stack() as gateway:
        of_ids = await ask(gateway, engine_request(prompt=list(b"Hello")))
        request = engine_request()
        request.text = "Hello"
        [response] = [response async for response in gateway.stub.Generate(request)]
    assert list(response.complete.output_ids) == of_ids.token_ids()
    assert response.complete.prompt_tokens == 5


async def test_the_prefix_cache_shows_in_the_usage() -> None:
    async with running_gateway_stack() as gateway:
        prompt = [65 + index % 20 for index in range(100)]
        assert (await ask(gateway, engine_request(prompt=prompt))).completes[0].cached_tokens == 0
        assert (await ask(gateway, engine_request(prompt=prompt))).completes[0].cached_tokens == 96


async def test_equal_seeds_give_equal_outputs_and_others_do_not() -> None:
    async with running_gateway_stack() as gateway:
        answers = [await ask(gateway, sampled(seed=seed)) for seed in (7, 7, 8, -7, 2**31 - 1)]
    outputs = [tuple(answer.token_ids()) for answer in answers]
    assert outputs[0] == outputs[1]
    assert len(set(outputs)) == 4


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_several_outputs_come_by_index_and_differ(is_streamed: bool) -> None:
    async with running_gateway_stack() as gateway:
        single = await ask(gateway, sampled())
        several = await ask(gateway, sampled(n=3, stream=is_streamed))
    assert several.token_ids(0) == single.token_ids()
    assert len({tuple(several.token_ids(index)) for index in range(3)}) == 3


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_several_greedy_outputs_are_equal(is_streamed: bool) -> None:
    async with running_gateway_stack() as gateway:
        single = await ask(gateway, engine_request(logprobs=2))
        several = await ask(gateway, engine_request(n=3, stream=is_streamed, logprobs=2))
    for index in range(3):
        assert several.token_ids(index) == single.token_ids()
        assert several.completes[index].output_logprobs == single.completes[0].output_logprobs


async def test_an_output_ends_early_at_a_stop_string() -> None:
    async with running_gateway_stack() as gateway:
        free = await ask(gateway, engine_request(max_tokens=40))
        text = bytes(token_id for token_id in free.token_ids()).decode()
        stop = text[10:12]
        stopped = await ask(gateway, engine_request(max_tokens=40, stop=[stop], stream=True))
    complete = stopped.completes[0]
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)
    assert bytes(stopped.token_ids()).decode() == text[: text.index(stop) + len(stop)]


async def test_a_stop_token_is_named_and_an_end_of_sequence_token_is_not() -> None:
    async with running_gateway_stack(FakeWorker(eos_probability=0.2)) as gateway:
        ended = await ask(gateway, engine_request(max_tokens=None))
        assert ended.token_ids()[-1] == EOS_TOKEN_ID
        stopped = await ask(gateway, engine_request(stop_token_ids=[ended.token_ids()[0]]))
    assert ended.completes[0].finish_reason == stopped.completes[0].finish_reason == "stop"
    assert ended.completes[0].WhichOneof("matched_stop") is None
    assert stopped.completes[0].matched_token_id == stopped.token_ids()[-1] == ended.token_ids()[0]


async def test_log_probabilities_come_for_each_token_with_the_likeliest_in_its_place() -> None:
    async with running_gateway_stack() as gateway:
        whole = (await ask(gateway, engine_request(logprobs=3))).completes[0].output_logprobs
        streamed = await ask(gateway, engine_request(logprobs=3, stream=True))
        plain = (await ask(gateway, engine_request(logprobs=0))).completes[0].output_logprobs
    assert len(whole.token_logprobs) == len(whole.token_ids) == len(whole.top_logprobs) == NUM_TOKENS
    for token_id, logprob, top in zip(whole.token_ids, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert (top.token_ids[0], top.values[0]) == (token_id, logprob), "a greedy token is the likeliest"
        assert list(top.values) == sorted(top.values, reverse=True)
        assert len(top.values) == 3
    chunks = [chunk.output_logprobs for chunk in streamed.chunks[0]]
    assert [logprob for chunk in chunks for logprob in chunk.token_logprobs] == list(whole.token_logprobs)
    assert [top for chunk in chunks for top in chunk.top_logprobs] == list(whole.top_logprobs)
    assert list(plain.token_logprobs) == list(whole.token_logprobs)
    assert not plain.top_logprobs


async def test_log_probabilities_of_the_prompt_come_with_the_first_chunk_and_with_the_end() -> None:
    async with running_gateway_stack() as gateway:
        answer = await ask(gateway, engine_request(prompt_logprobs=2, stream=True))
        octavo = await collect(
            gateway.stack,
            octavo_request(max_tokens=1, prompt_logprobs=2),
        )
    prompt = answer.chunks[0][0].input_logprobs
    assert prompt == answer.completes[0].input_logprobs
    assert [chunk.HasField("input_logprobs") for chunk in answer.chunks[0][1:]] == [False] * len(answer.chunks[0][1:])
    assert list(prompt.token_ids) == PROMPT
    assert not prompt.token_logprobs[0].HasField("value")
    assert [logprob.value for logprob in prompt.token_logprobs[1:]] == octavo.prompt_logprobs
    assert not prompt.top_logprobs[0].token_ids
    tops = [token_id for top in prompt.top_logprobs for token_id in top.token_ids]
    assert tops == octavo.prompt_alternative_token_ids


async def test_requests_run_as_the_gateways_tenant() -> None:
    async with running_gateway_stack(tenant_weights=("web=2", "batch=1"), gateway_tenant="web") as gateway:
        call = gateway.stub.Generate(engine_request(max_tokens=ENDLESS, stream=True))
        await first_chunk(call)
        [request] = gateway.stack.engine.requests.values()
        assert request.group.tenant == "web"
        call.cancel()
        await no_live_request(gateway.stack)


async def test_errors_of_generation_service_have_its_statuses() -> None:
    async with running_gateway_stack(max_waiting_requests=1, max_num_seqs=1) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as too_long:
            await ask(gateway, engine_request(prompt=[65] * 9000))
        running = gateway.stub.Generate(engine_request(request_id="a", max_tokens=ENDLESS, stream=True))
        await first_chunk(running)
        with pytest.raises(grpc.aio.AioRpcError) as exists:
            await ask(gateway, engine_request(request_id="a"))
        waiting = asyncio.create_task(ask(gateway, engine_request(request_id="b", prompt=[66, 67])))
        await until(lambda: gateway.stack.engine.waiting.num_waiting)
        with pytest.raises(grpc.aio.AioRpcError) as full:
            await ask(gateway, engine_request(request_id="c"))
        running.cancel()
        await waiting
    assert too_long.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt is too long: it has 9000 tokens; this model's maximum context length is 8192" in str(
        too_long.value.details()
    )
    assert exists.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# Abort -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_aborted_request_ends_with_what_there_is(is_streamed: bool) -> None:
    async with running_gateway_stack(FakeWorker(step_ms=1)) as gateway:
        request = sampled(n=2, max_tokens=ENDLESS, stream=is_streamed)
        answer = asyncio.create_task(ask(gateway, request))
        await until(lambda: any(live.num_output_tokens > 8 for live in gateway.stack.engine.requests.values()))
        await gateway.stub.Abort(pb.AbortRequest(request_ids=[request.request_id]))
        completes = (await answer).completes
        assert not gateway.stack.engine.requests
    for index in range(2):
        assert completes[index].finish_reason == "abort"
        assert 0 < completes[index].completion_tokens < ENDLESS


async def test_abort_accepts_unknown_and_finished_ids_and_says_the_same_twice() -> None:
    async with running_gateway_stack() as gateway:
        await ask(gateway, engine_request(request_id="done"))
        for _ in range(2):
            await gateway.stub.Abort(pb.AbortRequest(request_ids=["done", "never"]))
        await gateway.stub.Abort(pb.AbortRequest())
        assert (await ask(gateway, engine_request(request_id="done"))).completes[0].finish_reason == "length"


async def test_abort_skips_empty_ids() -> None:
    async with running_gateway_stack(FakeWorker(step_ms=1)) as gateway:
        answer = asyncio.create_task(ask(gateway, engine_request(request_id="b", max_tokens=ENDLESS)))
        await until(lambda: gateway.stack.engine.requests)
        await gateway.stub.Abort(pb.AbortRequest(request_ids=["", "b"]))
        assert (await answer).completes[0].finish_reason == "abort"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_abort_while_the_end_is_written_adds_no_other_end(is_streamed: bool) -> None:
    async with running_gateway_stack() as gateway:
        servicer = VllmEngineServicer(gateway.stack.front.generation, "")
        reasons = []
        body = RequestBody(engine_request(stream=is_streamed).SerializeToString(), pb.GenerateRequest)
        async for response in servicer.Generate(body, cast("Any", SimpleNamespace(time_remaining=lambda: None))):
            if response.HasField("complete"):
                reasons.append(response.complete.finish_reason)
                await servicer.Abort(pb.AbortRequest(request_ids=["chatcmpl-1"]), cast("Any", None))
    assert reasons == ["length"]


async def test_an_abort_while_the_prompt_is_checked_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    checking, may_go_on = asyncio.Event(), asyncio.Event()
    to_thread = asyncio.to_thread

    async def slow(*args: object) -> object:
        checking.set()
        await may_go_on.wait()
        return await to_thread(*args)  # type: ignore[arg-type]

    async with running_gateway_stack() as gateway:
        monkeypatch.setattr("scheduler_svc.front.api.generation.asyncio.to_thread", slow)
        answer = asyncio.create_task(ask(gateway, engine_request(max_tokens=ENDLESS)))
        await checking.wait()
        await gateway.stub.Abort(pb.AbortRequest(request_ids=["chatcmpl-1"]))
        may_go_on.set()
        complete = (await answer).completes[0]
        assert (complete.finish_reason, complete.completion_tokens) == ("abort", 0)
        assert not gateway.stack.engine.requests


async def test_a_cancelled_call_ends_its_request() -> None:
    async with running_gateway_stack(FakeWorker(step_ms=1)) as gateway:
        call = gateway.stub.Generate(engine_request(max_tokens=ENDLESS, stream=True))
        await first_chunk(call)
        call.cancel()
        await no_live_request(gateway.stack)
        await ask(gateway, engine_request())  # its id is free again
