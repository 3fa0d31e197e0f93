"""New weights on their way to the executors of a fleet: each has an update of its own, and takes it at its own pace."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from octavo.execution.v1 import execution_service_pb2
from octavo_shared.errors import CallerError, NoExecutorError
from scheduler_svc.executors.driver import ExecutorDriver
from scheduler_svc.executors.session import ExecutorLostError

Chunk = execution_service_pb2.WeightsChunk
Chunks = AsyncIterator[Chunk]

# How long the next piece of an update may take to come, and one that was given up to end.
LONGEST_STALL_S = 30.0
# Chunks that wait for one executor: the slowest one sets the pace.
_MAX_WAITING_CHUNKS = 2


class WeightUpdate:
    """An update of one executor, which takes its chunks at its own pace.

    Args:
        driver: Of the executor, which is attached.
        source, weights_digest: As of `UpdateWeights`.

    Attributes:
        session: That of the executor.
    """

    def __init__(self, driver: ExecutorDriver, source: str, weights_digest: str) -> None:
        assert driver.session is not None, "it is attached"
        self.session = driver.session
        self._queue: asyncio.Queue[Chunk | None] = asyncio.Queue(_MAX_WAITING_CHUNKS)
        self._is_over = False
        self._task = asyncio.ensure_future(self.session.update_weights(source, weights_digest, self._chunks()))
        self._task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[tuple[str, str]]) -> None:
        self.give_up()  # gRPC waits for the next chunk, also of a call that has ended
        if not task.cancelled():
            task.exception()  # nobody may ask

    async def _chunks(self) -> Chunks:
        while (chunk := await self._queue.get()) is not None and not self._is_over:
            yield chunk

    async def send(self, chunk: Chunk | None) -> bool:
        """Send a chunk, None behind the last one; return whether the executor still takes some."""
        putting = asyncio.ensure_future(self._queue.put(chunk))
        await asyncio.wait({putting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        putting.cancel()
        return not self._task.done()

    async def finish(self) -> tuple[str, str]:
        """Return what the executor has now: model_hash and weights_digest. Raises what it fails with."""
        await self.send(None)
        return await self._task

    def give_up(self) -> None:
        """Let it end before the last chunk: the executor refuses it, and goes on with what it has."""
        self._is_over = True
        if self._queue.empty():
            self._queue.put_nowait(None)

    async def wait(self) -> None:
        """Return once it has ended, however."""
        await asyncio.wait({self._task}, timeout=LONGEST_STALL_S)
        self._task.cancel()


def most_frequent(outcomes: Sequence[tuple[str, str] | BaseException]) -> tuple[str, str]:
    """Return what most executors have now. Raises what says most, if all have failed."""
    if done := [outcome for outcome in outcomes if isinstance(outcome, tuple)]:
        return Counter(done).most_common(1)[0][0]
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in errors:
        if not isinstance(error, ExecutorLostError):
            raise error
    raise NoExecutorError("no executor is left", str(errors[0]))


async def send_to_all(chunks: Chunks, updates: Sequence[WeightUpdate]) -> None:
    """Send chunks to all executors that take them. Raises CallerError: none came for long."""
    takers: list[WeightUpdate] = list(updates)
    while takers:
        try:
            chunk = await asyncio.wait_for(anext(chunks, None), LONGEST_STALL_S)
        except TimeoutError as error:
            raise CallerError(f"no piece of the update came for {LONGEST_STALL_S:g} s; it was given up") from error
        if chunk is None:
            return
        takers = [update for update in takers if await update.send(chunk)]
