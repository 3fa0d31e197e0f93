"""Steps on a device: the next is launched while one runs, and answers come in the order of the steps."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.attachment import Attachment
from executor_svc.service.step_runner import Response, StepRunner
from executor_svc.service.step_thread import StepThread
from executor_svc.transfers.transfers import Transfers
from executor_svc.worker.interface import DoneStep, RunningStep
from octavo.execution.v1 import step_pb2
from octavo_shared.errors import DeviceLostError, InvalidStepError, StepFailedError, StepGapError, UnavailableError
from octavo_shared.step_wire import wire
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind
from octavo_shared.step_wire.executor_info import Capability
from octavo_shared.step_wire.step import Step, TableDelta, pairs
from octavo_shared.step_wire.wire import encode_step, feature_bits_of
from octavo_shared.step_wire.wire_agreement import WireAgreement
from tests.support.steps import StepOnDevice
from tests.support.tables import admission


class WorkerOfDevice(FakeWorker):
    """A fake whose steps run on until the test ends them, but for those of `done_step_ids`."""

    reset_error: Exception | None = None

    def __init__(self) -> None:
        super().__init__(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, updates_weights=True)
        self.launched: list[StepOnDevice] = []
        self.done_step_ids: set[int] = set()
        self.launches = threading.Semaphore(0)

    def reset(self, *, uses_groups: bool = False) -> None:
        super().reset(uses_groups=uses_groups)
        if self.reset_error is not None:
            raise self.reset_error

    def launch(self, step: Step) -> RunningStep:
        result = self.execute(step)
        self.launches.release()
        if step.step_id in self.done_step_ids:
            return DoneStep(result)
        self.launched.append(StepOnDevice(result))
        return self.launched[-1]


class Runner:
    def __init__(self) -> None:
        self.worker = WorkerOfDevice()
        self.attachment = Attachment()
        self.runner = StepRunner(self.attachment, StepThread(), Transfers())
        self.answers: asyncio.Queue[Response | Exception] = asyncio.Queue()

    async def start(self) -> None:
        await self.runner.load(lambda: self.worker)
        self.epoch = self.attachment.acquire("a", 1_000.0, now=0.0)
        await self.runner.reset(WireAgreement())

    def request(self, step_id: int) -> step_pb2.ExecuteModelRequest:
        delta = TableDelta()
        if step_id == 1:
            delta = TableDelta(admissions=(admission(num_tokens=3, blocks=(0,)),), prefill_chunks=pairs((0, 3)))
        return encode_step(Step(self.epoch, step_id, delta))

    async def submit(self, *step_ids: int) -> None:
        """Submit steps and wait until all of them were launched."""
        for step_id in step_ids:
            self.runner.submit(self.request(step_id), self.answers.put_nowait)
        for _ in step_ids:
            await asyncio.to_thread(self.worker.launches.acquire)

    async def answered_id(self) -> int:
        answer = await self.answers.get()
        assert not isinstance(answer, Exception), answer
        return answer.step_id

    def end(self, *indices: int) -> None:
        for index in indices:
            self.worker.launched[index].ended.set()

    def fail(self, index: int) -> None:
        self.worker.launched[index].error = StepFailedError("step failed: out of memory")
        self.end(index)


@pytest.fixture
async def steps() -> AsyncIterator[Runner]:
    runner = Runner()
    await runner.start()
    yield runner
    runner.end(*range(len(runner.worker.launched)))
    runner.runner.close()


async def test_the_next_step_is_launched_while_one_runs(steps: Runner) -> None:
    await steps.submit(1, 2)
    assert steps.answers.empty()
    assert not steps.worker.launched[0].is_done()

    steps.end(0)
    assert await steps.answered_id() == 1
    await steps.submit(3)  # behind a step that runs, while the thread waits for nothing
    steps.end(1, 2)
    assert [await steps.answered_id(), await steps.answered_id()] == [2, 3]


async def test_between_two_steps_their_thread_neither_decodes_nor_encodes_nor_wakes_the_loop(
    steps: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_call(*args: object) -> object:
            threads.add(f"{call.__name__} on {threading.current_thread().name}")
            return call(*args)

        return note_and_call

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(wire, "decode_step", noted(wire.decode_step))
    monkeypatch.setattr(wire, "encode_result", noted(wire.encode_result))
    monkeypatch.setattr(loop, "call_soon_threadsafe", noted(loop.call_soon_threadsafe))
    steps.worker.done_step_ids = {1, 2, 3}
    for step_id in (1, 2, 3):
        steps.runner.submit(steps.request(step_id), steps.answers.put_nowait)
    assert [await steps.answered_id() for _ in range(3)] == [1, 2, 3]

    assert threads == {
        "decode_step on MainThread",
        "encode_result on answers",
        "call_soon_threadsafe on answers",
    }


async def test_a_step_that_ends_early_is_answered_in_its_turn(steps: Runner) -> None:
    steps.worker.done_step_ids = {2}
    await steps.submit(1, 2)
    assert steps.answers.empty()

    steps.end(0)
    assert [await steps.answered_id(), await steps.answered_id()] == [1, 2]


async def test_steps_that_are_done_are_answered_at_once(steps: Runner) -> None:
    steps.worker.done_step_ids = {1, 2}
    await steps.submit(1, 2)
    assert [await steps.answered_id(), await steps.answered_id()] == [1, 2]
    assert steps.runner.last_executed_step_id == 2


async def test_what_fails_on_the_device_fails_every_step_behind_it_until_the_next_epoch(steps: Runner) -> None:
    await steps.submit(1, 2)
    steps.fail(0)
    steps.end(1)

    errors = [await steps.answers.get() for _ in range(2)]
    assert [type(error) for error in errors] == [StepFailedError, StepFailedError]
    assert "out of memory" in str(errors[0])
    assert "attach again" in str(errors[1])
    assert steps.runner.last_executed_step_id == 0

    steps.epoch = steps.attachment.acquire("a", 1_000.0, now=0.0)
    await steps.runner.reset(WireAgreement())
    await steps.submit(1)
    steps.end(2)
    assert await steps.answered_id() == 1


async def test_a_lost_device_is_told_and_no_epoch_begins_any_more(steps: Runner) -> None:
    told = asyncio.create_task(steps.runner.device_lost())
    await steps.submit(1)
    steps.worker.launched[0].error = DeviceLostError("step 1 failed: no launch; the device is lost: no answer")
    steps.end(0)

    assert isinstance(await steps.answers.get(), DeviceLostError)
    assert str(await told) == "step 1 failed: no launch; the device is lost: no answer"
    with pytest.raises(UnavailableError, match="the device is lost: no answer; the process exits"):
        await steps.runner.reset(WireAgreement())


async def test_an_attach_that_finds_the_device_lost_begins_no_epoch(steps: Runner) -> None:
    await steps.submit(1)
    steps.worker.launched[0].error = DeviceLostError("the device is lost")
    steps.epoch = steps.attachment.acquire("a", 1_000.0, now=0.0)
    reset = asyncio.create_task(steps.runner.reset(WireAgreement()))
    steps.end(0)
    with pytest.raises(UnavailableError, match="the device is lost"):
        await reset


async def test_an_attach_that_finds_no_memory_for_another_layout_ends_the_process(steps: Runner) -> None:
    told = asyncio.create_task(steps.runner.device_lost())
    steps.worker.reset_error = DeviceLostError("laying out the KV cache anew failed: no memory")
    with pytest.raises(DeviceLostError, match="no memory"):
        await steps.runner.reset(WireAgreement())
    assert await told is steps.worker.reset_error
    with pytest.raises(UnavailableError, match="the process exits to be restarted"):
        await steps.runner.reset(WireAgreement())


async def test_a_step_that_fails_on_a_device_that_computes_loses_nothing(steps: Runner) -> None:
    told = asyncio.create_task(steps.runner.device_lost())
    await steps.submit(1)
    steps.fail(0)
    await steps.answers.get()
    await steps.runner.reset(WireAgreement())
    assert not told.done()
    told.cancel()


async def test_a_step_that_is_sent_again_while_it_runs_is_answered_twice_and_run_once(steps: Runner) -> None:
    await steps.submit(1)
    steps.runner.submit(steps.request(1), steps.answers.put_nowait)
    steps.end(0)

    assert [await steps.answered_id(), await steps.answered_id()] == [1, 1]
    assert len(steps.worker.launched) == 1


async def test_a_gap_is_seen_behind_running_steps(steps: Runner) -> None:
    await steps.submit(1)
    steps.runner.submit(steps.request(3), steps.answers.put_nowait)
    steps.end(0)

    assert await steps.answered_id() == 1
    error = await steps.answers.get()
    assert isinstance(error, StepGapError)
    assert str(error) == "step 3 arrived after step 1; step 2 is missing"


async def test_a_look_at_the_table_waits_for_the_steps_that_run(steps: Runner) -> None:
    await steps.submit(1)
    look = asyncio.create_task(steps.runner.between_steps(lambda _, log: log.last_step_id))
    steps.end(0)
    assert await look == 1


async def test_a_new_epoch_begins_behind_the_steps_that_run(steps: Runner) -> None:
    await steps.submit(1)
    steps.epoch = steps.attachment.acquire("a", 1_000.0, now=0.0)
    reset = asyncio.create_task(steps.runner.reset(WireAgreement()))
    steps.end(0)
    await reset
    assert await steps.answered_id() == 1
    assert steps.runner.last_executed_step_id == 0
    assert not steps.worker.table.live.any()


async def test_the_next_scheduler_gets_the_names_of_saved_states_too(steps: Runner) -> None:
    groups = CacheGroup(CacheKind.FULL, (0,), 16, 8), CacheGroup(CacheKind.STATE, (1,), 16, 3)
    steps.worker.info = replace(steps.worker.info, cache_groups=groups)
    agreement = WireAgreement(2, frozenset({Capability.NAMED_BLOCKS, Capability.CACHE_GROUPS, Capability.STATES}))
    await steps.runner.reset(agreement)
    steps.worker.done_step_ids.add(1)
    step = Step(steps.epoch, 1, TableDelta(), registered_blocks=np.array([10], np.int32), block_names=b"n" * 16)
    await steps.runner.run(encode_step(step, feature_bits_of(step)))

    assert await steps.runner.reset(agreement, keeps_names=True) == 1
    page, _ = await steps.runner.kept_names(0)
    assert list(page.block_ids) == [10]


async def test_draining_answers_the_steps_that_run_before_it_refuses_one_that_comes_late(steps: Runner) -> None:
    await steps.submit(1)
    drained = asyncio.create_task(steps.runner.drain())
    await asyncio.sleep(0)  # it has begun
    steps.runner.submit(steps.request(2), steps.answers.put_nowait)
    steps.end(0)
    await drained
    assert await steps.answered_id() == 1
    assert isinstance(await steps.answers.get(), UnavailableError)


async def test_one_step_alone_is_answered_when_it_has_run(steps: Runner) -> None:
    running = asyncio.create_task(steps.runner.run(steps.request(1)))
    await asyncio.to_thread(steps.worker.launches.acquire)
    steps.end(0)
    assert (await running).step_id == 1


@pytest.mark.parametrize("sleeps", [False, True])
async def test_slots_go_on_behind_an_update_but_not_behind_a_sleep(steps: Runner, sleeps: bool, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    capabilities = frozenset({Capability.NUMERICS, Capability.WEIGHT_VERSIONS})
    await steps.runner.reset(WireAgreement(2, capabilities))
    steps.worker.done_step_ids = {1, 2}

    async def run(step_id: int, *, keeps_live: bool = False) -> Response:
        request = steps.request(step_id)
        request.keeps_live = keeps_live
        request.expected_weights_version = steps.worker.info.weights_version
        request.feature_bits = 1 << Capability.WEIGHT_VERSIONS
        return await steps.runner.run(request)

    await run(1)
    if sleeps:
        await steps.runner.sleep(steps.epoch, 1, 1)
        await steps.runner.wake(steps.epoch)
    await steps.runner.update_weights(steps.epoch, 1, tmp_path, "")
    if not sleeps:
        assert (await run(2, keeps_live=True)).step_id == 2
        return
    with pytest.raises(InvalidStepError, match="slot 0, whose cache is gone after Sleep; release it"):
        await run(2, keeps_live=True)


def test_the_threads_end_though_they_are_closed_while_one_waits_for_the_other() -> None:
    before = set(threading.enumerate())
    thread, entered, closed = StepThread(), threading.Event(), threading.Event()
    answers: list[str] = []

    def answer_and_wait() -> None:
        entered.set()
        closed.wait()
        thread.answer(lambda: answers.append("answered"))
        thread.wait_for_answers()

    thread.start()
    thread.submit(answer_and_wait)
    thread.submit(lambda: answers.append("a step that is dropped"))
    own = set(threading.enumerate()) - before
    entered.wait()
    thread.close()
    closed.set()

    for each in own:
        each.join(60)
    assert not any(each.is_alive() for each in own)
    assert answers == ["answered"]
