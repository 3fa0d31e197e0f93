"""An executor whose steps run on while the next are launched, as a GPU's do: same answers, whatever breaks."""

import asyncio
import queue
import threading
import time

import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.worker.interface import RunningStep
from octavo_shared.step_wire.step import Step, StepResult
from tests.contract.test_executor_loss import REQUESTS, assert_same, sent, tokens_arrived
from tests.support.stack import Answer, collect, running_stack, token_request

STEP_S = 0.003


@pytest.fixture
async def undisturbed() -> list[Answer]:
    """What an executor answers whose steps are done when they are launched."""
    async with running_stack() as stack:
        return list(await asyncio.gather(*(collect(stack, request) for request in REQUESTS)))


class StepOnDevice:
    """Done when the device has come to it; see `executor_svc.worker.interface.RunningStep`."""

    def __init__(self, result: StepResult) -> None:
        self.result = result
        self.ended = threading.Event()

    def is_done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        self.ended.wait()

    def finish(self) -> StepResult:
        self.ended.wait()
        return self.result


class WorkerOfDevice(FakeWorker):
    """A fake whose steps are launched at once, and end one after the other on a device that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: queue.SimpleQueue[StepOnDevice | None] = queue.SimpleQueue()
        self.max_in_flight = 0
        self._num_launched = self._num_ended = 0
        self._device = threading.Thread(target=self._run, daemon=True)
        self._device.start()

    def launch(self, step: Step) -> RunningStep:
        launched = StepOnDevice(self.execute(step))
        self._num_launched += 1
        self.max_in_flight = max(self.max_in_flight, self._num_launched - self._num_ended)
        self.launched.put(launched)
        return launched

    def close(self) -> None:
        self.launched.put(None)
        self._device.join()

    def _run(self) -> None:
        while (step := self.launched.get()) is not None:
            time.sleep(STEP_S)  # what a step takes
            self._num_ended += 1
            step.ended.set()


@pytest.mark.parametrize("steps_in_flight", [2, 4])
async def test_steps_are_on_the_device_together_and_answers_are_the_same(
    steps_in_flight: int, undisturbed: list[Answer]
) -> None:
    worker = WorkerOfDevice()
    async with running_stack(worker, steps_in_flight=steps_in_flight) as stack:
        assert_same(list(await asyncio.gather(*(collect(stack, request) for request in REQUESTS))), undisturbed)
        assert stack.driver.num_losses == 0
    assert 2 <= worker.max_in_flight <= steps_in_flight
    worker.close()


async def test_many_streams_come_and_go() -> None:
    requests = [token_request(5 + index % 40, 3 + index % 17, first_id=index % 90) for index in range(64)]
    async with running_stack() as stack:
        plain = await asyncio.gather(*(collect(stack, request) for request in requests))
    worker = WorkerOfDevice()
    async with running_stack(worker) as stack:
        assert_same(list(await asyncio.gather(*(collect(stack, request) for request in requests))), list(plain))
    worker.close()


async def test_a_broken_stream_is_resumed_with_steps_on_the_device(undisturbed: list[Answer]) -> None:
    worker = WorkerOfDevice()
    async with running_stack(worker) as stack:
        answers = asyncio.gather(*(collect(stack, request) for request in REQUESTS))
        for num_tokens in (1, 10, 20):
            await tokens_arrived(stack, num_tokens)
            stack.executor.break_connections()
        assert_same(await answers, undisturbed)
        assert stack.driver.num_losses == 0
    worker.close()


async def test_a_replaced_executor_goes_on_with_steps_on_the_device(undisturbed: list[Answer]) -> None:
    worker = WorkerOfDevice()
    async with running_stack(worker) as stack:
        answers = await sent(stack)
        await tokens_arrived(stack, 10)
        await stack.executor.kill()
        stack.executor.worker = WorkerOfDevice()
        await stack.executor.start()
        assert_same(await answers, undisturbed)
        assert stack.driver.num_losses == 1
    worker.close()
