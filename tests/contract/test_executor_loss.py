"""A broken stream is resumed; a lost executor costs time, never a token."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import grpc
import pytest

from executor_svc.fake.faults import FakeFaults, FaultPlan
from executor_svc.fake.worker import FakeWorker
from executor_svc.service.servicer import ExecutionServicer
from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import StepFailedError
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.step import Step, StepResult
from scheduler_svc.executors.session import SessionTimings
from tests.support.patience import PATIENCE_S
from tests.support.stack import Answer, Stack, collect, running_stack, token_request, until

NUM_TOKENS = 48
REQUESTS = [
    token_request(30, NUM_TOKENS, first_id=1),
    token_request(17, NUM_TOKENS, first_id=2, temperature=0.8, seed=11, logprobs=0),
    token_request(64, NUM_TOKENS, first_id=3, temperature=1.0, seed=12),
]


class TrickedWorker(FakeWorker):
    """A fake executor that runs `trick` before it executes the step with the given id, or every step."""

    def __init__(self, step_id: int | None, trick: Callable[[Step], None], **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.step_id = step_id
        self.trick = trick

    def execute(self, step: Step) -> StepResult:
        if self.step_id in (None, step.step_id):
            self.trick(step)
        return super().execute(step)


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """What an undisturbed run answers."""

    async def ask() -> list[Answer]:
        async with running_stack() as stack:
            return await asyncio.gather(*(collect(stack, request) for request in REQUESTS))

    return asyncio.run(ask())


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
    assert [a.text for a in answers] == [e.text for e in expected]
    assert [a.logprobs for a in answers] == [e.logprobs for e in expected]


async def sent(stack: Stack) -> "asyncio.Future[list[Answer]]":
    """Send REQUESTS; return, once all have come, their answers to come."""
    async with stack.together(len(REQUESTS)):
        return asyncio.gather(*(collect(stack, request) for request in REQUESTS))


async def tokens_arrived(stack: Stack, num_tokens: int) -> None:
    """Return once some live request has so many tokens."""
    await until(lambda: any(r.num_output_tokens >= num_tokens for r in stack.engine.requests.values()))


async def losses_of(stack: Stack, answer: Answer) -> list[str]:
    """Return why executors were lost in the life of a request: what a driver says last is written over."""
    life = await stack.admin.GetRequest(admin.GetRequestRequest(request_id=answer.request_id))
    return [each.text for each in life.request.events if each.kind == admin_pb2.REQUEST_EVENT_KIND_EXECUTOR_LOST]


def resume_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a scheduler try for an hour to resume a stream that broke."""
    monkeypatch.setattr(
        "scheduler_svc.processes.service.SessionTimings", partial(SessionTimings, resume_timeout_s=3600.0)
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 20])
async def test_a_replaced_executor_goes_on_with_every_stream(expected: list[Answer], num_tokens: int) -> None:
    async with running_stack(FakeWorker(step_ms=2)) as stack:
        answers = await sent(stack)
        await tokens_arrived(stack, num_tokens)
        await stack.executor.kill()
        stack.executor.worker = FakeWorker()  # a new instance: its cache is empty
        await stack.executor.start()
        assert_same(await answers, expected)
        (loss,) = await losses_of(stack, (await answers)[0])
        assert loss.startswith("the executor was lost: its step stream broke")
        state = await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())
        assert state.executors[0].num_losses == 1
        assert state.executors[0].status == admin_pb2.EXECUTOR_STATUS_ATTACHED
        assert state.num_used_blocks == 0


async def test_a_process_that_is_gone_is_not_waited_for(
    expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    resume_for_an_hour(monkeypatch)
    async with running_stack(FakeWorker(step_ms=2), FakeWorker(step_ms=2)) as stack:
        answers = await sent(stack)
        await tokens_arrived(stack, 10)
        lost = next(executor for executor in stack.executors if stack.num_groups_on(executor))
        await lost.kill()
        assert_same(await answers, expected)
        losses = [loss for answer in await answers for loss in await losses_of(stack, answer)]
        assert losses
        assert all("its process has exited: UNAVAILABLE: connection refused" in loss for loss in losses)


async def test_a_broken_stream_is_resumed_without_a_new_epoch(expected: list[Answer]) -> None:
    async with running_stack(FakeWorker(step_ms=2)) as stack:
        answers = asyncio.gather(*(collect(stack, request) for request in REQUESTS))
        for num_tokens in (1, 10, 20):
            await tokens_arrived(stack, num_tokens)
            stack.executor.break_connections()
        assert_same(await answers, expected)
        state = await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())
        assert state.executors[0].num_losses == 0
        assert state.executors[0].epoch == 1


