"""Weights that change between two steps, with fake executors: what goes on with what, what failures leave behind."""

import asyncio
import glob
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.weight_updates import WeightUpdates
from executor_svc.worker.interface import Agree
from octavo.admin.v1 import admin_service_pb2 as admin_pb
from octavo.execution.v1 import capability_pb2, step_pb2
from octavo.execution.v1 import execution_service_pb2 as pb2
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import DeviceLostError
from tests.contract.execution_harness import Executor, decode_step, first_step, refusal
from tests.support.stack import Answer, Stack, collect, running_stack, token_request, until
from tests.support.step_logs import check_replay

pytestmark = pytest.mark.timeout(60)

KEEP, RECOMPUTE = admin_pb.PAUSE_MODE_KEEP, admin_pb.PAUSE_MODE_RECOMPUTE
NEW = b"other weights"
NEW_DIGEST = hashlib.sha256(NEW).hexdigest()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder with folders of weights."""
    for name, content in {"new": NEW, "newer": b"newer weights"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    return tmp_path


def worker(weights: Path | None = None, **settings: Any) -> FakeWorker:
    """Return an executor, which starts with the weights of a folder."""
    made = FakeWorker(updates_weights=True, **settings)
    if weights is not None:
        made.update_weights(weights, "")
    return made


async def pause(stack: Stack, mode: "admin_pb.PauseMode.ValueType" = RECOMPUTE) -> None:
    await stack.admin.Pause(admin_pb.PauseRequest(mode=mode))


async def resume(stack: Stack) -> None:
    await stack.admin.Resume(admin_pb.ResumeRequest())


async def update(stack: Stack, *messages: admin_pb.UpdateWeightsRequest) -> str:
    async def sent() -> AsyncIterator[admin_pb.UpdateWeightsRequest]:
        for message in messages:
            yield message

    return (await stack.admin.UpdateWeights(sent())).weights_digest


def source(name: str, digest: str = "") -> admin_pb.UpdateWeightsRequest:
    return admin_pb.UpdateWeightsRequest(source=name, weights_digest=digest)


def piece(content: bytes, *, begins_file: bool = False, is_last: bool = False) -> admin_pb.UpdateWeightsRequest:
    return admin_pb.UpdateWeightsRequest(content=content, begins_file=begins_file, is_last=is_last)


async def refusal_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


def asking(number: int, max_tokens: int = 60, **params: Any) -> pb.GenerateRequest:
    request = token_request(40, max_tokens, first_id=number, logprobs=1, **params)
    request.include_provenance = True
    return request


def spans(answer: Answer) -> Sequence[generation_pb2.Provenance]:
    return answer.output.provenance


async def rest_of(answer: Answer, fresh: Stack, max_tokens: int) -> Answer:
    """Return what an executor with the new weights gives behind the tokens that the old ones gave."""
    begin = spans(answer)[1].first_token
    request = token_request(40, max_tokens - begin, logprobs=1)
    assert answer.finished is not None
    request.token_ids.ids[:] = [*prompt_of[answer.request_id], *answer.token_ids[:begin]]
    return await collect(fresh, request)


prompt_of: dict[str, Sequence[int]] = {}


async def running_requests(stack: Stack, num_requests: int, **params: Any) -> list[asyncio.Task[Answer]]:
    """Begin requests, and return once each has a token."""
    requests = [asking(number, request_id=f"r{number}", **params) for number in range(num_requests)]
    prompt_of.update({request.request_id: list(request.token_ids.ids) for request in requests})
    tasks = [asyncio.create_task(collect(stack, request)) for request in requests]
    await until(lambda: len(stack.engine.requests) == num_requests)
    await until(lambda: all(request.num_output_tokens for request in stack.engine.requests.values()))
    return tasks


SLOW: dict[str, Any] = {"step_ms": 3.0}


@pytest.mark.parametrize("mode", [KEEP, RECOMPUTE], ids=["keep", "recompute"])
@pytest.mark.parametrize("fronts", [0, 1])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 2, "num_device_blocks": 24, "max_model_len": 256, "num_host_blocks": 40}],
    ids=["roomy", "swapping"],
)
async def test_live_requests_go_on_and_new_ones_are_those_of_an_executor_that_was_started_with_the_weights(
    weights: Path, tmp_path: Path, mode: "admin_pb.PauseMode.ValueType", fronts: int, settings: dict[str, Any]
) -> None:
    log = tmp_path / "log"
    workers = [worker(**SLOW, **settings) for _ in range(2)]
    async with (
        running_stack(*workers, weights_dirs=[weights], fronts=fronts, step_log=log) as stack,
        running_stack(worker(weights / "new")) as fresh,
    ):
        before = await collect(stack, asking(50, 20))
        tasks = await running_requests(stack, 3)
        await pause(stack, mode)
        version = await stack.admin.GetWeightVersion(admin_pb.GetWeightVersionRequest())
        assert (version.is_paused, version.mode, version.num_updates, version.world_size) == (True, mode, 0, 2)
        new = asyncio.create_task(collect(stack, asking(50, 20)))
        assert await update(stack, source("new")) == NEW_DIGEST
        await resume(stack)
        answers = [await task for task in tasks]
        for answer in answers:
            assert len(answer.token_ids) == 60
            assert [span.weights_digest == NEW_DIGEST for span in spans(answer)] == [False, True]
            assert mode == KEEP or not spans(answer)[1].keeps_cache
            rest = await rest_of(answer, fresh, 60)
            begin = spans(answer)[1].first_token
            same = (answer.token_ids[begin:], answer.logprobs[begin:]) == (rest.token_ids, rest.logprobs)
            assert same is not spans(answer)[1].keeps_cache
        assert any(spans(answer)[1].keeps_cache for answer in answers) is (mode == KEEP)
        at_once, later = await new, await collect(stack, asking(50, 20))
        wanted = await collect(fresh, asking(50, 20))
        assert at_once.finished is not None
        assert at_once.finished.usage.num_cached_tokens == 0
        for answer in (at_once, later):
            assert (answer.token_ids, answer.logprobs) == (wanted.token_ids, wanted.logprobs)
        assert before.token_ids != wanted.token_ids
        model = await stack.generation.GetModel(pb.GetModelRequest())
        assert model.weights_digest == NEW_DIGEST
    check_replay(log)


async def test_weights_come_in_pieces_to_all_executors_and_what_is_cut_or_refused_leaves_the_old_ones(
    weights: Path,
) -> None:
    async with running_stack(worker(), worker(), weights_dirs=[weights]) as stack:
        before = await collect(stack, asking(1, 20))
        precondition = grpc.StatusCode.FAILED_PRECONDITION
        assert await refusal_of(update(stack, source("new"))) == (
            precondition,
            "the fleet is not paused; pause it first (Pause), and resume it afterwards",
        )
        await pause(stack)
        for refused in (
            [source("../elsewhere")],
            [source("nothing")],
            [],
            [piece(b"no beginning", is_last=True)],
            [piece(b"no end", begins_file=True)],
            [piece(b"x" * (2 * 2**20 + 1), begins_file=True)],
            [admin_pb.UpdateWeightsRequest(source="new", stays_open=True)],
        ):
            code, _ = await refusal_of(update(stack, *refused))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        cut = asyncio.Event()

        async def messages() -> AsyncIterator[admin_pb.UpdateWeightsRequest]:
            yield piece(NEW, begins_file=True)
            await cut.wait()

        call = stack.admin.UpdateWeights(messages())
        sending = asyncio.ensure_future(_answer(call))
        await until(lambda: glob.glob(f"{weights}/.incoming-*/0*"))  # beside folders that go
        assert (await refusal_of(update(stack, source("new"))))[0] is precondition  # a second trainer
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await sending
        await until(lambda: not list(weights.glob(".incoming-*")))
        sending = asyncio.ensure_future(_answer(stack.admin.UpdateWeights(messages())))
        await until(lambda: list(weights.glob(".incoming-*/*")))
        await resume(stack)  # gives up what is being received
        cut.set()
        assert (await refusal_of(sending))[0] in (precondition, grpc.StatusCode.INVALID_ARGUMENT)
        await until(lambda: not list(weights.glob(".incoming-*")))
        assert (await collect(stack, asking(1, 20))).token_ids == before.token_ids
        await pause(stack)
        second = piece(b"second", begins_file=True, is_last=True)
        digest = await update(stack, piece(NEW[:5], begins_file=True), piece(NEW[5:]), second)
        assert digest == hashlib.sha256(NEW + b"second").hexdigest()
        await until(lambda: not list(weights.glob(".incoming-*")))
        await resume(stack)
        assert (await collect(stack, asking(1, 20))).token_ids != before.token_ids


async def _answer(call: Awaitable[Any]) -> Any:
    return await call


async def test_an_open_update_has_one_digest_ends_with_a_new_begin_and_is_given_up_when_nothing_comes(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = admin_pb.UpdateWeightsRequest(stays_open=True, is_last=True)
    stale, ours = piece(b"stale", begins_file=True, is_last=True), piece(NEW, begins_file=True, is_last=True)
    stale.stays_open = ours.stays_open = True
    async with running_stack(worker(), weights_dirs=[weights]) as stack:
        await pause(stack)
        await update(stack, stale)
        other = piece(NEW, begins_file=True, is_last=True)
        other.weights_digest = NEW_DIGEST
        code, message = await refusal_of(update(stack, other))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "an update is open" in message
        await update(stack, begin)
        await update(stack, ours)
        assert await update(stack, admin_pb.UpdateWeightsRequest(is_last=True)) == NEW_DIGEST

        refused = asyncio.Event()

        async def stalling() -> AsyncIterator[admin_pb.UpdateWeightsRequest]:
            yield piece(NEW, begins_file=True)
            await refused.wait()

        monkeypatch.setattr("scheduler_svc.engine.weight_update.LONGEST_STALL_S", 0.05)
        code, message = await refusal_of(stack.admin.UpdateWeights(stalling()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "no piece of the update came" in message
        refused.set()
        await resume(stack)


async def test_what_waits_outside_the_queue_in_a_pause_counts_for_its_limits(weights: Path) -> None:
    async with running_stack(worker(), weights_dirs=[weights], max_waiting_requests=3) as stack:
        await pause(stack, admin_pb.PAUSE_MODE_WAIT)
        tasks = [asyncio.create_task(collect(stack, asking(number, request_id=f"r{number}"))) for number in range(3)]
        await until(lambda: stack.engine.waiting.num_waiting == 3)
        code, _ = await refusal_of(collect(stack, asking(3)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await resume(stack)
        await asyncio.gather(*tasks)
        assert not stack.engine.waiting.num_waiting


class SlowToWake(FakeWorker):
    """Takes its time to wake up."""

    def wake(self) -> None:
        time.sleep(0.3)
        super().wake()


async def test_calls_that_are_cut_come_to_their_end(weights: Path) -> None:
    async with running_stack(SlowToWake(updates_weights=True, **SLOW), weights_dirs=[weights]) as stack:
        tasks = await running_requests(stack, 1, max_tokens=100)
        waiting = admin_pb.PauseRequest(mode=admin_pb.PAUSE_MODE_WAIT)
        assert (await refusal_of(stack.admin.Pause(waiting, timeout=0.05)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: stack.engine.weights.is_paused)
        await asyncio.gather(*tasks)
        await resume(stack)
        await stack.admin.Sleep(admin_pb.SleepRequest())
        awake = stack.admin.WakeUp(admin_pb.WakeUpRequest(), timeout=0.1)
        assert (await refusal_of(awake))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await collect(stack, asking(1, 5))).token_ids


async def test_weights_that_were_served_before_come_back_with_their_prefixes_also_in_a_replay(
    weights: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    async with running_stack(worker(weights / "newer"), weights_dirs=[weights], step_log=log) as stack:
        await collect(stack, asking(1, 20))
        for name in ("new", "newer"):
            await pause(stack)
            await update(stack, source(name))
            await resume(stack)
        again = (await collect(stack, asking(1, 20))).finished
        assert again is not None
        assert again.usage.num_cached_tokens == 32
    check_replay(log)


async def test_after_files_an_executor_with_older_weights_stays_out(weights: Path) -> None:
    async with running_stack(worker(weights / "newer"), weights_dirs=[weights], loses_soon=True) as stack:
        await pause(stack)
        await update(stack, piece(NEW, begins_file=True, is_last=True))
        await resume(stack)
        await stack.executor.kill()
        stack.executor.worker = worker(weights / "newer")
        await stack.executor.start()
        await until(lambda: "it has older weights" in stack.driver.last_trouble)
        version = await stack.admin.GetWeightVersion(admin_pb.GetWeightVersionRequest())
        assert version.weights_digest == NEW_DIGEST


async def test_an_executor_that_fails_leaves_and_its_requests_go_on_with_the_new_weights(weights: Path) -> None:
    class Failing(FakeWorker):
        def update_weights(self, folder: Path, weights_digest: str, agree: Agree = lambda _: None) -> None:
            raise DeviceLostError("the weights were overwritten half way")

    bad = Failing(updates_weights=True, **SLOW)
    async with (
        running_stack(worker(**SLOW), bad, weights_dirs=[weights], loses_soon=True) as stack,
        running_stack(worker(weights / "new")) as fresh,
    ):
        tasks = await running_requests(stack, 4)
        await pause(stack, KEEP)
        await update(stack, source("new"))
        assert "overwritten half way" in stack.driver_of(stack.executors[1]).last_trouble
        await resume(stack)
        for answer in [await task for task in tasks]:
            assert len(answer.token_ids) == 60
            if not any(span.keeps_cache for span in spans(answer)):
                assert (await rest_of(answer, fresh, 60)).token_ids == answer.token_ids[spans(answer)[1].first_token :]


async def test_a_front_that_joins_again_and_a_client_that_goes_on_go_on_with_the_new_weights(weights: Path) -> None:
    async with running_stack(worker(**SLOW), weights_dirs=[weights], fronts=1) as stack:
        tasks = await running_requests(stack, 2, max_tokens=150)
        await pause(stack)
        await update(stack, source("new"))
        await resume(stack)
        await until(lambda: sum(map(stack.num_groups_on, stack.executors)))
        [session] = stack.link.sessions
        session.close()
        await until(lambda: session not in stack.link.sessions)
        answers = [await task for task in tasks]
        assert [len(answer.token_ids) for answer in answers] == [150, 150]
        assert all(spans(answer)[-1].weights_digest == NEW_DIGEST for answer in answers)


async def test_an_executor_that_is_started_again_gets_the_weights_that_are_served(weights: Path) -> None:
    async with running_stack(worker(), worker(), weights_dirs=[weights], loses_soon=True) as stack:
        await pause(stack)
        await update(stack, source("new"))
        await resume(stack)
        again = stack.executors[1]
        await again.kill()
        await until(lambda: len(stack.engine.fleet.planners) == 1)
        again.worker = worker()
        await again.start()
        await until(lambda: len(stack.engine.fleet.planners) == 2)
        assert again.worker.info.weights_digest == NEW_DIGEST


@pytest.mark.parametrize("mode", [admin_pb.PAUSE_MODE_ABORT, admin_pb.PAUSE_MODE_WAIT], ids=["abort", "wait"])
async def test_a_pause_ends_live_requests_or_waits_for_them_while_new_ones_wait(
    weights: Path, mode: "admin_pb.PauseMode.ValueType"
) -> None:
    async with running_stack(worker(**SLOW), weights_dirs=[weights]) as stack:
        tasks = await running_requests(stack, 2)
        pausing = asyncio.create_task(pause(stack, mode))
        await until(lambda: stack.engine.weights.mode is not None)
        new = asyncio.create_task(collect(stack, asking(30, 5, request_id="new")))
        await until(lambda: ("", "new") in stack.engine.requests)
        explained = await stack.admin.ExplainRequest(admin_pb.ExplainRequestRequest(request_id="new"))
        assert "the fleet is paused" in explained.explanation
        await pausing
        if mode == admin_pb.PAUSE_MODE_ABORT:
            assert {(await refusal_of(task))[0] for task in tasks} == {grpc.StatusCode.ABORTED}
        else:
            assert [len((await task).token_ids) for task in tasks] == [60, 60]
        assert not new.done()
        await update(stack, source("new"))
        await resume(stack)
        answer = await new
        assert [span.weights_digest for span in spans(answer)] == [NEW_DIGEST]


async def test_a_request_that_requires_the_same_numerics_ends_when_the_weights_change(weights: Path) -> None:
    async with running_stack(worker(**SLOW), weights_dirs=[weights]) as stack:
        request = asking(1)
        request.require_same_numerics = True
        task = asyncio.create_task(collect(stack, request))
        await until(lambda: any(live.num_output_tokens for live in stack.engine.requests.values()))
        await pause(stack)
        await update(stack, source("new"))
        code, words = await refusal_of(task)
        assert (code, "the weights have changed" in words) == (grpc.StatusCode.ABORTED, True)


async def test_asleep_nothing_is_computed_and_awake_everything_goes_on(weights: Path) -> None:
    async with running_stack(worker(**SLOW), worker(**SLOW), weights_dirs=[weights]) as stack:
        alone = [await collect(stack, asking(number)) for number in range(3)]
        tasks = await running_requests(stack, 3)
        for level in (1, 2):
            await stack.admin.Sleep(admin_pb.SleepRequest(level=level))
            assert (await refusal_of(resume(stack)))[0] is grpc.StatusCode.FAILED_PRECONDITION
            if level == 2:
                code, words = await refusal_of(stack.admin.WakeUp(admin_pb.WakeUpRequest()))
                assert (code, "there are no weights" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)
                await update(stack, source("new"))
            await stack.admin.WakeUp(admin_pb.WakeUpRequest())
            await until(lambda: sum(map(stack.num_groups_on, stack.executors)))
        answers = [await task for task in tasks]
        for answer, whole in zip(answers, alone, strict=True):
            begin = spans(answer)[1].first_token
            assert answer.token_ids[:begin] == whole.token_ids[:begin]
            assert len(answer.token_ids) == 60
        again = await collect(stack, asking(1))
        await stack.admin.ResetPrefixCache(admin_pb.ResetPrefixCacheRequest())
        later = await collect(stack, asking(1))
        assert again.token_ids == later.token_ids
        assert later.finished is not None
        assert later.finished.usage.num_cached_tokens == 0


async def test_executors_without_the_setting_take_no_weights() -> None:
    async with running_stack(worker(), None) as stack:
        await pause(stack)
        code, words = await refusal_of(update(stack, source("new")))
        assert (code, "takes no other weights; start all executors with --weights-dir" in words) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            True,
        )
        await resume(stack)
        assert len((await collect(stack, asking(1))).token_ids) == 60


async def test_an_executor_runs_no_step_that_is_meant_for_other_weights_or_goes_on_with_slots_of_older_ones_unasked(
    loading_executor: Executor, weights: Path
) -> None:
    executor = loading_executor
    executor.worker.info = replace(executor.worker.info, updates_weights=True)
    executor.servicer._weight_updates = WeightUpdates([weights])
    await executor.load()
    offer = pb2.AttachRequest(scheduler_id="a", lease_ms=10_000, min_wire_version=2, max_wire_version=2)
    offer.capabilities.extend([capability_pb2.CAPABILITY_NUMERICS, capability_pb2.CAPABILITY_WEIGHT_VERSIONS])
    epoch = (await executor.stub.Attach(offer)).epoch
    stream = await executor.open_stream(epoch)
    old = executor.worker.info.weights_version
    await stream.run(_meant_for(first_step(epoch), old))

    begin = pb2.UpdateWeightsBegin(
        epoch=epoch, instance_id=executor.worker.info.instance_id, after_step_id=1, source="new"
    )

    async def messages() -> AsyncIterator[pb2.UpdateWeightsRequest]:
        yield pb2.UpdateWeightsRequest(begin=begin)

    await executor.stub.UpdateWeights(messages())
    new = executor.worker.info.weights_version
    assert new != old
    for version, keeps_live, words in ((old, True, "expects version"), (new, False, "older weights have computed")):
        step = _meant_for(decode_step(epoch, 2), version)
        step.keeps_live = keeps_live
        code, details = await refusal(stream.run(step))
        assert words in details, code
        stream = await executor.open_stream(epoch, 1)
    kept = _meant_for(decode_step(epoch, 2), new)
    kept.keeps_live = True
    assert (await stream.run(kept)).weights_version == new


def _meant_for(step: step_pb2.ExecuteModelRequest, version: int) -> step_pb2.ExecuteModelRequest:
    step.expected_weights_version = version
    step.feature_bits |= 1 << capability_pb2.CAPABILITY_WEIGHT_VERSIONS
    return step
