"""Fronts on a core: sessions, numbers, ends that both sides find, nonsense, and a front that is slow."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf, nan
from typing import Any
from unittest.mock import Mock

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.admin.v1.admin_pb2 import FrontState
from octavo.client import Client
from octavo.core.v1 import core_service_pb2 as pb
from octavo.core.v1 import core_service_pb2_grpc as pb_grpc
from octavo.errors import RequestAbortedError
from octavo.execution.v1 import step_pb2
from octavo.execution.v1.sampling_params_pb2 import SamplingParams
from octavo.generation.v1 import generation_service_pb2 as generation
from octavo.generation.v1 import generation_service_pb2_grpc as generation_pb2_grpc
from octavo.values.outputs import Accepted, Event, Finished
from octavo_shared.errors import FencedError
from octavo_shared.errors import UnavailableError as UnavailableOfServiceError
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.engine.engine import Engine
from scheduler_svc.link import absence, engine_servicer, engine_stream, front_session, remote_engine
from scheduler_svc.link.early_aborts import EarlyAborts
from scheduler_svc.link.engine_servicer import STATE_INTERVAL_S, EngineServicer, engine_state
from scheduler_svc.link.engine_stream import EngineStream, fetch_tokenizer
from scheduler_svc.link.front_session import AnswerBatch, FrontSession
from scheduler_svc.link.messages import encode_submission
from scheduler_svc.link.remote_engine import RemoteEngine
from scheduler_svc.processes.service import SchedulerService
from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.continuation_message import encode_continuation
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.parameters import StopConditions
from tests.support.fronts import fronts_in_this_process
from tests.support.patience import PATIENCE_S
from tests.support.stack import ExecutorProcess, Stack, collect, running_stack, token_request, until


@dataclass(slots=True)
class RawFront:
    """A front in the hands of a test."""

    call: Any
    model_hash: str = ""
    max_model_len: int = 0

    async def say(self, **fields: Any) -> None:
        await self.call.write(pb.JoinRequest(**fields))

    async def submit(self, number: int, *, max_tokens: int = 4, **fields: Any) -> None:
        prompt = np.array([40 + number, 41, 42], np.int32)
        request = EngineRequest(
            f"r{number}", prompt, SamplingRow(), StopConditions(max_tokens, **fields.pop("ends", {}))
        )
        message = encode_submission(number, request, self.model_hash, self.max_model_len)
        message.MergeFrom(pb.Submission(**fields))
        await self.say(submissions=[message])

    async def until(self, wanted: str) -> pb.JoinResponse:
        """Return all that came up to the first message that has a field, as one."""
        found = pb.JoinResponse()
        while wanted not in {field.name for field, _ in found.ListFields()}:
            response = await self.call.read()
            assert response is not grpc.aio.EOF, await self.call.details()
            found.MergeFrom(response)
        return found


@asynccontextmanager
async def joined(
    stack: Stack,
    *,
    front_id: str = "raw",
    session: int = 1,
    num_credits: int = 1000,
    versions: tuple[int, int] = (1, 1),
    over_tcp: bool = False,
) -> AsyncIterator[RawFront]:
    """Join the core of a stack."""
    assert stack.fronts is not None
    link = stack.service.other_addresses["fronts"] if over_tcp else stack.fronts.link
    async with grpc.aio.insecure_channel(link) as channel:
        front = RawFront(pb_grpc.CoreServiceStub(channel).Join())
        hello = pb.FrontHello(min_version=versions[0], max_version=versions[1], front_id=front_id, session=session)
        await front.say(hello=hello, credits=num_credits)
        yield front
        front.call.cancel()


@asynccontextmanager
async def welcomed(stack: Stack, **fields: Any) -> AsyncIterator[RawFront]:
    """Join, and know what is served."""
    async with joined(stack, **fields) as front:
        state = (await front.until("state")).state
        front.model_hash, front.max_model_len = state.model.info.model_hash, state.model.max_model_len
        yield front


async def status(front: RawFront) -> tuple[grpc.StatusCode, str]:
    """Return what the stream ends with, behind all messages."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await front.call.read() is not grpc.aio.EOF:
            pass
    return await front.call.code(), await front.call.details()


async def test_tokens_come_with_their_places_and_the_end_with_its_counts() -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack) as front:
        await front.submit(1, max_tokens=5)
        found = await front.until("ended")
        assert list(found.accepted) == [1]
        assert list(found.tokens.positions) == [0, 1, 2, 3, 4]
        assert set(found.tokens.numbers) == {1}
        assert [(end.num_tokens, end.reason) for end in found.output_ends] == [(5, pb.END_REASON_LENGTH)]
        [ended] = found.ended
        assert (ended.ended.num_prompt_tokens, ended.ended.num_output_tokens) == (3, 5)
        assert not ended.HasField("failure")