async def test_a_step_that_fails_is_recomputed_after_a_new_attach(expected: list[Answer]) -> None:
    failed = False

    def fail_once(step: Step) -> None:
        nonlocal failed
        if not failed:
            failed = True
            raise StepFailedError("the card fell off the bus")

    async with running_stack(TrickedWorker(5, fail_once)) as stack:
        assert_same(await (await sent(stack)), expected)
        state = await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())
        assert state.executors[0].num_losses == 1
        assert state.executors[0].epoch == 2


async def test_a_request_that_breaks_every_executor_ends_alone(expected: list[Answer]) -> None:
    def fail_on_the_poison(step: Step) -> None:
        if any(len(admission.token_ids) == 200 for admission in step.delta.admissions):
            raise StepFailedError("this prompt kills")

    async with running_stack(TrickedWorker(None, fail_on_the_poison)) as stack:
        innocent = await sent(stack)
        with pytest.raises(grpc.aio.AioRpcError, match="4 times in a row"):
            await collect(stack, token_request(200, 5))
        assert_same(list(await innocent), expected)
        assert stack.driver.num_losses in range(4, 7)  # two of them in company
        assert not stack.engine.requests


async def test_a_bug_in_the_core_ends_live_requests_and_the_service_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("an invariant does not hold")

    async with running_stack(FakeWorker(step_ms=2)) as stack:
        answer = asyncio.create_task(collect(stack, token_request(30, 5000)))
        await tokens_arrived(stack, 1)
        with monkeypatch.context() as patch:
            for method in ("process", "finish", "evacuate"):  # the last two must not be asked any more
                patch.setattr(stack.driver.planner, method, broken)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        await stack.attached()
        assert len((await collect(stack, token_request(20, 5))).token_ids) == 5
        assert not stack.engine.requests


@pytest.mark.parametrize("broken", ["evacuate", "enqueue"])
async def test_a_bug_while_the_requests_of_a_lost_executor_are_taken_back_ends_them(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("an invariant does not hold")

    async with running_stack(FakeWorker(step_ms=2)) as stack:
        answers = [asyncio.create_task(collect(stack, token_request(30, 5000, first_id=i))) for i in range(3)]
        await until(lambda: len(stack.engine.requests) == 3)
        await tokens_arrived(stack, 1)
        with monkeypatch.context() as patch:
            patch.setattr(stack.driver.planner if broken == "evacuate" else stack.engine.requests, broken, fail)
            await stack.executor.servicer.drain()
            ended = await asyncio.gather(*answers, return_exceptions=True)
        codes = [error.code() for error in ended if isinstance(error, grpc.aio.AioRpcError)]
        assert codes == [grpc.StatusCode.INTERNAL] * 3
        assert not stack.engine.requests
        assert not stack.engine.fleet.planners


async def test_a_stream_that_breaks_during_a_long_step_is_resumed() -> None:
    entered, release = threading.Event(), threading.Event()

    def wait_long(step: Step) -> None:
        entered.set()
        assert release.wait(PATIENCE_S)

    async with running_stack(TrickedWorker(3, wait_long)) as stack:
        answer = asyncio.create_task(collect(stack, token_request(20, 30)))
        await asyncio.to_thread(entered.wait)
        stack.executor.break_connections()
        await until(lambda: stack.executor.servicer.has_stream)
        release.set()
        assert len((await answer).token_ids) == 30
        assert stack.driver.num_losses == 0


async def test_an_executor_that_says_it_shuts_down_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    resume_for_an_hour(monkeypatch)
    async with running_stack(FakeWorker(step_ms=2)) as stack:
        answer = asyncio.create_task(collect(stack, token_request(30, 40)))
        await tokens_arrived(stack, 1)
        await stack.executor.servicer.drain()
        await until(lambda: stack.driver.session is None)
        await stack.executor.kill()
        stack.executor.worker = FakeWorker()
        await stack.executor.start()
        assert len((await answer).token_ids) == 40


async def test_a_frozen_executor_is_noticed_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never_answer(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ExecutionServicer, "Heartbeat", never_answer)
    async with running_stack(lease_s=1.0) as stack:
        await until(lambda: stack.driver.session is None)
        assert stack.driver.num_losses == 1


async def test_an_executor_whose_message_limit_is_too_small_is_refused() -> None:
    async with running_stack(ready=False) as stack:
        await stack.executor.kill()
        stack.executor.worker = FakeWorker(max_message_bytes=2**16)
        await stack.executor.start()
        await until(lambda: "max_message_bytes" in stack.engine.last_trouble)
        assert stack.driver.planner is None


async def test_an_executor_with_a_broken_tokenizer_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeWorker):
        def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
            return (TokenizerFile("tokenizer.json", b"{"),)

    async with running_stack(Broken(), ready=False) as stack:
        await until(lambda: "tokenizer.json" in stack.engine.last_trouble)
        assert stack.driver.planner is None
    assert "Traceback" not in caplog.text


