"""Steps at both ends: rank 0 sends each on and runs it, the others run what they get.

All ranks keep the same batch table, because they apply the same steps. What a step does to a table, and
whether it is refused, depends on nothing else, so the ranks agree on that without a word.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

from executor_svc.parallel.connection import Connection, FrameKind
from executor_svc.parallel.step_channel import StepChannel
from executor_svc.running_step import RunningStep
from executor_svc.worker import Worker
from octavo.execution.v1 import step_pb2
from shared.batch_table import BatchTable
from shared.errors import InvalidStepError, StepFailedError
from shared.executor_info import ExecutorInfo, TokenizerFile
from shared.step import Step, StepResult
from shared.wire import decode_step, encode_step


class EndGroup(Protocol):
    """Ends this process, and with it the group; the others see the connection close."""

    def __call__(self, reason: str) -> NoReturn:
        """End it, with a sentence for people."""


class LeaderWorker:
    """Rank 0's worker as the service sees it; see `executor_svc.worker.Worker`.

    Args:
        worker: Runs this rank's part.
        channel: To the other ranks, all connected.
        end_group: For a step that failed here while the others wait for this rank in a collective.
    """

    def __init__(self, worker: Worker, channel: StepChannel, end_group: EndGroup) -> None:
        self._worker = worker
        self._channel = channel
        self._end_group = end_group

    @property
    def info(self) -> ExecutorInfo:
        """What this executor is; constant over its life."""
        return self._worker.info

    @property
    def table(self) -> BatchTable:
        """The batch table of rank 0; the others have the same."""
        return self._worker.table

    def reset(self) -> None:
        """Empty the batch table of every rank."""
        self._channel.send(FrameKind.RESET)
        self._worker.reset()

    def launch(self, step: Step) -> RunningStep:
        """Launch a step on every rank; see `Worker.launch`. If it failed in the middle, the process ends."""
        self._channel.send(FrameKind.STEP, encode_step(step).SerializeToString())
        with _ending_group(self._end_group):
            return LeaderStep(self._worker.launch(step), self._end_group)

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return tokenizer.json and its companions; empty if the model has no tokenizer.json."""
        return self._worker.tokenizer_files()


@dataclass(frozen=True, slots=True)
class LeaderStep:
    """A step of rank 0 that ends the group if it fails; see `executor_svc.running_step.RunningStep`."""

    step: RunningStep
    end_group: EndGroup

    def is_done(self) -> bool:
        """Return whether rank 0 is done with it, and with it all ranks that it waits for."""
        return self.step.is_done()

    def wait(self) -> None:
        """Return when rank 0 is done with it."""
        self.step.wait()

    def finish(self) -> StepResult:
        """Return the answer; if the step failed on the device, the process ends."""
        with _ending_group(self.end_group):
            return self.step.finish()


@contextmanager
def _ending_group(end_group: EndGroup) -> Iterator[None]:
    """End the group if a step fails here while the other ranks go on."""
    try:
        yield
    except StepFailedError as error:
        if is_alike_on_all_ranks(error):
            raise
        end_group(f"{error}; a group of several ranks cannot go on after that")


def follow(worker: Worker, connection: Connection) -> None:
    """Run what rank 0 sends until it says stop.

    Raises: StepFailedError: a step failed on this rank alone; rank 0 was told.
    """
    follower = _Follower(worker)
    while (frame := connection.frames.get())[0] is not FrameKind.STOP:
        kind, payload = frame
        try:
            if kind is FrameKind.RESET:
                follower.reset()
            else:
                follower.launch(decode_step(step_pb2.ExecuteModelRequest.FromString(payload)))
                follower.finish_all_but(0 if connection.frames.empty() else 1)
        except Exception as error:
            connection.send(FrameKind.FAILED, str(error).encode())
            raise


def is_alike_on_all_ranks(error: StepFailedError) -> bool:
    """Return whether every rank fails this step in the same way: by a check, before anything is computed."""
    return error.__cause__ is None


class _Follower:
    """Launches what rank 0 launches; a step is finished when there is nothing to launch, or behind the next launch."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._running: deque[RunningStep] = deque()

    def reset(self) -> None:
        """Empty the batch table, behind the steps that run."""
        self.finish_all_but(0)
        self._worker.reset()

    def launch(self, step: Step) -> None:
        """Launch a step, if every rank can."""
        try:
            self._running.append(self._worker.launch(step))
        except InvalidStepError:
            pass  # rank 0 refuses it as well, and answers for all
        except StepFailedError as error:
            if not is_alike_on_all_ranks(error):
                raise

    def finish_all_but(self, num_left: int) -> None:
        """Finish steps until only so many run."""
        while len(self._running) > num_left:
            self._running.popleft().finish()