async def test_what_a_front_cannot_have_is_refused_and_others_go_on() -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack) as front:
        await front.submit(1, max_tokens=10_000)
        await front.until("accepted")
        await front.submit(2, request_id="r1")
        await front.submit(3, model_hash="another")
        found = await front.until("ended")
        while len(found.ended) < 2:
            found.MergeFrom(await front.until("ended"))
        assert {end.number: end.failure.kind for end in found.ended} == {2: "RequestExistsError", 3: "UnavailableError"}
        assert ("", "r1") in stack.engine.requests


async def test_what_a_front_has_waits_for_an_executor_as_orphans_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core and executor go; the next core comes soon, the executor later than a core may be away."""
    monkeypatch.setattr(absence, "LIMIT_S", 0.3)
    executor = ExecutorProcess(FakeWorker(step_ms=2))
    await executor.start()
    config = SchedulerConfig(
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        executor=(executor.address,),
        fronts=1,
        orphan_timeout_s=60.0,
        shutdown_grace_s=0.5,
    )
    async with fronts_in_this_process(config) as fronts, contextlib.AsyncExitStack() as stack:
        assert fronts is not None

        async def start_engine() -> SchedulerService:
            core = SchedulerService(fronts.config, fronts.link)
            await core.start()
            stack.push_async_callback(core.stop, "the test ends")
            return core

        first = await start_engine()
        client = await stack.enter_async_context(Client(fronts.config.listen, resume_timeout_s=0))
        await client.wait_until_ready()
        events = stream_of(client, "kept"), stream_of(client, "aborted")
        whole = await client.generate([60, 61], max_tokens=200, temperature=0.0)
        for event in events:
            assert isinstance(await anext(event), Accepted)
        await executor.kill()
        await first._end_tasks()
        await first._ports.stop(0)
        second = await start_engine()
        assert second.link is not None
        link = second.link
        await until(lambda: link.sessions)
        await asyncio.sleep(0.5)
        assert await client.abort("aborted"), "it waits at the front"
        with pytest.raises(RequestAbortedError):
            async for _ in events[1]:
                pass
        executor = ExecutorProcess(FakeWorker(step_ms=2), listen=executor.address)
        await executor.start()
        stack.push_async_callback(executor.kill)
        *_, finished = [event async for event in events[0]]
    assert isinstance(finished, Finished)
    assert finished.outputs == whole.outputs


def stream_of(client: Client, request_id: str) -> AsyncIterator[Event]:
    """Begin an answer of 200 tokens."""
    return client.stream([60, 61], request_id=request_id, max_tokens=200, temperature=0.0)


async def test_what_a_core_before_had_queued_waits_for_an_executor_and_what_is_new_does_not() -> None:
    """The executor may go between the word that there is one and the requests that a front sends on it."""
    async with running_stack(fronts=1, orphan_timeout_s=1000.0) as stack, welcomed(stack) as front:
        await stack.executor.kill()
        await until(lambda: not stack.engine.fleet.planners)
        await front.submit(1)
        [ended] = (await front.until("ended")).ended
        assert (ended.number, ended.failure.kind) == (1, "NoExecutorError")
        await front.submit(2, was_queued=True)
        await until(lambda: ("", "r2") in stack.engine.requests)
        await stack.executor.start()
        [ended] = (await front.until("ended")).ended
        assert (ended.number, ended.ended.num_output_tokens) == (2, 4)


async def test_what_a_core_before_had_queued_waits_for_a_larger_executor_and_what_is_new_does_not() -> None:
    small = FakeWorker(num_device_blocks=12)
    async with running_stack(small, fronts=1, orphan_timeout_s=1000.0) as stack, welcomed(stack) as front:
        front.max_model_len = 400  # as it was served when the front checked them
        await front.submit(1, max_tokens=300)
        [ended] = (await front.until("ended")).ended
        assert (ended.number, ended.failure.kind) == (1, "CacheTooSmallError")
        await front.submit(2, max_tokens=300, was_queued=True)
        await until(lambda: ("", "r2") in stack.engine.requests)
        await stack.executor.kill()
        stack.executor.worker = FakeWorker()
        await stack.executor.start()
        [ended] = (await front.until("ended")).ended
        assert (ended.number, ended.ended.num_output_tokens) == (2, 300)


async def test_an_output_ends_where_its_front_says_and_the_request_when_it_has_said_it() -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack) as front:
        await front.submit(1, max_tokens=6, has_stop_strings=True)
        found = await front.until("output_ends")
        assert [end.num_tokens for end in found.output_ends] == [6]
        assert stack.engine.requests, "it waits for the front"
        await front.say(output_ends=[pb.OutputEnd(number=1, num_tokens=4, reason=pb.END_REASON_STOP)])
        [ended] = (await front.until("ended")).ended
        assert (ended.ended.num_output_tokens, ended.ended.reason) == (4, pb.END_REASON_STOP)


async def test_a_front_ends_its_own_requests_and_by_name_those_of_others() -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack) as front, Client(stack.address) as client:
        await front.submit(1, max_tokens=10_000)
        await front.until("tokens")
        failure = pb.Failure(kind="RequestAbortedError", message="the client left")
        await front.say(aborts=[pb.RequestAbort(number=1, failure=failure), pb.RequestAbort(number=9)])
        [ended] = (await front.until("ended")).ended
        assert (ended.failure.kind, ended.failure.message) == ("RequestAbortedError", "the client left")
        other = asyncio.create_task(collect(stack, token_request(4, 10_000, request_id="other")))
        await until(lambda: ("", "other") in stack.engine.requests)
        calls = [(1, "other", "red"), (2, "other", ""), (3, "nobody", None)]
        await front.say(abort_calls=[pb.AbortCall(call=call, request_id=name, tenant=of) for call, name, of in calls])
        answers = (await front.until("abort_answers")).abort_answers
        assert {answer.call: answer.was_live for answer in answers} == {1: False, 2: True, 3: False}
        with pytest.raises(grpc.aio.AioRpcError):
            await other
        assert not await client.abort("other")


async def test_an_abort_and_credits_in_the_message_of_a_submission_count() -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack) as front:
        request = EngineRequest("r1", np.array([40, 41], np.int32), SamplingRow(), StopConditions(10_000))
        failure = pb.Failure(kind="RequestAbortedError", message="the client left")
        await front.say(
            submissions=[encode_submission(1, request, front.model_hash, front.max_model_len)],
            aborts=[pb.RequestAbort(number=1, failure=failure)],
            credits=1_000_000,
        )
        [ended] = (await front.until("ended")).ended
        assert ended.failure.message == "the client left"
        assert not stack.engine.requests
        link = stack.service.link
        assert link is not None
        await until(lambda: max(session.num_credits for session in link.sessions) > 900_000)


async def test_an_abort_that_comes_before_its_request_ends_it_and_no_later_one_of_the_same_id() -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack) as front:
        await front.say(abort_calls=[pb.AbortCall(call=1, request_id="r1", tenant="")])
        assert not (await front.until("abort_answers")).abort_answers[0].was_live
        await front.submit(1, received_before_us=60_000_000)
        [ended] = (await front.until("ended")).ended
        assert (ended.failure.kind, ended.failure.message) == ("RequestAbortedError", "request 'r1' was aborted")
        await front.submit(2, request_id="r1", max_tokens=3)
        [ended] = (await front.until("ended")).ended
        assert not ended.HasField("failure")


async def test_a_request_that_one_front_checks_is_aborted_through_another(monkeypatch: pytest.MonkeyPatch) -> None:
    checking, may_go_on, to_thread = asyncio.Event(), asyncio.Event(), asyncio.to_thread
    received_at_s = asyncio.get_running_loop().time() - 60.0  # no link is so slow

    async def held(*arguments: Any) -> Any:
        checking.set()
        await may_go_on.wait()
        return await to_thread(*arguments)

    async with running_stack(fronts=1) as stack, welcomed(stack) as other:
        with monkeypatch.context() as patch:
            patch.setattr("scheduler_svc.front.api.generation.asyncio.to_thread", held)
            patch.setattr("scheduler_svc.front.api.generation.monotonic_s", lambda: received_at_s)
            answer = asyncio.create_task(collect(stack, token_request(4, 10_000, request_id="mine")))
            await checking.wait()
        await other.say(abort_calls=[pb.AbortCall(call=1, request_id="mine", tenant="")])
        assert not (await other.until("abort_answers")).abort_answers[0].was_live
        may_go_on.set()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await answer
        assert (error.value.code(), error.value.details()) == (
            grpc.StatusCode.ABORTED,
            "request 'mine' was aborted",
        )
        assert not stack.engine.requests
        assert len((await collect(stack, token_request(4, 3, request_id="mine"))).token_ids) == 3


async def test_a_newer_session_of_a_front_ends_the_older_one_and_its_requests_first() -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack, session=5) as old:
        await old.submit(1, max_tokens=10_000)
        await old.until("accepted")
        async with welcomed(stack, session=6) as new:
            assert await status(old) == (grpc.StatusCode.FAILED_PRECONDITION, "session 6 of front 'raw' has begun")
            await new.submit(1, max_tokens=3)  # numbers begin again, and the id is free
            assert not (await new.until("ended")).ended[0].HasField("failure")
        async with welcomed(stack, session=8), joined(stack, session=7) as late:
            assert await status(late) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "session 7 of front 'raw' is not newer than 8",
            )


async def test_a_session_that_ends_reads_nothing_more_and_waits_for_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_session, "SLOW_FRONT_S", 3600.0)
    async with running_stack(fronts=1) as stack, welcomed(stack) as front:
        is_writing, may_read = asyncio.Event(), asyncio.Event()
        submission = encode_submission(
            1,
            EngineRequest("late", np.array([40], np.int32), SamplingRow(), StopConditions(10_000)),
            front.model_hash,
            front.max_model_len,
        )

        async def requests() -> AsyncIterator[pb.JoinRequest]:
            await may_read.wait()
            yield pb.JoinRequest(submissions=[submission])

        async def write(_: pb.JoinResponse) -> None:
            is_writing.set()
            await asyncio.Event().wait()  # the front takes nothing

        session = FrontSession(
            stack.engine,
            lambda: engine_state(stack.engine),
            "stuck",
            1,
            lambda: None,
            Mock(),
            STATE_INTERVAL_S,
            EarlyAborts(),
        )
        running = asyncio.create_task(session.run(pb.CoreWelcome(), 9, requests(), write))
        await is_writing.wait()
        session.end(FencedError("a newer session has begun"))
        may_read.set()
        with pytest.raises(FencedError):
            async with asyncio.timeout(PATIENCE_S):
                await running
        assert stack.engine._num_arrivals == 0


NUM_ABORTED = 100


@contextlib.contextmanager
def counting_aborts(engine: Engine) -> Iterator[list[int]]:
    """Give how many aborts there were in each turn of the event loop that had any."""
    turns = [0]
    abort = engine.requests.abort

    def counted(*arguments: Any) -> None:
        if not turns[-1]:
            asyncio.get_running_loop().call_soon(turns.append, 0)
        turns[-1] += 1
        abort(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.requests, "abort", counted)
        yield turns


@pytest.mark.parametrize("how", ["the front asks", "the front goes", "the front joins again", "a stream", "a caller"])
async def test_the_step_loop_has_its_turn_between_the_aborts_of_a_client_that_leaves(how: str) -> None:
    async with running_stack(FakeWorker(), fronts=0 if how in ("a stream", "a caller") else 1) as stack:
        with counting_aborts(stack.engine) as turns:
            async with leaving(stack, how):
                await until(lambda: not stack.engine.requests)
    assert sum(turns) == NUM_ABORTED
    assert max(turns) <= front_session.ABORTS_AT_ONCE < NUM_ABORTED


@asynccontextmanager
async def leaving(stack: Stack, how: str) -> AsyncIterator[None]:
    """Have many requests, and leave, or abort them."""
    is_in_process = how in ("a stream", "a caller")
    async with contextlib.AsyncExitStack() as exits:
        if is_in_process:
            channel = await exits.enter_async_context(grpc.aio.insecure_channel(stack.address))
            call: Any = generation_pb2_grpc.GenerationServiceStub(channel).StreamRequests()
            for number in range(NUM_ABORTED):
                request = token_request(3, 10_000, first_id=number)
                await call.write(generation.StreamRequestsRequest(submit=request, number=number))
        else:
            front = await exits.enter_async_context(welcomed(stack))
            for number in range(NUM_ABORTED):
                await front.submit(number + 1, max_tokens=10_000)
            call = front.call
        await until(lambda: len(stack.engine.requests) == NUM_ABORTED)
        if how == "the front asks":
            failure = pb.Failure(kind="RequestAbortedError", message="the client left")
            aborts = [pb.RequestAbort(number=number + 1, failure=failure) for number in range(NUM_ABORTED)]
            await front.say(aborts=aborts)
        elif how == "the front joins again":
            await exits.enter_async_context(welcomed(stack, session=2))
            assert not stack.engine.requests, "the new session begins behind the end of the old one"
        elif how == "a caller":
            await call.write(generation.StreamRequestsRequest(abort=range(NUM_ABORTED)))
        else:
            call.cancel()
        yield


async def test_what_fronts_have_counted_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()

    def parse_noted(text: str) -> Any:
        threads.append(threading.current_thread())
        return text_string_to_metric_families(text)

    monkeypatch.setattr("scheduler_svc.link.front_metrics.text_string_to_metric_families", parse_noted)
    monkeypatch.setattr(engine_stream, "METRICS_INTERVAL_S", 0.01)
    async with running_stack(fronts=2):
        await until(lambda: len(threads) >= 6)
    assert threading.main_thread() not in threads


async def test_a_front_that_leaves_takes_its_requests_with_it() -> None:
    async with running_stack(fronts=1) as stack:
        async with welcomed(stack) as front:
            for number in (1, 2, 3):
                await front.submit(number, max_tokens=10_000)
            await front.until("tokens")
        await until(lambda: not stack.engine.requests)
        assert all(core.blocks.allocator.num_used_blocks == 0 for core in stack.engine.fleet.planners)


NONSENSE: dict[str, list[pb.JoinRequest]] = {
    "reused request number 3": [pb.JoinRequest(submissions=[pb.Submission(number=3, num_sequences=1)])] * 2,
    "submitted an invalid request": [pb.JoinRequest(submissions=[pb.Submission(number=1, prompt_token_ids=b"abc")])],
}


@pytest.mark.parametrize(("words", "messages"), NONSENSE.items(), ids=NONSENSE)
async def test_a_front_that_sends_nonsense_is_cut_and_named(words: str, messages: list[pb.JoinRequest]) -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack) as front:
        for message in messages:
            await front.call.write(message)
        code, details = await status(front)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("front raw ")
        assert words in details
        assert (await collect(stack, token_request(4, 3))).finished is not None, "others go on"


async def test_a_front_is_told_why_it_is_cut_before_its_first_message_has_gone_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = FrontSession.run

    async def run_with_slow_write(
        session: FrontSession, welcome: pb.CoreWelcome, num_credits: int, requests: Any, write: Any
    ) -> None:
        async def begin(message: pb.JoinResponse) -> None:
            first = asyncio.ensure_future(write(message))
            await asyncio.sleep(0)  # gRPC has it
            first.cancel()
            await asyncio.Event().wait()

        await run(session, welcome, num_credits, requests, begin)

    async with running_stack(fronts=1) as stack:
        monkeypatch.setattr(FrontSession, "run", run_with_slow_write)
        async with asyncio.timeout(10), joined(stack) as front:
            await front.say(submissions=[pb.Submission(number=1, prompt_token_ids=b"abc")])
            assert await status(front) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "front raw submitted an invalid request",
            )


async def test_a_front_whose_request_the_core_cannot_hold_is_cut() -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack) as front:
        request = EngineRequest("r1", np.array([40], np.int32), SamplingRow(), StopConditions(4), num_sequences=0)
        await front.say(submissions=[encode_submission(1, request, front.model_hash, front.max_model_len)])
        assert await status(front) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "front raw submitted an invalid request",
        )
        assert (await collect(stack, token_request(4, 3))).finished is not None, "others go on"


def hostile_submissions() -> dict[str, dict[str, Any]]:
    """What an executor would refuse a step for, by what is wrong with it, and what would take too much memory."""
    ids, rules = np.int32, step_pb2.TokenRules
    tokens = ContinuedOutput(np.arange(40, 49, dtype=np.int32), None)
    columns: dict[str, tuple[float, ...]] = {
        "temperature": (-inf, inf, nan, -1.0, 101.0),
        **dict.fromkeys(("top_p", "typical_p", "repetition_penalty"), (-inf, nan, 0.0 - 1e-9, 1e9)),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-inf, nan, 101.0)),
        "min_p": (nan, 2.0),
        **dict.fromkeys(("top_k", "min_tokens", "output_index"), (2**31,)),
        "num_logprobs": (10**6, 2**31),
        "num_candidates": (1, 10**6),
    }
    found: dict[str, dict[str, Any]] = {
        f"{name} {value}": {"sampling": SamplingParams(**{name: value})}  # type: ignore[arg-type]
        for name, values in columns.items()
        for value in values
    }
    return found | {
        "an unknown token": {"prompt_token_ids": np.array([40, 10**6], ids).tobytes()},
        "a negative token": {"prompt_token_ids": np.array([-1], ids).tobytes()},
        "no prompt": {"prompt_token_ids": b""},
        "longer than it may be": {"max_model_len": 3},
        "prompt_logprobs": {"num_prompt_logprobs": 10**6},
        "a bias": {"token_rules": rules(biased_token_ids=[65], biases=[nan])},
        "biases": {"token_rules": rules(biased_token_ids=[65, 65], biases=[1, 1])},
        "columns of biases": {"token_rules": rules(biased_token_ids=[65], biases=[1, 1])},
        "a rule": {"token_rules": rules(banned_token_ids=[-7])},
        "a mask": {"token_rules": rules(allowed_mask=b"abc")},
        "words": {"token_rules": rules(banned_word_lengths=[7], banned_word_token_ids=[65])},
        "many sequences": {"num_sequences": 2**32 - 1},
        "beams": {"beam_search": pb.BeamSearch(beam_width=2**31 - 1, num_outputs=1, early_stopping="true")},
        "token types of one that generates": {"token_type_ids": b"\0\0\0"},
        "too few token types": {"pooling_task": step_pb2.POOLING_TASK_EMBED, "token_type_ids": b"\0\0"},
        "an unknown token type": {"pooling_task": step_pb2.POOLING_TASK_EMBED, "token_type_ids": b"\0\1\0"},
        "several vectors": {"pooling_task": step_pb2.POOLING_TASK_EMBED, "num_sequences": 2},
        "a longer text than it may be": {"pooling_task": step_pb2.POOLING_TASK_SCORE, "max_model_len": 2},
        "tokens beyond its length": {"continuation": encode_continuation(Continuation((tokens,)))},
    }


async def test_what_an_executor_would_refuse_a_step_for_is_refused_to_its_front() -> None:
    hostile = hostile_submissions()
    async with running_stack(fronts=1) as stack, welcomed(stack) as front:
        for number, fields in enumerate(hostile.values(), start=1):
            request = EngineRequest(f"r{number}", np.array([40, 41, 42], np.int32), SamplingRow(), StopConditions(4))
            message = encode_submission(number, request, front.model_hash, front.max_model_len)
            for name, value in fields.items():
                message.ClearField(name)  # type: ignore[arg-type]
                message.MergeFrom(pb.Submission(**{name: value}))
            await front.say(submissions=[message])
        found = pb.JoinResponse()
        while len(found.ended) < len(hostile):
            found.MergeFrom(await front.until("ended"))
        kinds = {name: end.failure.kind for name, end in zip(hostile, found.ended, strict=True)}
        assert set(kinds.values()) <= {"CallerError", "InvalidStepError"}, kinds
        assert not found.accepted
        assert (await collect(stack, token_request(4, 3))).finished is not None, "others go on"
        assert stack.driver.num_losses == 0


@pytest.mark.parametrize(("has_stop_strings", "num_tokens"), [(True, 10**6), (False, 1)])
async def test_a_front_that_ends_an_output_with_tokens_that_it_has_not_or_without_stop_strings_is_cut(
    has_stop_strings: bool, num_tokens: int
) -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack) as front:
        await front.submit(1, max_tokens=10_000, has_stop_strings=has_stop_strings)
        await front.until("tokens")
        await front.say(output_ends=[pb.OutputEnd(number=1, num_tokens=num_tokens, reason=pb.END_REASON_STOP)])
        assert (await status(front))[0] is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: not stack.engine.requests)


async def test_streams_go_on_while_the_tokenizer_of_another_executor_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    may_load, num_loads = asyncio.Event(), 0

    async def fetch_slowly(stub: Any) -> tuple[TokenizerFile, ...]:
        nonlocal num_loads
        num_loads += 1
        if num_loads > 1:
            await may_load.wait()
        return await fetch_tokenizer(stub)

    monkeypatch.setattr(remote_engine, "fetch_tokenizer", fetch_slowly)
    async with running_stack(FakeWorker(step_ms=1), fronts=1, loses_soon=True) as stack:
        answer = asyncio.create_task(collect(stack, token_request(4, 200)))
        await until(lambda: any(request.num_output_tokens for request in stack.engine.requests.values()))
        await stack.executor.kill()
        stack.executor.worker = FakeWorker(step_ms=1)
        await stack.executor.start()
        assert len((await answer).token_ids) == 200
        assert num_loads == 2
        assert len((await collect(stack, token_request(4, 3))).token_ids) == 3, "the old one is as good"
        may_load.set()


async def test_the_health_of_the_core_is_not_ready_while_no_front_takes_calls() -> None:
    async with running_stack(fronts=1, health_listen="127.0.0.1:0") as stack:
        assert stack.fronts is not None
        [session] = stack.link.own_sessions
        async with grpc.aio.insecure_channel(stack.service.other_addresses["health"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            for takes_calls, status in ((True, "SERVING"), (False, "NOT_SERVING"), (True, "SERVING")):
                session.is_ready = takes_calls
                request = health_pb2.HealthCheckRequest(service="readiness")
                while (await health.Check(request)).status != getattr(health_pb2.HealthCheckResponse, status):
                    await asyncio.sleep(0.01)


async def test_operators_see_each_front_and_how_many_requests_it_has() -> None:
    async with running_stack(fronts=2) as stack, welcomed(stack, front_id="1", session=2**63) as front:
        await front.submit(1, max_tokens=10_000)
        await front.until("accepted")
        state = await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())
        assert [(seen.front_id, seen.is_ready, seen.num_requests) for seen in state.fronts] == [
            ("0", True, 0),
            ("1", False, 1),
        ]


async def test_a_front_of_its_own_is_none_of_ours_whatever_its_name() -> None:
    async with (
        running_stack(fronts=1, engine_listen="127.0.0.1:0", engine_insecure=True) as stack,
        welcomed(stack, front_id="0", session=2**63, over_tcp=True) as front,
    ):
        await front.say(is_ready=False)
        await front.submit(1, max_tokens=10_000)
        await front.until("accepted")
        assert stack.fronts is not None
        [ours] = stack.link.own_sessions
        assert ours.is_ready
        state = await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())
        assert [(seen.front_id, bool(seen.address), seen.is_ready, seen.num_requests) for seen in state.fronts] == [
            ("0", False, True, 0),
            ("0", True, False, 1),
        ]
        assert (await collect(stack, token_request(4, 3))).finished is not None


async def test_what_is_kept_of_fronts_that_were_there_has_a_bound_and_so_have_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_servicer, "MAX_FRONTS_KEPT", 3)
    async with running_stack(fronts=1, engine_listen="127.0.0.1:0", engine_insecure=True) as stack:
        for name in ("a", "b", "c", "d"):
            async with welcomed(stack, front_id=name, over_tcp=True):
                pass
            await until(lambda: len(stack.link.sessions) == 1)
        assert [*stack.link._past] == [(False, "0"), (True, "c"), (True, "d")]
        async with joined(stack, front_id="x" * 257, over_tcp=True) as front:
            assert await status(front) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "a front's id has 257 characters; it must have at most 256",
            )


async def test_operators_see_what_went_to_a_front_and_whether_it_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stream, "METRICS_INTERVAL_S", 0.01)
    async with running_stack(fronts=2) as stack:
        assert stack.fronts is not None
        await stack.fronts.fronts[1].terminate()  # it would join again at times

        async def fronts() -> list[FrontState]:
            return list((await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())).fronts)

        for session in (2**63, 2**63 + 1):
            async with welcomed(stack, front_id="1", session=session, num_credits=100) as front:
                await front.submit(1, max_tokens=3)
                await front.until("ended")
                await front.say(metrics=b"# nothing is counted\n", loop_lag_us=1500)
                while (await fronts())[1].loop_lag_us != 1500:
                    await asyncio.sleep(0.01)
                seen = (await fronts())[1]
                assert 0 < seen.num_credits < 100, "each message has taken one"
        assert (seen.num_sessions, seen.num_output_tokens) == (3, 6), "the first session was the real front's"
        await until(lambda: len(stack.link.own_sessions) == 1)
        real, gone = await fronts()
        while not real.num_credits:  # those that it had may be used up for a moment
            real, gone = await fronts()
        assert (real.num_sessions, real.num_output_tokens) == (1, 0)
        assert (gone.HasField("num_credits"), gone.num_output_tokens) == (False, 6)
        while not (await fronts())[0].loop_lag_us:
            await asyncio.sleep(0.01)


async def test_the_metrics_of_the_scheduler_have_the_calls_of_its_own_fronts_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_stream, "METRICS_INTERVAL_S", 0.01)
    async with (
        running_stack(fronts=1, engine_listen="127.0.0.1:0", engine_insecure=True) as stack,
        welcomed(stack, front_id="0", session=2**63, over_tcp=True) as front,
    ):
        counted = b'# TYPE grpc_server_handled counter\ngrpc_server_handled_total{grpc_method="Generate"} 7.0\n'
        await front.say(metrics=counted, loop_lag_us=7)
        await front.submit(1)  # it is behind what the front has counted
        await front.until("ended")
        await collect(stack, token_request(4, 3))

        def num_calls() -> float:
            families = {family.name: family for family in stack.service._metrics()}
            samples = families["grpc_server_handled"].samples
            return sum(s.value for s in samples if s.labels["grpc_method"] == "Generate")

        await until(lambda: num_calls() == 1)


async def test_versions_that_do_not_meet_are_refused_in_words() -> None:
    async with running_stack(fronts=1) as stack:
        async with joined(stack, versions=(2, 3)) as front:
            assert await status(front) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "front 'raw' supports versions 2 to 3 of octavo.core.v1; this engine supports 1 to 1",
            )
        async with joined(stack, versions=(0, 9)) as front:
            assert (await front.until("welcome")).welcome.version == 1
        assert stack.fronts is not None
        async with grpc.aio.insecure_channel(stack.fronts.link) as channel:
            silent: Any = pb_grpc.CoreServiceStub(channel).Join()
            await silent.write(pb.JoinRequest(credits=1))
            assert await silent.details() == "the first message of a front must be its hello"


async def test_news_waits_for_credits_in_one_message_and_a_front_that_takes_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_stack(fronts=1) as stack, welcomed(stack, num_credits=1) as front:
        await front.submit(1, max_tokens=20)
        await until(lambda: stack.engine.requests)
        await until(lambda: not stack.engine.requests)
        await front.say(credits=1)
        found = await front.call.read()
        assert len(found.tokens.token_ids) == 20
        assert [end.number for end in found.ended] == [1]
    monkeypatch.setattr(front_session, "SLOW_FRONT_S", 0.2)
    async with running_stack(fronts=1) as stack, welcomed(stack, num_credits=1) as front:
        await front.submit(1, max_tokens=100_000)
        assert (await status(front))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: not stack.engine.requests)


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 1, "prompt_logprobs": 0},
    "three outputs": {"temperature": 1.0, "seed": 3, "n": 3},
    "stop strings": {"temperature": 1.0, "seed": 4, "n": 2, "stop": ["a", "e"]},
    "best of three": {"temperature": 1.0, "seed": 5, "best_of": 3, "n": 2},
    "beams": {"beam_width": 3, "n": 2, "logprobs": 0},
}


@pytest.mark.parametrize("params", REQUESTS.values(), ids=REQUESTS)
async def test_a_link_that_breaks_again_and_again_costs_no_token(params: dict[str, Any]) -> None:
    async with running_stack(FakeWorker(step_ms=1), fronts=1) as stack:
        request = token_request(6, 60, **params)
        whole = await collect_outputs(stack, request)
        running = asyncio.create_task(collect_outputs(stack, request))
        core_link = stack.link
        for num_steps in (2, 1, 10, 0):
            await until(lambda: stack.engine.requests)
            core = stack.driver.planner
            assert core is not None
            await some_steps(core, num_steps)
            assert not running.done()
            [session] = core_link.sessions
            session.end(ConnectionError("the test cuts it"))  # type: ignore[arg-type]
            await until_replaced(core_link, session)
        assert await running == whole
        await until(lambda: not stack.engine.requests)


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "sent again"])
async def test_tokens_that_are_lost_or_sent_again_on_the_link_change_no_answer(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Every tenth token of the core is; a front that misses one joins again."""
    counter = itertools.count(1)
    add_token = AnswerBatch.add_token

    def add_badly(self: AnswerBatch, *token: Any) -> None:
        is_tenth = next(counter) % 10 == 0
        num_times = 1 if not is_tenth else 0 if is_lost else 2
        for _ in range(num_times):
            add_token(self, *token)

    async with running_stack(FakeWorker(step_ms=1), fronts=1) as stack:
        request = token_request(6, 60, **REQUESTS["three outputs"])
        whole = await collect_outputs(stack, request)
        with monkeypatch.context() as patch:
            patch.setattr(AnswerBatch, "add_token", add_badly)
            assert await collect_outputs(stack, request) == whole
        [front] = (await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())).fronts
        assert (front.num_sessions > 1) == is_lost