async def test_an_executor_that_hangs_counts_as_lost() -> None:
    hang = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang_once(step: Step) -> None:
        if not hang.is_set():
            loop.call_soon_threadsafe(hang.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

    release = asyncio.Event()
    async with running_stack(TrickedWorker(3, hang_once), step_timeout_s=0.3) as stack:
        answer = asyncio.create_task(collect(stack, token_request(20, 30)))
        await hang.wait()
        await until(lambda: stack.driver.num_losses == 1)
        release.set()
        assert len((await answer).token_ids) == 30


async def test_nonsense_from_the_executor_counts_as_a_loss(expected: list[Answer]) -> None:
    class LyingWorker(FakeWorker):
        has_lied = False

        def execute(self, step: Step) -> StepResult:
            result = super().execute(step)
            if step.step_id == 4 and not self.has_lied:
                self.has_lied = True
                return StepResult(result.epoch, result.step_id, result.sampled_token_ids[:-1])
            return result

    async with running_stack(LyingWorker()) as stack:
        assert_same(await (await sent(stack)), expected)
        assert stack.driver.num_losses == 1


async def test_new_requests_are_refused_while_no_executor_is_attached() -> None:
    async with running_stack(loses_soon=True) as stack:
        await stack.executor.kill()
        await until(lambda: stack.driver.planner is None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack, token_request(5, 5))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no executor" in (caught.value.details() or "")


async def test_a_request_that_waits_for_an_executor_can_be_aborted() -> None:
    async with running_stack(FakeWorker(step_ms=2), loses_soon=True) as stack:
        call = stack.generation.Generate(token_request(30, 5000, request_id="parked"))
        await tokens_arrived(stack, 1)
        await stack.executor.kill()
        await until(lambda: stack.driver.planner is None)
        assert stack.engine.waiting.num_waiting == 1
        assert (await stack.generation.Abort(pb.AbortRequest(request_id="parked"))).was_live
        assert stack.engine.waiting.num_waiting == 0
        with pytest.raises(grpc.aio.AioRpcError, match="aborted"):
            async for _ in call:
                pass


@pytest.mark.parametrize(
    "other",
    [lambda: FakeWorker(eos_probability=0.5), lambda: FakeWorker(weights_digest="5" * 64)],
    ids=["model", "weights"],
)
async def test_an_executor_with_another_model_or_other_weights_ends_live_requests(
    other: Callable[[], FakeWorker],
) -> None:
    async with running_stack(FakeWorker(step_ms=2)) as stack:
        answer = asyncio.create_task(collect(stack, token_request(30, 5000)))
        await tokens_arrived(stack, 1)
        await stack.executor.kill()
        stack.executor.worker = other()
        await stack.executor.start()
        with pytest.raises(grpc.aio.AioRpcError, match="a different model"):
            await answer


LARGE = [
    token_request(20, 180, first_id=1, request_id="large"),
    token_request(20, 180, first_id=2, beam_width=2),
    token_request(20, 180, first_id=3, n=2, temperature=1.0, seed=1),
]


async def shrink(stack: Stack) -> "tuple[list[asyncio.Task[list[int]]], asyncio.Task[Answer]]":
    """Let the executor come back with room for 128 tokens; return what LARGE get, and one that fits there."""
    async with stack.together(len(LARGE) + 1):
        large = [asyncio.create_task(output_lengths(stack, request)) for request in LARGE]
        small = asyncio.create_task(collect(stack, token_request(10, 60, first_id=4)))
    await tokens_arrived(stack, 3)
    await stack.executor.kill()
    stack.executor.worker = FakeWorker(num_device_blocks=8)
    await stack.executor.start()
    return large, small


def told_of_a_larger_executor(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that say who waits for a larger executor."""
    return [message for message in caplog.messages if "event=requests_wait_for_a_larger_executor" in message]


async def output_lengths(stack: Stack, request: pb.GenerateRequest) -> list[int]:
    """Return the number of tokens of each output."""
    events = [event async for event in stack.generation.Generate(request)]
    return [len(output.token_ids) for output in events[-1].finished.outputs]


async def test_what_was_accepted_waits_until_an_executor_comes_that_can_hold_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_stack(FakeWorker(step_ms=2)) as stack:
        large, small = await shrink(stack)
        assert len((await small).token_ids) == 60
        explain = admin.ExplainRequestRequest(request_id="large")
        while "unless an executor that can hold it" not in (await stack.admin.ExplainRequest(explain)).explanation:
            await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError, match="maximum context length is 128 tokens"):
            await collect(stack, token_request(150, 5, first_id=5))  # served is what the executors have now
        await until(lambda: told_of_a_larger_executor(caplog))  # once a second it is looked whether to tell
        await stack.executor.kill()
        stack.executor.worker = FakeWorker()
        await stack.executor.start()
        assert [await lengths for lengths in large] == [[180], [180], [180, 180]]
    [told] = told_of_a_larger_executor(caplog)
    assert "requests=3" in told
    assert "accepted for 200 tokens (a prompt of 20); this executor holds sequences of 128" in told


async def test_what_no_executor_comes_for_ends_with_the_numbers_and_is_never_cut() -> None:
    async with running_stack(FakeWorker(step_ms=2), orphan_timeout_s=1) as stack:
        large, small = await shrink(stack)
        assert len((await small).token_ids) == 60
        for ended in await asyncio.gather(*large, return_exceptions=True):
            assert isinstance(ended, grpc.aio.AioRpcError)
            assert ended.code() is grpc.StatusCode.UNAVAILABLE
            assert ended.details() == (
                "the request was accepted for 200 tokens (a prompt of 20); this executor holds sequences of 128; no "
                "larger one was attached within 1 s (--orphan-timeout-s); retry later, or request less"
            )


async def test_a_request_without_any_executor_does_not_wait_for_ever() -> None:
    async with running_stack(FakeWorker(step_ms=2), orphan_timeout_s=0.3, loses_soon=True) as stack:
        answer = asyncio.create_task(collect(stack, token_request(20, 5000)))
        await tokens_arrived(stack, 1)
        await stack.executor.kill()
        with pytest.raises(grpc.aio.AioRpcError, match=r"no executor was attached within 0\.3 s") as caught:
            await answer
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_requests_on_one_executor_that_is_really_broken_are_not_blamed() -> None:
    broken = FakeWorker(faults=FakeFaults(FaultPlan(fail_step_every=1)))
    async with running_stack(broken, orphan_timeout_s=1.0) as stack:
        requests = [token_request(20, 5, first_id=i) for i in range(3)]
        for ended in await asyncio.gather(*(collect(stack, r) for r in requests), return_exceptions=True):
            assert isinstance(ended, grpc.aio.AioRpcError)
            assert "4 times in a row" not in (ended.details() or "")
            assert ended.code() is grpc.StatusCode.UNAVAILABLE
        assert stack.driver.num_losses >= 1
