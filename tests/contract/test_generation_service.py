"""What a client of the scheduler meets: every event, every refusal, every way to end."""

import asyncio
import logging
import math
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from tests.support.patience import PATIENCE_S
from tests.support.stack import Stack, collect, readiness, running_stack, token_request, until

A_LONG_TIME = 100_000  # tokens; no test waits for them


async def refusal(stack: Stack, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """Return the error with which the request is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stack, request)
    return caught.value


async def all_blocks_are_free(stack: Stack) -> bool:
    """Return whether the scheduler and, a step later, the executor hold nothing."""
    for _ in range(200):
        state = await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())
        if not state.num_used_blocks and state.last_processed_step_id == state.last_sent_step_id:
            return not stack.executor.worker.table.live.any()
    return False


async def test_deltas_add_up_to_the_finished_output() -> None:
    async with running_stack() as stack:
        answer = await collect(stack, token_request(5, 40))
        assert len(answer.token_ids) == 40
        assert answer.output.finish_reason == generation_pb2.FINISH_REASON_LENGTH
        assert answer.finished is not None
        assert answer.finished.usage.num_prompt_tokens == 5
        assert answer.finished.usage.num_output_tokens == 40
        assert await all_blocks_are_free(stack)


async def test_equal_seeds_give_equal_outputs_whatever_else_runs() -> None:
    async with running_stack() as stack:
        request = token_request(9, 30, temperature=1.0, seed=7)
        alone = await collect(stack, request)
        others = [token_request(4 + i, 25, temperature=1.0, first_id=i) for i in range(6)]
        among, *_ = await asyncio.gather(collect(stack, request), *(collect(stack, other) for other in others))
        assert among.token_ids == alone.token_ids
        other_seed = await collect(stack, token_request(9, 30, temperature=1.0, seed=8))
        assert other_seed.token_ids != alone.token_ids


async def test_logprobs_come_only_when_asked_for() -> None:
    async with running_stack() as stack:
        without, with_logprobs = await asyncio.gather(
            collect(stack, token_request(3, 10, first_id=1)),
            collect(stack, token_request(3, 10, first_id=2, logprobs=0)),
        )
        assert without.logprobs == []
        assert len(with_logprobs.logprobs) == 10
        assert all(math.isfinite(logprob) for logprob in with_logprobs.logprobs)
        assert list(with_logprobs.output.logprobs) == with_logprobs.logprobs


async def test_alternatives_come_with_every_token_and_nobody_else_gets_some() -> None:
    async with running_stack() as stack:
        without, with_alternatives = await asyncio.gather(
            collect(stack, token_request(3, 10, first_id=1, logprobs=0)),
            collect(stack, token_request(3, 10, first_id=2, logprobs=3)),
        )
        assert without.alternative_token_ids == []
        assert len(with_alternatives.alternative_token_ids) == len(with_alternatives.alternative_logprobs) == 30
        # Greedy: the token is the likeliest.
        assert with_alternatives.alternative_token_ids[::3] == with_alternatives.token_ids
        assert with_alternatives.alternative_logprobs[::3] == with_alternatives.logprobs
        assert list(with_alternatives.output.alternative_token_ids) == with_alternatives.alternative_token_ids


async def test_prompt_logprobs_come_once_although_the_prompt_is_cached() -> None:
    async with running_stack(FakeWorker(), max_num_batched_tokens=16) as stack:
        await collect(stack, token_request(100, 2))
        answers = [await collect(stack, token_request(100, 2, prompt_logprobs=2)) for _ in range(2)]
        assert answers[0].prompt_logprobs == answers[1].prompt_logprobs
        assert len(answers[0].prompt_logprobs) == 99
        assert len(answers[0].prompt_alternative_token_ids) == 198
        assert [answer.finished.usage.num_cached_tokens for answer in answers if answer.finished] == [0, 0]
        cached = await collect(stack, token_request(100, 2))
        assert cached.finished is not None
        assert cached.finished.usage.num_cached_tokens > 0
        assert cached.prompt_logprobs == []
        assert not cached.finished.HasField("prompt_logprobs")


async def test_several_outputs_have_the_prompts_logprobs_once() -> None:
    async with running_stack() as stack:
        request = token_request(20, 5, temperature=1.0, n=3, prompt_logprobs=0)
        events = [event async for event in stack.generation.Generate(request)]
        assert sum(len(event.prompt_logprobs.logprobs) for event in events) == 19
        assert len(events[-1].finished.prompt_logprobs.logprobs) == 19


async def test_nothing_ends_an_output_before_min_tokens() -> None:
    async with running_stack(FakeWorker(eos_probability=0.5)) as stack:
        short = await collect(stack, token_request(6, 60))
        assert len(short.token_ids) < 20
        answer = await collect(stack, token_request(6, 60, min_tokens=20))
        assert 20 < len(answer.token_ids) <= 60
        free = await collect(stack, token_request(6, 60, ignore_eos=True, skip_special_tokens=False))
        stop = free.text[3]
        stopped = await collect(stack, token_request(6, 60, ignore_eos=True, stop=[stop], min_tokens=12))
        assert len(stopped.token_ids) >= 12


async def test_words_that_are_banned_do_not_come_with_or_without_a_space() -> None:
    async with running_stack() as stack:
        full = await collect(stack, token_request(6, 40))
        word = full.text[20:23].strip()
        answer = await collect(stack, token_request(6, 40, banned_words=[word]))
        assert word in full.text
        assert word not in answer.text
        assert len(answer.token_ids) == 40


async def test_penalties_biases_and_allowed_tokens_reach_the_executor() -> None:
    async with running_stack() as stack:
        bias = generation_pb2.LogitBias(token_id=90, bias=50)
        biased = await collect(stack, token_request(6, 5, logit_bias=[bias]))
        assert biased.token_ids == [90] * 5
        penalized = await collect(stack, token_request(6, 5, logit_bias=[bias], frequency_penalty=60.0))
        assert penalized.token_ids.count(90) == 1
        allowed = await collect(stack, token_request(6, 20, allowed_token_ids=[65, 66, 67], temperature=1.0))
        assert set(allowed.token_ids) <= {65, 66, 67}
        beams = await collect(stack, token_request(6, 6, beam_width=2, allowed_token_ids=[65, 66, 67]))
        assert set(beams.token_ids) <= {65, 66, 67}


async def test_a_stop_string_ends_the_output_before_it() -> None:
    async with running_stack() as stack:
        full = await collect(stack, token_request(6, 60))
        stop = full.text[20:24]
        answer = await collect(stack, token_request(6, 60, stop=[stop]))
        assert answer.text == full.text[: full.text.index(stop)]
        assert answer.output.stop_string == stop
        assert answer.output.finish_reason == generation_pb2.FINISH_REASON_STOP
        assert full.token_ids[: len(answer.token_ids)] == answer.token_ids
        kept = await collect(stack, token_request(6, 60, stop=[stop], include_stop_str_in_output=True))
        assert kept.text == answer.text + stop
        assert await all_blocks_are_free(stack)


async def test_a_stop_token_ends_the_output_and_stays_in_it() -> None:
    async with running_stack() as stack:
        full = await collect(stack, token_request(6, 40))
        stop_id = full.token_ids[15]
        answer = await collect(stack, token_request(6, 40, stop_token_ids=[stop_id]))
        assert answer.token_ids == full.token_ids[: full.token_ids.index(stop_id) + 1]
        assert answer.output.stop_token_id == stop_id


async def test_eos_ends_the_output_unless_ignored() -> None:
    async with running_stack(FakeWorker(eos_probability=0.2)) as stack:
        answer = await collect(stack, token_request(6, 200))
        assert answer.output.finish_reason == generation_pb2.FINISH_REASON_STOP
        assert answer.output.stop_token_id == answer.token_ids[-1]
        assert "<|im_end|>" not in answer.text
        longer = await collect(stack, token_request(6, 200, ignore_eos=True))
        assert len(longer.token_ids) == 200
        shown = await collect(stack, token_request(6, 200, skip_special_tokens=False))
        assert shown.text.endswith("<|im_end|>")


async def test_64_streams_get_every_token_once_and_leave_nothing_behind() -> None:
    worker = FakeWorker(num_device_blocks=80, max_model_len=512)  # too few blocks for all: sequences are preempted
    async with running_stack(worker, max_num_batched_tokens=256) as stack:
        alone = await collect(stack, token_request(50, 60, first_id=64))
        requests = [token_request(20 + i, 30, first_id=i) for i in range(64)]
        async with stack.together(len(requests)):
            answers = asyncio.gather(*(collect(stack, request) for request in requests))
        assert [len(answer.token_ids) for answer in await answers] == [30] * 64
        again = await collect(stack, token_request(50, 60, first_id=64))
        assert again.token_ids == alone.token_ids
        assert sum(stack.engine.fleet.num_preemptions.values()) > 0
        assert await all_blocks_are_free(stack)


async def test_steps_in_flight_do_not_change_outputs() -> None:
    requests = [token_request(30 + i, 40, first_id=i, temperature=0.7, seed=i) for i in range(12)]
    async with running_stack(steps_in_flight=1) as stack:
        expected = await asyncio.gather(*(collect(stack, request) for request in requests))
    for depth in (1, 4):
        worker = FakeWorker(num_device_blocks=24, max_model_len=384)
        settings: dict[str, Any] = {"max_num_batched_tokens": 256, "check_batch_table": True}
        async with running_stack(worker, steps_in_flight=depth, **settings) as stack:
            async with stack.together(len(requests)):
                running = asyncio.gather(*(collect(stack, request) for request in requests))
            answers = await running
            assert sum(stack.engine.fleet.num_preemptions.values()) > 0, depth
        assert [a.token_ids for a in answers] == [e.token_ids for e in expected], depth
        assert [a.text for a in answers] == [e.text for e in expected], depth


async def test_cancelling_the_call_frees_its_blocks() -> None:
    async with running_stack(FakeWorker(step_ms=1)) as stack:
        call = stack.generation.Generate(token_request(40, 8000))
        await call.read()
        await call.read()
        call.cancel()
        assert await all_blocks_are_free(stack)
        assert not stack.engine.requests


async def test_the_deadline_of_the_call_aborts_the_request() -> None:
    async with running_stack(FakeWorker(step_ms=1)) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stack.generation.Generate(token_request(40, 8000), timeout=0.2):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await all_blocks_are_free(stack)


async def test_abort_ends_a_request_and_is_idempotent() -> None:
    async with running_stack(FakeWorker(step_ms=1)) as stack:
        call = stack.generation.Generate(token_request(40, 8000, request_id="mine"))
        await call.read()
        assert (await stack.generation.Abort(pb.AbortRequest(request_id="mine"))).was_live
        assert not (await stack.generation.Abort(pb.AbortRequest(request_id="mine"))).was_live
        assert not (await stack.generation.Abort(pb.AbortRequest(request_id="never seen"))).was_live
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert await all_blocks_are_free(stack)


async def test_a_live_request_id_is_taken_and_an_ended_one_is_free() -> None:
    async with running_stack(FakeWorker(step_ms=1)) as stack:
        call = stack.generation.Generate(token_request(4, 8000, request_id="same"))
        await call.read()
        error = await refusal(stack, token_request(4, 5, request_id="same"))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert "'same'" in (error.details() or "")
        await stack.generation.Abort(pb.AbortRequest(request_id="same"))
        assert (await collect(stack, token_request(4, 5, request_id="same"))).request_id == "same"


async def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    async with running_stack(FakeWorker(step_ms=1), max_num_seqs=1, max_waiting_requests=1) as stack:
        running = stack.generation.Generate(token_request(4, 8000))
        await running.read()
        await running.read()
        waiting = stack.generation.Generate(token_request(4, 8000, first_id=1))
        await waiting.read()
        error = await refusal(stack, token_request(4, 5, first_id=2))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(error.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() > 0
        running.cancel()
        waiting.cancel()


async def test_a_queue_that_is_full_of_tokens_refuses_more_of_them() -> None:
    async with running_stack(FakeWorker(step_ms=1), max_num_seqs=1, max_waiting_tokens=50) as stack:
        running = stack.generation.Generate(token_request(4, 5000))
        await running.read()
        await running.read()
        long = stack.generation.Generate(token_request(100, 5, first_id=1))  # where nothing waits, any length may
        await long.read()
        error = await refusal(stack, token_request(4, 5, first_id=2))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "the waiting queue is full (1 request with 100 prompt tokens); retry in 1 s"
        running.cancel()
        long.cancel()


async def test_a_prompt_that_makes_too_many_tokens_wait_is_refused_and_a_short_one_is_not() -> None:
    async with running_stack(FakeWorker(step_ms=1), max_num_seqs=1, max_waiting_tokens=50) as stack:
        running = stack.generation.Generate(token_request(4, 5000))
        await running.read()
        await running.read()
        waiting = stack.generation.Generate(token_request(30, 5, first_id=1))
        await waiting.read()
        error = await refusal(stack, token_request(21, 5, first_id=2))
        assert error.details() == "the waiting queue is full (1 request with 30 prompt tokens); retry in 1 s"
        short = stack.generation.Generate(token_request(20, 5, first_id=3))
        accepted = await short.read()
        assert isinstance(accepted, pb.GenerateResponse)
        assert accepted.accepted.num_prompt_tokens == 20
        for call in (running, waiting, short):
            call.cancel()


async def test_draining_refuses_new_requests_and_finishes_live_ones() -> None:
    async with running_stack(FakeWorker(step_ms=1)) as stack:
        live = asyncio.create_task(collect(stack, token_request(4, 200)))
        await until(lambda: stack.engine.requests)
        drained = await stack.admin.Drain(admin.DrainRequest())
        while await readiness(stack) != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.001)
        assert drained.num_live_requests == 1
        error = await refusal(stack, token_request(4, 5))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "drain" in (error.details() or "")
        assert len((await live).token_ids) == 200


async def test_admin_shows_the_request_its_blocks_and_the_step() -> None:
    async with running_stack(FakeWorker(step_ms=1)) as stack:
        call = stack.generation.Generate(token_request(40, 8000, request_id="seen"))
        await call.read()
        await call.read()
        state = (await stack.admin.GetRequest(admin.GetRequestRequest(request_id="seen"))).request
        assert state.status == admin_pb2.REQUEST_STATUS_RUNNING
        assert state.num_prompt_tokens == 40
        assert len(state.block_table) >= 3
        listed = await stack.admin.ListRequests(admin.ListRequestsRequest())
        assert [request.request_id for request in listed.requests] == ["seen"]
        step = (await stack.admin.GetStep(admin.GetStepRequest(step_id=1))).step
        assert [(c.slot, c.start, c.num_tokens) for c in step.prefill_chunks] == [(state.slot, 0, 40)]
        with pytest.raises(grpc.aio.AioRpcError, match="is not kept; steps 1 to"):
            await stack.admin.GetStep(admin.GetStepRequest(step_id=10**9))
        with pytest.raises(grpc.aio.AioRpcError, match="no live request"):
            await stack.admin.GetRequest(admin.GetRequestRequest(request_id="unseen"))
        call.cancel()


async def test_pages_of_requests_cover_all_of_them_once() -> None:
    async with running_stack(FakeWorker(step_ms=1)) as stack:
        names = [f"request-{i}" for i in range(5)]
        requests = [token_request(4, 8000, request_id=name, first_id=i) for i, name in enumerate(names)]
        calls = [stack.generation.Generate(request) for request in requests]
        for call in calls:
            await call.read()
        seen: list[str] = []
        token = ""
        while True:
            page = await stack.admin.ListRequests(admin.ListRequestsRequest(page_size=2, page_token=token))
            seen += [request.request_id for request in page.requests]
            token = page.next_page_token
            if not token:
                break
        assert sorted(seen) == names
        for wrong in ("x", "-1", "\u0663", "9" * 5000):  # the third is a digit, but not one of ours
            with pytest.raises(grpc.aio.AioRpcError, match="page_token is") as caught:
                await stack.admin.ListRequests(admin.ListRequestsRequest(page_token=wrong))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for call in calls:
            call.cancel()


# One of each step of the checks; their units have the other rows.
BAD_REQUESTS = {
    "empty text": (pb.GenerateRequest(text=""), "text", "at least 1 token"),
    "no messages": (pb.GenerateRequest(messages=pb.ChatMessages()), "messages", "at least 1 message"),
    "text that no tokens could hold": (
        pb.GenerateRequest(text="x" * 10_000),
        "prompt is too long: it has 10000 characters",
        "256 tokens",
    ),
    "messages that no tokens could hold": (
        pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x" * 10_000)])),
        "it has 10004 characters",
        "256 tokens",
    ),
    "prompt beyond the model": (token_request(256, 4), "it has 256 tokens", "is 256 tokens, and one is reserved"),
    "token beyond the vocabulary": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 99999])),
        "token id 99999",
        "ids from 0 to 258",
    ),
    "temperature NaN": (token_request(4, 4, temperature=math.nan), "temperature is nan", "from 0 to 100"),
    "n above the slots": (token_request(4, 4, n=100_000), "sampling_params.n is 100000", "max_num_seqs"),
    "beam_width above the limit": (token_request(4, 4, beam_width=17), "beam_width is 17", "from 2 to 16"),
    "banned_words": (token_request(4, 4, banned_words=["a" * 17]), "word of 17 ", "words of 1 to 16"),
    "grammar": (token_request(4, 4, grammar=generation_pb2.Grammar()), "grammar is empty", "one of json_schema, regex"),
    "grammar.json_schema": (
        token_request(4, 4, grammar=generation_pb2.Grammar(json_schema='{"items": {"uniqueItems": true}}')),
        'a schema with "uniqueItems" at #/items',
        "one without it",
    ),
    "grammar of beams": (
        token_request(4, 4, beam_width=2, grammar=generation_pb2.Grammar(regex="a")),
        "sampling_params.grammar.regex is set",
        "unset with beam_width",
    ),
    "lora_adapter": (pb.GenerateRequest(text="a", lora_adapter="x"), "lora_adapter is x", "no adapter is loaded"),
}


async def test_bad_requests_are_refused_by_name_and_harm_nobody() -> None:
    worker = FakeWorker(num_device_blocks=64, max_model_len=256, step_ms=0.5)
    async with running_stack(worker) as stack:
        neighbour = asyncio.create_task(collect(stack, token_request(10, 200)))
        for name, (request, *parts) in BAD_REQUESTS.items():
            error = await refusal(stack, request)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            for part in parts:
                assert part in (error.details() or ""), name
        assert len((await neighbour).token_ids) == 200
        assert await all_blocks_are_free(stack)


async def test_a_refusal_names_the_field_for_programs_too() -> None:
    async with running_stack() as stack:
        error = await refusal(stack, token_request(4, 4, top_p=2.0))
        trailing = dict(error.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        bad = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(bad)
        assert bad.field_violations[0].field == "sampling_params.top_p"


async def test_a_prompt_longer_than_the_pool_is_refused_with_the_pools_size() -> None:
    async with running_stack(FakeWorker(num_device_blocks=4, max_model_len=4096)) as stack:
        error = await refusal(stack, token_request(64, 4))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "it has 64 tokens; this model's maximum context length is 64 tokens" in (error.details() or "")
        assert "KV cache" in (error.details() or "")
        answer = await collect(stack, token_request(60, 1000))  # fits, and ends where the pool ends
        assert len(answer.token_ids) == 4
        assert answer.output.finish_reason == generation_pb2.FINISH_REASON_LENGTH


async def test_an_oversized_message_is_refused() -> None:
    async with running_stack(FakeWorker(max_model_len=2048), max_request_bytes=2**16) as stack:
        error = await refusal(stack, pb.GenerateRequest(text="x" * 2**17))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len((await collect(stack, token_request(4, 4))).token_ids) == 4


# The pace of a stream -----------------------------------------------------------------------------------


async def deltas_of(stack: Stack, request: pb.GenerateRequest) -> list[tuple[float, list[int]]]:
    """Return when each delta came, in seconds since the first event, and its tokens."""
    found, begin_s = [], 0.0
    async for event in stack.generation.Generate(request):
        begin_s = begin_s or time.perf_counter()
        if event.HasField("delta"):
            found.append((time.perf_counter() - begin_s, list(event.delta.token_ids)))
    return found


def tokens_of(deltas: list[tuple[float, list[int]]]) -> list[int]:
    return [token_id for _, token_ids in deltas for token_id in token_ids]


async def test_deltas_come_no_faster_than_a_request_says_and_the_first_and_the_end_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_svc.front.api.request_validation.MAX_DELTA_INTERVAL_MS", 3_600_000)
    async with running_stack(FakeWorker(step_ms=2)) as stack:
        request = token_request(4, 60)
        plain = await deltas_of(stack, request)
        request.min_delta_interval_ms = 3_600_000
        async with asyncio.timeout(PATIENCE_S):  # the end does not wait
            paced = await deltas_of(stack, request)
        assert [len(token_ids) for _, token_ids in paced][1:] == [60 - len(paced[0][1])]
        assert len(plain) > 10
        assert tokens_of(paced) == tokens_of(plain)


async def test_a_front_that_falls_behind_sends_fewer_and_larger_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stack(FakeWorker(step_ms=2)) as stack:
        plain = await deltas_of(stack, token_request(4, 60))
        stack.front.pace.rest_s = 0.1
        monkeypatch.setattr(stack.front.pace, "note", lambda lag_s: None)  # it would see that the loop has time
        rested = await deltas_of(stack, token_request(4, 60))
        assert len(rested) < len(plain) / 2
        assert tokens_of(rested) == tokens_of(plain)


async def test_an_interval_that_is_too_long_is_refused() -> None:
    async with running_stack() as stack:
        request = token_request(4, 3)
        request.min_delta_interval_ms = 10_001
        error = await refusal(stack, request)
        assert error.details() == "min_delta_interval_ms is 10001; it must be at most 10000"


async def test_no_prompt_and_no_answer_is_in_the_log_or_in_the_metrics(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "scheduler_svc")
    async with running_stack() as stack:
        params = generation_pb2.SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        answer = await collect(stack, pb.GenerateRequest(text="xylophone", sampling_params=params))
        told = caplog.text + repr(stack.service._metrics())
    assert len(answer.text) > 10
    assert "request_ended" in told
    assert "octavo_" in told
    assert [text for text in ("xylophone", answer.text) if text in told or repr(text)[1:-1] in told] == []