async def some_steps(core: ExecutorPlanner, num_steps: int) -> None:
    """Return so many steps later."""
    wanted = core.last_processed_step_id + num_steps
    await until(lambda: core.last_processed_step_id >= wanted)


async def until_replaced(link: EngineServicer, session: FrontSession) -> None:
    """Return once a front has joined again."""
    await until(lambda: link.own_sessions and session not in link.own_sessions)


async def collect_outputs(stack: Stack, request: generation.GenerateRequest) -> list[Any]:
    """Return what a request ends with, and what its deltas brought of each output."""
    brought: dict[int, list[Any]] = {}
    async for event in stack.generation.Generate(request):
        delta = event.delta
        if event.HasField("delta"):
            known = brought.setdefault(delta.output_index, ["", []])
            known[0] += delta.text
            known[1] += delta.token_ids
    outputs = list(event.finished.outputs)
    assert [brought[output.output_index] for output in outputs] == [
        [output.text, list(output.token_ids)] for output in outputs
    ]
    return [*outputs, event.finished.prompt_logprobs]


async def test_a_front_that_is_started_again_opens_its_ports_once_it_knows_the_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_stack(fronts=1) as stack:
        assert stack.fronts is not None
        await stack.fronts.fronts[0].kill()
        await until(lambda: not stack.link.own_sessions)
        is_told = asyncio.Event()
        take_state = RemoteEngine._take_state

        async def take_state_late(self: RemoteEngine, *args: Any) -> None:
            await is_told.wait()
            await take_state(self, *args)

        monkeypatch.setattr(RemoteEngine, "_take_state", take_state_late)
        again = stack.fronts.start(0)
        try:
            await until(lambda: stack.link.own_sessions)
            host, _, port = stack.address.rpartition(":")
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(host, int(port))
            is_told.set()
            await stack.link.wait_until_ready(1)
            async with Client(stack.address) as client:
                assert len((await client.generate([40, 41], max_tokens=3)).outputs[0].token_ids) == 3
        finally:
            await again.terminate()


async def test_a_front_whose_link_fails_by_a_bug_ends_and_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stack(fronts=1) as stack:
        assert stack.fronts is not None
        assert stack.fronts is not None
        [front] = stack.fronts.fronts
        monkeypatch.setattr(EngineStream, "_grant", lambda self: 1 / 0)
        [session] = stack.link.own_sessions
        session.batch()
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(PATIENCE_S):
                await front.task
        assert caught.group_contains(ZeroDivisionError)


async def test_a_front_without_its_core_refuses_at_once() -> None:
    core = RemoteEngine(lambda: grpc.aio.insecure_channel("unix:/nonexistent"), "raw", load_nothing, lambda: None)
    with pytest.raises(UnavailableOfServiceError, match="the engine does not answer"):
        async with asyncio.timeout(PATIENCE_S):
            await core.abort_request("r1", None)


async def load_nothing(*_: object) -> None:
    """Stand for the tokenizer."""
