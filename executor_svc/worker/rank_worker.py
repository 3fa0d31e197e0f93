"""Steps at both ends: rank 0 sends each on and runs it, the others run what they get. Next: `rank_blocks.py`.

All ranks keep the same batch table, because they apply the same steps. What a step does to a table, and
whether it is refused, depends on nothing else, so the ranks agree on that without a word.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from executor_svc.parallel.connection import Connection, FrameKind
from executor_svc.parallel.rank_channel import RankChannel
from executor_svc.worker.interface import Buffer, RunningStep, Worker, WorkerAround
from executor_svc.worker.rank_blocks import GroupBlocks, RankShare
from executor_svc.worker.rank_weights import RankWorker, update_all, update_share
from octavo.execution.v1 import step_pb2
from octavo_shared.errors import InvalidStepError, ModelLoadError, StepFailedError
from octavo_shared.step_wire.step import Int32Array, Step, StepResult
from octavo_shared.step_wire.wire import decode_step, encode_step


class EndGroup(Protocol):
    """Ends this process, and with it the group; the others see the connection close."""

    def __call__(self, reason: str) -> NoReturn:
        """End it, with a sentence for people."""


class LeaderWorker(WorkerAround):
    """Rank 0's worker as the service sees it; see `executor_svc.worker.interface.Worker`.

    Args:
        worker: Runs this rank's part.
        steps, blocks: To the other ranks, all connected.
        end_group: For a step that failed here while the others wait for this rank in a collective.
    """

    def __init__(self, worker: RankWorker, steps: RankChannel, blocks: RankChannel, end_group: EndGroup) -> None:
        super().__init__(worker)
        self._share = worker
        self._steps = steps
        self._blocks = GroupBlocks(worker, blocks.connections)
        self._end_group = end_group

    def reset(self, *, uses_groups: bool = False) -> None:
        """Empty the batch table of every rank."""
        self._steps.send(FrameKind.RESET, bytes([uses_groups]))
        super().reset(uses_groups=uses_groups)

    def launch(self, step: Step) -> RunningStep:
        """Launch a step on every rank; see `Worker.launch`. If it failed in the middle, the process ends."""
        self._steps.send(FrameKind.STEP, encode_step(step).SerializeToString())
        with _ending_group(self._end_group):
            return LeaderStep(self._worker.launch(step), self._end_group)

    def update_weights(self, folder: Path, weights_digest: str) -> None:
        """Update the weights of every rank, or of none; see `Worker.update_weights`."""
        update_all(self._share, self._steps.connections, folder, weights_digest)

    def sleep(self, level: int) -> None:
        """Have every rank sleep; see `Worker.sleep`."""
        self._steps.send(FrameKind.SLEEP, bytes([level]))
        super().sleep(level)

    def wake(self) -> None:
        """Wake every rank; see `Worker.wake`."""
        self._steps.send(FrameKind.WAKE)
        super().wake()

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Of the shares of all ranks; see `Worker.block_bytes`."""
        return self._blocks.block_bytes

    def begin_transfers(self) -> None:
        """Begin them on every rank; see `Worker.begin_transfers`."""
        self._steps.send(FrameKind.BEGIN_TRANSFERS)
        self._blocks.begin()

    def read_blocks(self, block_ids: Int32Array) -> Buffer:
        """Return the shares of all ranks; see `Worker.read_blocks`."""
        return self._blocks.read(block_ids)

    def write_blocks(self, block_ids: Int32Array, content: Buffer) -> None:
        """Give every rank its share; see `Worker.write_blocks`."""
        self._blocks.write(block_ids, content)


@dataclass(frozen=True, slots=True)
class LeaderStep:
    """A step of rank 0 that ends the group if it fails; see `executor_svc.worker.interface.RunningStep`."""

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
        end_group(f"{error}; a group of several ranks cannot continue after that")


def follow(worker: RankWorker, steps: Connection, blocks: Connection) -> None:
    """Run what rank 0 sends until it says stop, and serve it blocks.

    Raises: StepFailedError: a step failed on this rank alone; rank 0 was told.
    """
    follower = _Follower(worker, steps.nudge)
    share = RankShare(worker, blocks)
    try:
        while (frame := steps.frames.get()) is None or frame[0] is not FrameKind.STOP:
            if frame is None:
                follower.finish_done()
            elif frame[0] is FrameKind.RESET:
                follower.reset(uses_groups=frame[1] == bytes([True]))
            elif frame[0] is FrameKind.BEGIN_TRANSFERS:
                share.begin()
            elif frame[0] is FrameKind.UPDATE_WEIGHTS:
                follower.finish_all()
                update_share(worker, steps, Path(frame[1].decode()))
            elif frame[0] is FrameKind.SLEEP:
                follower.finish_all()
                worker.sleep(frame[1][0])
            elif frame[0] is FrameKind.WAKE:
                with suppress(ModelLoadError):  # rank 0 has no weights either
                    worker.wake()
            else:
                follower.launch(decode_step(step_pb2.ExecuteModelRequest.FromString(frame[1])))
    except Exception as error:
        steps.send(FrameKind.FAILED, str(error).encode())
        raise
    finally:
        follower.close()


def is_alike_on_all_ranks(error: StepFailedError) -> bool:
    """Return whether every rank fails this step in the same way: by a check, before anything is computed."""
    return error.__cause__ is None


class _Follower:
    """Launches what rank 0 launches, as soon as it comes, and finishes a step when the device is done with it.

    It never waits for the device in between: the next step may come while this one runs, and rank 0 has launched it
    already. What a rank launches does not depend on when it finishes steps, so the collectives of all ranks come in
    the order of the steps. A second thread waits for the device, also when no frame comes: a failure is told at once.

    Args:
        worker: Runs this rank's part.
        nudge: Has `follow` call `finish_done`; called on the second thread.
    """

    def __init__(self, worker: Worker, nudge: Callable[[], None]) -> None:
        self._worker = worker
        self._nudge = nudge
        self._running: deque[RunningStep] = deque()  # in the order of their launch
        self._waiting_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    def reset(self, *, uses_groups: bool) -> None:
        """Empty the batch table, behind the steps that run: rank 0 has finished them."""
        self.finish_all()
        self._worker.reset(uses_groups=uses_groups)

    def finish_all(self) -> None:
        """Finish all steps that run."""
        while self._running:
            self._running.popleft().finish()

    def launch(self, step: Step) -> None:
        """Launch a step, if every rank can."""
        try:
            running = self._worker.launch(step)
        except InvalidStepError:
            return  # rank 0 refuses it as well, and answers for all
        except StepFailedError as error:
            if not is_alike_on_all_ranks(error):
                raise
            return
        self._running.append(running)
        self.finish_done()
        if self._running:
            self._waiting_thread.submit(self._wait_for, running)

    def finish_done(self) -> None:
        """Finish the steps that the device is done with, in order."""
        while self._running and self._running[0].is_done():
            self._running.popleft().finish()

    def close(self) -> None:
        """Let the second thread go; do not wait for it."""
        self._waiting_thread.shutdown(wait=False, cancel_futures=True)

    def _wait_for(self, step: RunningStep) -> None:
        with suppress(Exception):  # `finish` raises it as well
            step.wait()
        self._nudge()
