"""One attachment of an executor: keep the lease, carry steps over one stream.

A stream that breaks is opened again and resumed by step id: the executor sends lost responses again, and the
session sends later steps again byte for byte. If the address refuses connections, the process has exited, and
the session does not wait. A stream that cannot be resumed raises `ExecutorLostError`; the caller attaches anew
and computes its sequences again. Read next: `stream.py` for a single stream, `driver.py` for the caller.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc
import grpc.aio
import numpy as np

from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import execution_service_pb2_grpc as pb_grpc
from octavo.execution.v1 import step_pb2
from octavo_shared.errors import CallerError, ExecutorFaultError, FencedError, InvalidStepError, OctavoServiceError
from octavo_shared.grpc.grpc_status import failure_text
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event
from octavo_shared.step_wire.cache_group import firsts_of
from octavo_shared.step_wire.executor_info import Capability, ExecutorInfo, TokenizerFile, is_digest
from octavo_shared.step_wire.step import Int32Array, Step, StepResult, find_repeated, no_slots
from octavo_shared.step_wire.wire import decode_registered_blocks, decode_result, encode_step, feature_bits_of
from octavo_shared.step_wire.wire_agreement import WireAgreement
from scheduler_svc.executors.stream import StepStream, StreamBrokenError, read_message, write_message

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

MAX_HASH_CHARS = 256

# Most resumes without a result between them: a stream that always breaks at the same message will not carry it.
MAX_RESUMES_IN_A_ROW = 5

# An executor says that it leaves in the answer of a heartbeat, so this is known after at most so many seconds.
LONGEST_HEARTBEAT_INTERVAL_S = 1.0


async def stays() -> None:
    """Ignore that the executor leaves."""


class ExecutorLostError(OctavoServiceError):
    """The attachment is over; its sequences must be computed again."""


@dataclass(frozen=True, slots=True)
class SessionTimings:
    """Times in seconds. A lease outlives a few lost heartbeats and a whole resume.

    The sockets of a killed process close one after another: the first attempt to resume may still be accepted and then
    reset. gRPC connects again after 0.1 s and fails earlier attempts. After that, `resume_interval_s` is the most until
    the session sees that no process listens any more.
    """

    lease_s: float = 10.0
    heartbeat_interval_s: float = 2.0
    connect_timeout_s: float = 5.0
    resume_timeout_s: float = 3.0
    resume_interval_s: float = 0.02
    step_timeout_s: float = 600.0
    detach_timeout_s: float = 1.0


class ExecutorSession:
    """One attachment: steps go out in order, results come back in order.

    One task at a time may send, and one may receive.

    Attributes:
        is_resuming: Whether the stream broke, and another one is being opened.
        on_heartbeat: Called with the round trip of each answered heartbeat, in seconds.
        on_leaving: Awaited at each answer of a heartbeat that says that the executor leaves.
        arrived_at_s: When the last message was read from the stream: monotonic time in seconds.
        write_began_at_s: When the write of the last step began, likewise.
        agreement: What was agreed on at Attach.
        kept_blocks: Cached device blocks that the executor has kept, and their names, one after the other.
    """

    def __init__(
        self,
        stub: "pb_grpc.ExecutionServiceAsyncStub",
        epoch: int,
        info: ExecutorInfo,
        timings: SessionTimings,
        address: str,
        agreement: WireAgreement,
    ) -> None:
        self.epoch = epoch
        self.info = info
        self.agreement = agreement
        self._address = address  # for the log
        self._stub = stub
        self._timings = timings
        self._stream: StepStream | None = None
        self._unanswered: deque[step_pb2.ExecuteModelRequest] = deque()
        self._last_received_step_id = 0
        self._step_timer: asyncio.TimerHandle | None = None
        self._reason_to_give_up = ""
        self._has_ended = asyncio.Event()
        self._weights_version = info.weights_version if self.changes_weights else None
        self._stream_lock = asyncio.Lock()
        self._num_resumes_in_a_row = 0
        self._heartbeat_answered_at_s = monotonic_s()
        self.is_resuming = False
        self.arrived_at_s = 0.0
        self.write_began_at_s = 0.0
        self.on_heartbeat: Callable[[float], None] = lambda _: None
        self.on_leaving: Callable[[], Awaitable[None]] = stays
        self.kept_blocks: tuple[Int32Array, bytes] = no_slots(), b""

    @property
    def changes_weights(self) -> bool:
        """Whether the executor takes other weights."""
        return Capability.WEIGHT_VERSIONS in self.agreement.capabilities

    def trouble(self, now_s: float) -> str:
        """Return what is wrong with the connection, in words; empty: no trouble is known. `now_s` is monotonic."""
        if self.is_resuming:
            return f"its step stream broke; it is lost unless it answers within {self._timings.resume_timeout_s:g} s"
        silent_s = now_s - self._heartbeat_answered_at_s
        if silent_s <= 2 * self._timings.heartbeat_interval_s:
            return ""
        return f"no heartbeat answered for {silent_s:.1f} s; it is lost after {self._timings.lease_s:g} s"

    async def get_tokenizer(self) -> tuple[TokenizerFile, ...]:
        """Fetch the tokenizer files; empty: the model has none.

        Raises: ExecutorLostError: it does not answer.
        """
        try:
            response = await self._stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=self._timings.connect_timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return ()
            raise ExecutorLostError(f"GetTokenizer failed: {error.details()}") from error
        return tuple(TokenizerFile(file.name, file.content) for file in response.files)

    async def list_kept_blocks(self) -> None:
        """Read the cached blocks that the executor has kept of an earlier attachment into `kept_blocks`.

        Raises: ExecutorLostError: it does not answer.
        """
        block_ids, names, page_token = [], [], 0
        try:
            while True:
                request = pb.ListRegisteredBlocksRequest(
                    epoch=self.epoch, instance_id=self.info.instance_id, page_token=page_token
                )
                page = await self._stub.ListRegisteredBlocks(request, timeout=self._timings.connect_timeout_s)
                of_page, names_of_page = decode_registered_blocks(page.blocks)
                block_ids.append(of_page)
                names.append(names_of_page)
                if page.next_page_token <= page_token:
                    break
                page_token = page.next_page_token
        except grpc.aio.AioRpcError as error:
            raise ExecutorLostError(f"ListRegisteredBlocks failed: {error.details()}") from error
        except InvalidStepError as error:
            raise ExecutorFaultError(f"its list of kept blocks is invalid: {error}") from error
        kept = np.concatenate(block_ids)
        inside = (kept >= 0) & (kept < firsts_of(self.info.pools(agreed=True))[-1])
        if find_repeated(kept) is not None or not inside.all():
            raise ExecutorFaultError("its list of kept blocks has unknown or duplicate blocks")
        self.kept_blocks = kept, b"".join(names)

    async def update_weights(
        self, source: str, weights_digest: str, chunks: AsyncIterator[pb.WeightsChunk]
    ) -> tuple[str, str]:
        """Put other weights in place; no step may be in flight, and none is sent before the answer.

        Args:
            source: A folder of the executor's --weights-dir; empty: `chunks` has the files.
            weights_digest: That they must have; empty: any.
            chunks: As above.

        Returns: model_hash and weights_digest, which `info` has from now on.

        Raises:
            CallerError: the executor refuses them, and goes on with the weights that it has; FencedError: for now.
            ExecutorLostError: it is lost.
        """

        async def messages() -> AsyncIterator[pb.UpdateWeightsRequest]:
            begin = pb.UpdateWeightsBegin(
                epoch=self.epoch,
                instance_id=self.info.instance_id,
                after_step_id=self._last_received_step_id,
                source=source,
                weights_digest=weights_digest,
            )
            yield pb.UpdateWeightsRequest(begin=begin)
            async for chunk in chunks:
                yield pb.UpdateWeightsRequest(chunk=chunk)

        answer = await self._between_steps("UpdateWeights", self._stub.UpdateWeights(messages()))
        if not is_digest(answer.info.weights_digest):
            raise self._lost("it does not tell the digest of its new weights")
        self.info = replace(
            self.info, model_hash=answer.info.model_hash[:MAX_HASH_CHARS], weights_digest=answer.info.weights_digest
        )
        self._weights_version = self.info.weights_version
        return self.info.model_hash, self.info.weights_digest

    async def sleep(self, level: int) -> None:
        """Let the executor give memory back until `wake`. Raises as `update_weights`."""
        request = pb.SleepRequest(
            epoch=self.epoch,
            instance_id=self.info.instance_id,
            after_step_id=self._last_received_step_id,
            level=level,
        )
        await self._between_steps("Sleep", self._stub.Sleep(request))

    async def wake(self) -> None:
        """End `sleep`. Raises as `update_weights`."""
        request = pb.WakeRequest(epoch=self.epoch, instance_id=self.info.instance_id)
        await self._between_steps("Wake", self._stub.Wake(request))

    async def _between_steps(self, name: str, call: Awaitable[_Answer]) -> _Answer:
        """Return the answer to a call that may take long: as long as the session lives."""
        answering, ending = asyncio.ensure_future(call), asyncio.ensure_future(self._has_ended.wait())
        try:
            await asyncio.wait({answering, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ExecutorLostError(self._reason_to_give_up or f"the executor was lost during {name}")
            return answering.result()
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
                kind = CallerError if error.code() is grpc.StatusCode.INVALID_ARGUMENT else FencedError
                raise kind(error.details() or f"{name} was refused") from error
            raise self._lost(f"{name} failed: {failure_text(error)}") from error
        finally:
            answering.cancel()
            ending.cancel()

    def _lost(self, reason: str) -> ExecutorLostError:
        self.give_up(reason)
        return ExecutorLostError(reason)

    async def send(self, step: Step) -> int:
        """Send a step; return the size of its message in bytes.

        A broken stream is not noticed here: `receive` sees it and sends the step again.

        Raises: ExecutorLostError: the session ended while the executor did not read.
        """
        bits = feature_bits_of(step) if self.agreement.has_feature_bits else None
        message = encode_step(step, feature_bits=bits)
        if self._weights_version is not None:
            message.expected_weights_version = self._weights_version
            message.feature_bits |= 1 << Capability.WEIGHT_VERSIONS
        async with self._stream_lock:  # a resume sends all unanswered steps; none may be added meanwhile
            assert self._stream is not None, "open() comes first"
            self._unanswered.append(message)
            if len(self._unanswered) == 1:
                self._restart_step_timer()
            request = pb.StreamStepsRequest(step=message)
            self.write_began_at_s = monotonic_s()
            with self._telling_why_it_is_cancelled():
                await write_message(self._stream, request)
        return message.ByteSize()

    async def receive(self) -> StepResult:
        """Wait for the result of the oldest unanswered step; watch the stream while there is none.

        Raises:
            ExecutorLostError: the stream could not be resumed, the step took longer than step_timeout_s, or
                the answer is not a step's result.
            ExecutorFaultError: the answer breaks the agreement made at Attach.
        """
        while True:
            assert self._stream is not None, "open() comes first"
            try:
                with self._telling_why_it_is_cancelled():
                    response = await read_message(self._stream)
                self.arrived_at_s = monotonic_s()
                return self._accept(response)
            except StreamBrokenError as broken:
                await self._resume(broken)

    async def open(self) -> None:
        """Open the stream for the first time.

        Raises: ExecutorLostError: the executor does not start it.
        """
        try:
            self._stream = await self._start_stream()
        except StreamBrokenError as broken:
            raise ExecutorLostError(str(broken)) from broken

    def close(self) -> None:
        """Cancel the stream."""
        self._has_ended.set()
        if self._step_timer is not None:
            self._step_timer.cancel()
        if self._stream is not None:
            self._stream.cancel()

    async def detach(self, largest_incarnation: int = 0) -> None:
        """End the lease, so that another scheduler may attach at once; if this fails, the lease expires by itself.

        `largest_incarnation`: the largest one seen of a scheduler with our id, so that the next one will be larger.
        """
        request = pb.DetachRequest(
            epoch=self.epoch, instance_id=self.info.instance_id, largest_incarnation=largest_incarnation
        )
        with contextlib.suppress(grpc.aio.AioRpcError, ExecutorFaultError):
            await self._stub.Detach(request, timeout=self._timings.detach_timeout_s)

    async def keep_lease(self) -> None:
        """Send heartbeats until cancelled; end the session if none is answered for a whole lease.

        The executor answers them while a step runs, so silence means that it is frozen or cut off.
        """
        interval_s, lease_s = self._timings.heartbeat_interval_s, self._timings.lease_s
        self._heartbeat_answered_at_s = monotonic_s()
        request = pb.HeartbeatRequest(epoch=self.epoch, instance_id=self.info.instance_id)
        while True:
            await asyncio.sleep(min(interval_s, LONGEST_HEARTBEAT_INTERVAL_S))
            sent_at_s = monotonic_s()
            try:
                response = await self._stub.Heartbeat(request, timeout=interval_s)
                self._heartbeat_answered_at_s = monotonic_s()
                self.on_heartbeat(self._heartbeat_answered_at_s - sent_at_s)
                if response.is_leaving:
                    await self.on_leaving()
            except grpc.aio.AioRpcError as error:
                text = failure_text(error)
                log.warning(Event("heartbeat_failed", executor=self._address, epoch=self.epoch, cause=text))
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    self.give_up(text)
                elif monotonic_s() - self._heartbeat_answered_at_s > lease_s:
                    self.give_up(f"no heartbeat was answered for {lease_s:g} s")
            except ExecutorFaultError as error:
                self.give_up(str(error))

    async def step_cpu_time_us(self, timeout_s: float) -> int | None:
        """Ask for the processor time of the threads that run steps; None: the executor does not say, or not in time."""
        request = pb.HeartbeatRequest(epoch=self.epoch, instance_id=self.info.instance_id)
        try:
            response = await self._stub.Heartbeat(request, timeout=timeout_s)
        except (grpc.aio.AioRpcError, ExecutorFaultError):
            return None  # `keep_lease` says what is wrong
        return response.step_cpu_time_us if response.HasField("step_cpu_time_us") else None

    @contextlib.contextmanager
    def _telling_why_it_is_cancelled(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            if self._reason_to_give_up:  # the stream was cancelled, not this task
                raise ExecutorLostError(self._reason_to_give_up) from None
            raise

    def _accept(self, response: pb.StreamStepsResponse) -> StepResult:
        if response.WhichOneof("message") != "step":
            raise ExecutorLostError("the executor sent an unexpected message instead of a step result")
        self._last_received_step_id = response.step.step_id
        self._num_resumes_in_a_row = 0
        sent_bits = self._unanswered.popleft().feature_bits if self._unanswered else 0
        self._restart_step_timer()
        self.agreement.check_answer(response.step, sent_bits)
        if self._weights_version is not None and response.step.weights_version != self._weights_version:
            raise ExecutorFaultError(
                f"step {response.step.step_id} was computed with version {response.step.weights_version:016x} of the "
                f"weights; {self._weights_version:016x} was expected"
            )
        try:
            return decode_result(response.step)
        except InvalidStepError as error:
            raise ExecutorLostError(f"step {response.step.step_id} cannot be read: {error}") from error

    def _restart_step_timer(self) -> None:
        """Give the oldest unanswered step its full time."""
        if self._step_timer is not None:
            self._step_timer.cancel()
            self._step_timer = None
        if self._unanswered:
            loop = asyncio.get_running_loop()
            self._step_timer = loop.call_later(self._timings.step_timeout_s, self._time_out)

    def _time_out(self) -> None:
        self.give_up(f"no result within {self._timings.step_timeout_s:g} s")

    def give_up(self, reason: str) -> None:
        """End the session: break the stream, so that `receive` raises with the first reason."""
        self._reason_to_give_up = self._reason_to_give_up or reason
        self._has_ended.set()
        if self._stream is not None:
            self._stream.cancel()

    async def _resume(self, broken: StreamBrokenError) -> None:
        """Replace the broken stream.

        Raises: ExecutorLostError: the executor ended it with an error, or does not answer in time.
        """
        if not broken.may_resume:
            raise ExecutorLostError(str(broken)) from broken
        self._num_resumes_in_a_row += bool(self._unanswered)
        if self._num_resumes_in_a_row > MAX_RESUMES_IN_A_ROW:
            step_id = self._unanswered[0].step_id
            raise ExecutorLostError(f"the stream broke {self._num_resumes_in_a_row} times at step {step_id}: {broken}")
        log.warning(Event("step_stream_broke", executor=self._address, epoch=self.epoch, cause=str(broken)))
        self.is_resuming = True
        try:
            async with asyncio.timeout(self._timings.resume_timeout_s), self._stream_lock:
                self._stream = await self._retry_start()
        except TimeoutError as error:
            raise ExecutorLostError(f"no answer within {self._timings.resume_timeout_s:g} s") from error
        finally:
            self.is_resuming = False
        if self._reason_to_give_up:  # the session was given up while there was no stream to cancel
            raise ExecutorLostError(self._reason_to_give_up)
        progress = {"epoch": self.epoch, "last_step_id": self._last_received_step_id}
        log.info(Event("step_stream_resumed", executor=self._address, **progress))

    async def _retry_start(self) -> StepStream:
        while True:
            try:
                return await self._start_stream()
            except StreamBrokenError as broken:
                if not broken.may_resume:
                    raise ExecutorLostError(f"its step stream broke; its next response was {broken}") from broken
                if broken.is_refused:
                    raise ExecutorLostError(f"its step stream broke, and its process has exited: {broken}") from broken
            await asyncio.sleep(self._timings.resume_interval_s)

    async def _start_stream(self) -> StepStream:
        """Open a stream, tell the last received step, and send steps that were not executed again.

        Raises:
            StreamBrokenError: it broke before it started.
            ExecutorLostError: another instance answered, or none.
        """
        stream = self._stub.StreamSteps()
        start = pb.StreamStart(
            epoch=self.epoch,
            last_received_step_id=self._last_received_step_id,
            instance_id=self.info.instance_id,
        )
        await write_message(stream, pb.StreamStepsRequest(start=start))
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes just when its awaitable ends.
            async with asyncio.timeout(self._timings.connect_timeout_s):
                first = await read_message(stream)
        except TimeoutError as error:
            raise ExecutorLostError("the executor did not start the stream") from error
        if first.WhichOneof("message") != "started":
            raise ExecutorLostError("the executor did not start the stream")
        if first.started.instance_id != self.info.instance_id:
            raise ExecutorLostError(f"instance {self.info.instance_id} has exited; its cache is lost")
        for message in self._unanswered:
            if message.step_id > first.started.last_executed_step_id:
                await write_message(stream, pb.StreamStepsRequest(step=message))
        return stream
