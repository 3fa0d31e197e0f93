"""The one thread that runs steps, and the queue before it.

`StepRunner` owns the worker. Everything that touches the worker goes through one queue of one
thread, so steps run strictly in order, a picture of the table is always taken between two steps,
and the event loop never waits for the model. Read next: `executor_svc/step_stream.py`, which feeds
the queue, and `executor_svc/worker.py`, what runs at its end.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from executor_svc.attachment import Attachment
from executor_svc.step_log import StepLog
from executor_svc.worker import Worker
from octavo.execution.v1 import step_pb2
from shared import wire
from shared.errors import InvalidStepError, StepFailedError, UnavailableError

T = TypeVar("T")

Response = step_pb2.ExecuteModelResponse

_logger = logging.getLogger(__name__)


class StepRunner:
    """Runs steps of the current epoch, each once, in the order of their ids.

    The event loop calls the public methods. Of the loop's state the thread reads two values that are
    replaced in one piece: the attachment's epoch, to drop the steps of older ones, and `draining`.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._worker: Worker | None = None
        self._log = StepLog()
        self._failure: str | None = None
        self._draining = False

    @property
    def worker(self) -> Worker:
        """The worker. Only its `info` may be read outside of the thread.

        Raises: UnavailableError: it is still loading, or the executor is shutting down.
        """
        if self._draining:
            raise UnavailableError("the executor is shutting down")
        if self._worker is None:
            raise UnavailableError("the model is loading")
        return self._worker

    @property
    def last_executed_step_id(self) -> int:
        """The last step of this epoch whose response was made; 0: none."""
        return self._log.last_step_id

    def responses_since(self, step_id: int) -> list[Response]:
        """Return the stored responses after `step_id`, without waiting for the running step.

        Raises: StepGapError: they are not all kept, or `step_id` was never executed.
        """
        return self._log.since(step_id)

    async def load(self, load_worker: Callable[[], Worker]) -> None:
        """Make the worker, on the thread that will run it. Raises what `load_worker` raises."""
        self._worker = await self._on_thread(load_worker)

    async def reset(self) -> None:
        """Begin a new epoch: empty the worker's table and the log.

        Returns after the running step has ended. The attachment has the new epoch already, so that
        the steps still queued before this are dropped.
        """
        worker = self.worker

        def begin_epoch() -> None:
            worker.reset()
            self._log = StepLog()
            self._failure = None

        await self._on_thread(begin_epoch)

    async def run(self, message: step_pb2.ExecuteModelRequest) -> Response:
        """Run one step, or return its stored response. Raises as `submit` delivers."""
        worker = self.worker
        return await self._on_thread(lambda: self._run(worker, message))

    def submit(self, message: step_pb2.ExecuteModelRequest, deliver: Callable[[Response | Exception], None]) -> None:
        """Queue one step; `deliver` gets its response, or its error, on the event loop.

        Errors: FencedError (older epoch), StepGapError, InvalidStepError (nothing was written),
        StepFailedError (this and all later steps of the epoch), UnavailableError (shutting down).
        """
        worker, loop = self.worker, asyncio.get_running_loop()

        def run_and_deliver() -> None:
            result: Response | Exception
            try:
                result = self._run(worker, message)
            except Exception as error:  # crosses to the loop as a value and is raised there
                result = error
            loop.call_soon_threadsafe(deliver, result)

        self._thread.submit(run_and_deliver)

    async def between_steps(self, look: Callable[[Worker, StepLog], T]) -> T:
        """Call `look` on the thread, behind the steps that are queued now, and return its answer."""
        worker = self.worker
        return await self._on_thread(lambda: look(worker, self._log))

    async def drain(self) -> None:
        """Refuse new work, drop the queued steps and return when the running one has ended."""
        self._draining = True
        await self._on_thread(lambda: None)

    def close(self) -> None:
        """Let the thread go; do not wait for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _run(self, worker: Worker, message: step_pb2.ExecuteModelRequest) -> Response:
        if self._draining:
            raise UnavailableError("the executor is shutting down")
        self._attachment.require(message.epoch)
        if self._failure is not None:
            raise StepFailedError(f"{self._failure}; attach anew")
        stored = self._log.find(message.step_id)
        if stored is not None:
            return stored
        step = wire.decode_step(message)
        try:
            response = wire.encode_result(worker.execute(step))
        except InvalidStepError:
            raise
        except Exception as error:
            # The table and the cache may be half changed: no later step may run on them.
            self._failure = f"step {message.step_id} failed ({type(error).__name__})"
            _logger.error("event=step_failed epoch=%d step_id=%d error=%s", message.epoch, message.step_id, error)
            raise
        self._log.append(response)
        return response
