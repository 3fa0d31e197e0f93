"""The one thread that launches and finishes steps, and the queue before it.

`StepRunner` owns the worker. Everything that touches the worker goes through one queue of one
thread, so steps run strictly in order, a picture of the table is always taken between two steps,
and the event loop never waits for the model. A step is decoded when it arrives, while the one before runs. A step that
a device is still computing leaves the thread free to launch the next one; a second thread waits for the device, and
then has the first finish the step.
Read next: `step_thread.py`; `step_stream.py`, which feeds the queue; `executor_svc/worker/interface.py`, what runs at
its end.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from executor_svc.service.attachment import Attachment
from executor_svc.service.block_names import BlockNames
from executor_svc.service.kept_responses import KeptResponses
from executor_svc.service.step_meter import StepMeter, StepTokens
from executor_svc.service.step_thread import StepThread, wake
from executor_svc.transfers.pending import Reason
from executor_svc.transfers.transfers import Transfers
from executor_svc.worker.interface import RunningStep, Worker, num_pooled_tokens
from octavo.execution.v1 import step_pb2
from octavo_shared.errors import DeviceLostError, FencedError, InvalidStepError, StepFailedError, UnavailableError
from octavo_shared.process.events import Event
from octavo_shared.step_wire import wire
from octavo_shared.step_wire.cache_group import firsts_of
from octavo_shared.step_wire.executor_info import Capability, ExecutorInfo
from octavo_shared.step_wire.step import BoolArray, Step, StepResult, TableDelta
from octavo_shared.step_wire.wire_agreement import WireAgreement

T = TypeVar("T")

Response = step_pb2.ExecuteModelResponse
Deliver = Callable[[Response | Exception], None]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Arrived:
    """A step that waits for the thread: its message, decoded, or the error, and the callback for the answer.

    An error is told in the step's turn.
    """

    message: step_pb2.ExecuteModelRequest
    step: Step | Exception
    deliver: Deliver


@dataclass(slots=True)
class _Running:
    """A launched step, and the callback for its response; `was_active`: the slots that were active before it.

    `num_pooled`: tokens of its texts to be pooled.
    """

    message: step_pb2.ExecuteModelRequest
    step: RunningStep
    delta: TableDelta
    was_active: BoolArray
    num_pooled: int
    deliver: Deliver


class StepRunner:
    """Runs steps of the current epoch, each once, in the order of their ids.

    `meter` counts the steps.

    The event loop calls the public methods. Of the loop's state the thread reads two values that are
    replaced in one piece: the attachment's epoch, to drop the steps of older ones, and `draining`. Of the thread's
    state the loop reads the agreement, which belongs to an epoch: its first step comes after `reset` has returned.
    """

    def __init__(self, attachment: Attachment, thread: StepThread, transfers: Transfers) -> None:
        self.meter = StepMeter()
        self._transfers = transfers
        self._attachment = attachment
        self._thread = thread
        self._running: deque[_Running] = deque()  # in the order of their launch
        self._worker: Worker | None = None
        self._log = KeptResponses()
        self._next_step_id = 1
        self._agreement = WireAgreement()
        self._names = BlockNames(0)
        self._failure: str | None = None
        self._draining = False
        self._sleep_level = 0
        self._must_release = False  # the next step releases all live slots, or keeps them on purpose
        self._has_lost_cache = False  # it cannot keep them
        self._lost_device: DeviceLostError | None = None
        self._device_is_lost = asyncio.Event()

    @property
    def worker(self) -> Worker:
        """The worker. Only its `info` may be read outside of the thread.

        Raises: UnavailableError: it is still loading, or the executor is shutting down.
        """
        if self._draining:
            raise UnavailableError("the executor is shutting down")
        self._require_device()
        if self._worker is None:
            raise UnavailableError("the model is loading")
        return self._worker

    @property
    def info(self) -> ExecutorInfo | None:
        """What the executor is; None: its model is loading."""
        return None if self._worker is None else self._worker.info

    @property
    def last_executed_step_id(self) -> int:
        """The last step of this epoch with a response; 0: none."""
        return self._log.last_step_id

    @property
    def step_cpu_time_us(self) -> int | None:
        """Processor time of the thread that runs steps, and of the threads that it waits for, in microseconds.

        None: it is not known.
        """
        cpu_time_us = self._thread.cpu_time_us
        if cpu_time_us is None or self._worker is None:
            return cpu_time_us
        return cpu_time_us + self._worker.helper_cpu_time_us

    @property
    def changes_weights(self) -> bool:
        """Whether the attached scheduler may change weights."""
        return Capability.WEIGHT_VERSIONS in self._agreement.capabilities

    def responses_since(self, step_id: int) -> list[Response]:
        """Return the stored responses after `step_id`, without waiting for the running step.

        Raises: StepGapError: they are not all kept, or `step_id` was never executed.
        """
        return self._log.since(step_id)

    async def load(self, load_worker: Callable[[], Worker]) -> None:
        """Make the worker, on the thread that will run it. Raises what `load_worker` raises."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._worker = await self._thread.run(load_worker)
        self._names = BlockNames(self._worker.info.num_device_blocks)
        self._transfers.start(self._worker)

    async def device_lost(self) -> DeviceLostError:
        """Return when a step, or a new epoch, has found that the device computes nothing any more."""
        await self._device_is_lost.wait()
        assert self._lost_device is not None
        return self._lost_device

    async def reset(self, agreement: WireAgreement, *, keeps_names: bool = False) -> int:
        """Begin a new epoch with steps that keep to `agreement`: empty the worker's table and the log.

        Returns after the running step has ended, with how many names of blocks are left: none unless `keeps_names`.
        The attachment has the new epoch already, so that the steps still queued before this are dropped.
        """
        worker = self.worker

        def begin_epoch() -> int:
            self._finish_all()
            self._transfers.cancel_all(Reason.ATTACH, "a scheduler attached")
            self._require_device()
            uses_groups = Capability.CACHE_GROUPS in agreement.capabilities
            is_laid_out = uses_groups is (Capability.CACHE_GROUPS in self._agreement.capabilities)
            with self._ending_if_lost():
                if self._sleep_level == 2:
                    raise DeviceLostError("its scheduler, for which it sleeps without weights, has gone")
                if self._sleep_level:
                    worker.wake()
                self._sleep_level = 0
                worker.reset(uses_groups=uses_groups)
            self._transfers.reset(worker, uses_groups=uses_groups)
            # A step that failed may have written anything.
            if not (keeps_names and is_laid_out) or self._failure is not None:
                self._names = BlockNames(int(firsts_of(worker.info.pools(agreed=uses_groups))[-1]))
            self._log = KeptResponses()
            self._next_step_id = 1
            self._agreement = agreement
            self._failure = None
            self._must_release = self._has_lost_cache = False
            return self._names.begin_listing()

        return await self._thread.run(begin_epoch)

    async def kept_names(self, begin: int) -> tuple[step_pb2.RegisteredBlocks, int]:
        """Return a page of the names that `reset` kept; see `BlockNames.page`."""
        return await self._thread.run(lambda: self._names.page(begin))

    async def clear_names(self) -> None:
        """Forget all names of blocks."""
        await self._thread.run(self._names.clear)

    async def run(self, message: step_pb2.ExecuteModelRequest) -> Response:
        """Run one step, or return its stored response. Raises as `submit` delivers."""
        worker, step = self.worker, self._decode(message)

        def run() -> Response:
            answers: list[Response | Exception] = []
            self._launch(worker, _Arrived(message, step, answers.append))
            self._finish_all()
            [answer] = answers
            if isinstance(answer, Exception):
                raise answer
            return answer

        return await self._thread.run(run)

    def submit(self, message: step_pb2.ExecuteModelRequest, deliver: Deliver) -> None:
        """Queue one step; `deliver` gets its response, or its error, on the event loop.

        Errors: FencedError (older epoch), StepGapError, InvalidStepError (nothing was written),
        StepFailedError (this and all later steps of the epoch), UnavailableError (shutting down).
        """
        worker, loop = self._worker, self._loop
        assert worker is not None, "submitted to a stream, which opens once the model is loaded"
        arrived = _Arrived(message, self._decode(message), lambda answer: wake(loop, deliver, answer))
        self._thread.submit(lambda: self._launch(worker, arrived))

    async def between_steps(self, look: Callable[[Worker, KeptResponses], T]) -> T:
        """Call `look` on the thread, behind the steps that are queued now, and return its answer."""
        worker = self.worker

        def finish_and_look() -> T:
            self._finish_all()
            return look(worker, self._log)

        return await self._thread.run(finish_and_look)

    async def update_weights(self, epoch: int, after_step_id: int, folder: Path, weights_digest: str) -> ExecutorInfo:
        """Put other weights in place, behind the last step of an epoch; see `Worker.update_weights`.

        Returns what the executor is now. Raises what the worker raises; FencedError: it is not the last step.
        """

        def update(worker: Worker) -> None:
            worker.update_weights(folder, weights_digest)

        return await self._between_steps(epoch, after_step_id, update)

    async def sleep(self, epoch: int, after_step_id: int, level: int) -> None:
        """Give memory back, behind the last step of an epoch; see `Worker.sleep`. Raises: see `update_weights`."""

        def sleep(worker: Worker) -> None:
            self._transfers.cancel_all(Reason.WEIGHTS, "the executor sleeps")  # they read the cache, which goes
            worker.sleep(level)
            self._sleep_level, self._has_lost_cache = level, True

        await self._between_steps(epoch, after_step_id, sleep)

    async def wake(self, epoch: int) -> None:
        """End `sleep`. Raises: FencedError: the epoch has ended, or there are no weights."""
        worker = self.worker

        def wake() -> None:
            self._attachment.require(epoch)
            if self._sleep_level:
                with self._ending_if_lost():
                    worker.wake()
                self._sleep_level = 0

        await self._thread.run(wake)

    async def _between_steps(self, epoch: int, after_step_id: int, change: Callable[[Worker], None]) -> ExecutorInfo:
        """Change what blocks were computed with, or their contents: no name and no transfer outlives it."""
        worker = self.worker

        def make() -> ExecutorInfo:
            self._finish_all()
            self._require_device()
            self._attachment.require(epoch)
            if after_step_id != self._next_step_id - 1:
                raise FencedError(f"step {after_step_id} is not the last one, {self._next_step_id - 1}")
            with self._ending_if_lost():
                change(worker)
            self._transfers.follow_weights(worker)
            self._names.clear()
            self._must_release = True
            return worker.info

        return await self._thread.run(make)

    @contextlib.contextmanager
    def _ending_if_lost(self) -> Iterator[None]:
        try:
            yield
        except DeviceLostError as error:
            self._lose_device(error)
            raise

    async def drain(self) -> None:
        """Refuse new work, drop the queued steps and return when the running ones have ended."""
        self._draining = True

        def end_all() -> None:
            self._transfers.cancel_all(Reason.DRAIN, "the executor is shutting down")
            self._finish_all()

        await self._thread.run(end_all)

    def close(self) -> None:
        """Let the threads go; do not wait for them."""
        self._thread.close()

    def _decode(self, message: step_pb2.ExecuteModelRequest) -> Step | Exception:
        """Return what a message says, or what is wrong with it."""
        try:
            self._agreement.check_step(message)
            return wire.decode_step(message)
        except Exception as error:  # a value for the waiting caller, in the order of the steps
            return error

    def _launch(self, worker: Worker, arrived: _Arrived) -> None:
        """Launch a step; finish it at once if nothing is to be waited for."""
        message, step, deliver = arrived.message, arrived.step, arrived.deliver
        try:
            stored = self._stored_response(message)
            if stored is not None:
                self._thread.answer(lambda: deliver(stored))
                return
            if isinstance(step, Exception):
                raise step
            if self.changes_weights:
                self._check_version(worker, message, step)
            if len(step.registered_blocks):
                self._names.check(step)
            self._transfers.check(step)
            with self._failing(message), self.meter.launching():
                was_active = worker.table.active.copy()
                running = worker.launch(step)
                self._names.follow(step, worker.table, was_active)
                self._transfers.begin(step)
                self._must_release = self._has_lost_cache = False
        except Exception as error:  # a value for the waiting caller, in the order of the steps
            self._finish_all()
            answer = error
            self._thread.answer(lambda: deliver(answer))
            return
        self._next_step_id += 1
        self._running.append(_Running(message, running, step.delta, was_active, num_pooled_tokens(step), deliver))
        self._finish_done()
        if self._running:
            self._thread.wait(lambda: self._wait_for(running))

    def _stored_response(self, message: step_pb2.ExecuteModelRequest) -> Response | None:
        """Return the response of a step that was executed; None: it is the next one to launch.

        Raises: FencedError, StepGapError, StepFailedError, UnavailableError: it cannot be run.
        """
        if self._draining:
            raise UnavailableError("the executor is shutting down")
        self._require_device()
        self._attachment.require(message.epoch)
        if self._failure is not None:
            raise StepFailedError(f"{self._failure}; attach again")
        if message.step_id == self._next_step_id:
            if self._names.is_being_listed:
                raise FencedError("the block names kept by Attach have been neither listed nor released")
            return None
        self._finish_all()
        return self._log.find(message.step_id)

    def _check_version(self, worker: Worker, message: step_pb2.ExecuteModelRequest, step: Step) -> None:
        """Accept a step that is meant for the weights that there are.

        Raises: FencedError: it is not, or the executor sleeps. InvalidStepError: it goes on with slots that older
            weights have computed, or whose cache is gone.
        """
        if self._sleep_level:
            raise FencedError("the executor sleeps; wake it first")
        if not message.HasField("expected_weights_version"):
            raise InvalidStepError(f"step {step.step_id} has no expected_weights_version")
        if message.expected_weights_version != worker.info.weights_version:
            raise FencedError(
                f"step {step.step_id} expects version {message.expected_weights_version:016x} of the weights; there is "
                f"version {worker.info.weights_version:016x}"
            )
        if self._must_release and (self._has_lost_cache or not step.keeps_live):
            live = worker.table.live.copy()
            live[step.delta.released_slots] = False
            if live.any():
                why = (
                    "whose cache is gone after Sleep; release it"
                    if self._has_lost_cache
                    else "which older weights have computed; release it, or set keeps_live"
                )
                raise InvalidStepError(f"step {step.step_id} goes on with slot {int(live.argmax())}, {why}")

    def _wait_for(self, step: RunningStep) -> None:
        """Wait for the device, on the thread for that; then have the step finished."""
        with contextlib.suppress(Exception):  # `finish` raises it as well
            step.wait()
        self._thread.submit(self._finish_done)

    def _finish_done(self) -> None:
        """Finish the steps that need no more waiting, in order."""
        while self._running and self._running[0].step.is_done():
            self._finish_first()

    def _finish_all(self) -> None:
        while self._running:
            self._finish_first()
        self._thread.wait_for_answers()

    def _finish_first(self) -> None:
        first = self._running.popleft()
        result: StepResult | Exception
        try:
            if self._failure is not None:
                raise StepFailedError(f"{self._failure}; attach again")
            with self._failing(first.message):
                result = first.step.finish()
                self._transfers.take_ended(result)
        except Exception as error:
            result = error
        self._thread.answer(lambda: self._answer(first, result))

    def _answer(self, finished: _Running, result: StepResult | Exception) -> None:
        """Count a finished step, keep its response and hand it out; on the answering thread."""
        try:
            if isinstance(result, Exception):
                raise result
            with self._failing(finished.message):
                if Capability.ROW_FLAGS not in self._agreement.capabilities:
                    result.row_flags = None
                if Capability.GRAMMARS_READY not in self._agreement.capabilities:
                    result.grammars_loaded = ()
                response = wire.encode_result(result)
                if self.changes_weights:  # it was that of the weights
                    response.weights_version = finished.message.expected_weights_version
                if self._agreement.has_feature_bits:
                    response.feature_bits = finished.message.feature_bits
        except Exception as error:
            self.meter.failed()
            finished.deliver(error)
            return
        tokens = StepTokens.of(finished.delta, finished.was_active, finished.num_pooled)
        self.meter.finished(response.execute_duration_us * 1e-6, tokens)
        self._log.append(response)
        finished.deliver(response)

    @contextlib.contextmanager
    def _failing(self, message: step_pb2.ExecuteModelRequest) -> Iterator[None]:
        """Let no step run any more if this one fails half way: the table and the cache may be half changed."""
        try:
            yield
        except InvalidStepError:
            raise
        except Exception as error:
            self._failure = f"step {message.step_id} failed ({type(error).__name__})"
            _logger.error(Event("step_failed", epoch=message.epoch, step_id=message.step_id, error=str(error)))
            if isinstance(error, DeviceLostError):
                self._lose_device(error)
            raise

    def _lose_device(self, error: DeviceLostError) -> None:
        self._lost_device = error
        self._loop.call_soon_threadsafe(self._device_is_lost.set)

    def _require_device(self) -> None:
        """Raise UnavailableError if the device is lost: no epoch that begins now could run a step."""
        if self._lost_device is not None:
            raise UnavailableError(f"{self._lost_device}; the process exits to be restarted")
