"""ExecutionService over a worker: which calls may run, and in which order.

The protocol is the comment of protos/octavo/execution/v1/execution_service.proto. Ownership is in
`executor_svc/service/attachment.py`, the queue of steps in `executor_svc/service/step_runner.py`, one open stream
in `executor_svc/service/step_stream.py`. Errors are raised; `octavo_shared/grpc/grpc_status.py` turns them into status.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from executor_svc.service.attachment import Attachment
from executor_svc.service.kept_responses import KeptResponses
from executor_svc.service.metrics import executor_families
from executor_svc.service.step_runner import StepRunner
from executor_svc.service.step_stream import StepStream, first_message
from executor_svc.service.step_thread import StepThread
from executor_svc.service.weight_updates import WeightUpdates, to_its_end
from executor_svc.transfers.sender import Dial
from executor_svc.transfers.servicer import BlockTransferServicer
from executor_svc.transfers.transfers import Transfers
from executor_svc.worker.interface import Worker
from octavo.execution.v1 import capability_pb2, step_pb2
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1.execution_service_pb2_grpc import ExecutionServiceServicer
from octavo_shared.errors import (
    CallerError,
    DeviceLostError,
    FencedError,
    InvalidFieldError,
    ModelLoadError,
    UnavailableError,
    UnknownNameError,
)
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event
from octavo_shared.process.metric import Family
from octavo_shared.step_wire import wire, wire_info
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.executor_info import Capability, ExecutorInfo, names_of
from octavo_shared.step_wire.incarnation import require_believable
from octavo_shared.step_wire.step import SamplingRow
from octavo_shared.step_wire.wire_agreement import WireAgreement, agreed_capabilities, agreed_parameters

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExecutionService"].full_name

MIN_LEASE_MS = 100
MAX_LEASE_MS = 600_000

LEAVING = "the executor is shutting down, and takes no scheduler any more"
# How often an executor that leaves checks whether the lease of its scheduler has run out, in seconds.
LOOK_INTERVAL_S = 0.5

_logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class ExecutionServicer(ExecutionServiceServicer):
    """Serves one executor to the one scheduler that is attached to it.

    Args:
        clock: Monotonic time in seconds, for leases.
        thread: Runs the steps; None: a new one.
        unix_s: Returns the seconds since 1970: numbers far beyond them are not believed.
        dial: Opens channels to other executors, for blocks.
        weights_dirs: Folders that new weights may come from; empty: it takes none.

    Attributes:
        transfer_address: Where other executors send blocks to; see `ExecutorInfo`.
        role: See `ExecutorInfo`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = monotonic_s,
        thread: StepThread | None = None,
        unix_s: Callable[[], float] = time.time,
        dial: Dial = grpc.aio.insecure_channel,
        weights_dirs: Sequence[Path] = (),
    ) -> None:
        self._clock = clock
        self._unix_s = unix_s
        self._attachment = Attachment()
        self.transfer_address, self.role = "", ""
        self._transfers = Transfers(dial, clock)
        self._runner = StepRunner(self._attachment, thread or StepThread(), self._transfers)
        self._weight_updates = WeightUpdates(weights_dirs)
        self._stream: StepStream | None = None
        self._is_leaving = False
        self._detached = asyncio.Event()

    @property
    def has_stream(self) -> bool:
        """Whether a step stream is open."""
        return self._stream is not None

    def metrics(self) -> Iterator[Family]:
        """Yield the metrics of the executor as they are now."""
        meters = self._runner.meter, self._transfers.meter
        return executor_families(*meters, self._runner.info, is_attached=self.is_attached)

    @property
    def block_transfers(self) -> BlockTransferServicer:
        """The service that takes blocks from other executors, for the same port."""
        return self._transfers.servicer

    async def load(self, load_worker: Callable[[], Worker]) -> None:
        """Make the worker on the step thread; until then calls are UNAVAILABLE. Raises what it raises."""
        await asyncio.to_thread(self._weight_updates.remove_left_over)
        await self._runner.load(load_worker)

    async def device_lost(self) -> DeviceLostError:
        """Return when the device computes nothing any more: the process must end."""
        return await self._runner.device_lost()

    def leave(self) -> None:
        """Tell the scheduler that this executor ends, and refuse new attachments; the attached scheduler works on."""
        self._is_leaving = True

    @property
    def is_attached(self) -> bool:
        """Whether a scheduler is attached."""
        return bool(self._attachment.holder(self._clock()))

    async def wait_until_unused(self) -> None:
        """Return once no scheduler is attached; for an executor that leaves."""
        while self.is_attached:
            self._detached.clear()
            with contextlib.suppress(TimeoutError):  # a lease may have run out meanwhile
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await self._detached.wait()

    async def drain(self) -> None:
        """Let the running step end, answer it, drop the rest and end the stream as UNAVAILABLE."""
        await self._runner.drain()
        self._end_stream(UnavailableError("the executor is shutting down"))

    def close(self) -> None:
        """Let the step thread go, without waiting for it."""
        self._runner.close()

    async def GetExecutorInfo(  # noqa: N802
        self, request: pb.GetExecutorInfoRequest, context: Context
    ) -> pb.GetExecutorInfoResponse:
        """Describe the executor."""
        description = wire_info.encode_info(self._described())
        attachment, holder = self._attachment, self._attachment.holder(self._clock())
        for scheduler_id, incarnation in attachment.incarnations.items():
            is_attached = attachment.has_stream and scheduler_id == holder
            description.incarnations.add(scheduler_id=scheduler_id, incarnation=incarnation, is_attached=is_attached)
        return description

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachResponse:  # noqa: N802
        """Give the executor to the caller once the running step has ended."""
        info = self._described()
        if self._is_leaving:
            raise UnavailableError(LEAVING)
        wire_version = _negotiate(request)
        _check_attach(request)
        capabilities = agreed_capabilities(request, info) if wire_version >= 2 else frozenset()
        if info.has_states and Capability.STATES not in capabilities:
            rule = "STATES and CACHE_GROUPS among them, as layers of the model keep a state of each sequence"
            raise InvalidFieldError("capabilities", names_of(request.capabilities), rule)
        require_believable(request.incarnation, self._unix_s())
        caller = request.scheduler_id, request.incarnation
        if 0 < (grace_s := self._attachment.grace_s(*caller, self._clock())) < math.inf:
            await asyncio.sleep(grace_s + 0.001)  # the holder opens its stream again, or is gone
        lease_s = request.lease_ms / 1000
        epoch = self._attachment.acquire(request.scheduler_id, lease_s, self._clock(), request.incarnation)
        self._end_stream(FencedError(f"epoch {epoch - 1} ended: scheduler {request.scheduler_id!r} attached"))
        is_same = self._attachment.name_blocks(
            request.scheduler_id, request.key_fingerprint, is_agreed=Capability.NAMED_BLOCKS in capabilities
        )
        keeps_names = request.keep and is_same
        num_kept_names = await self._runner.reset(WireAgreement(wire_version, capabilities), keeps_names=keeps_names)
        # The wait may have been long, and another attach may have come in it.
        self._attachment.renew(epoch, self._clock())
        fields = {"epoch": epoch, "lease_ms": request.lease_ms, "wire_version": wire_version}
        names = names_of(capabilities)
        _logger.info(
            Event(
                "attached", scheduler_id=request.scheduler_id, **fields, capabilities=names, kept_blocks=num_kept_names
            )
        )
        return pb.AttachResponse(
            epoch=epoch,
            wire_version=wire_version,
            info=wire_info.encode_info(info),
            capabilities=wire_info.encode_capabilities(capabilities),
            capability_parameters=agreed_parameters(request, info, capabilities),
            num_kept_names=num_kept_names,
            incarnation=self._attachment.incarnations.get(request.scheduler_id, 0),
        )

    async def ListRegisteredBlocks(  # noqa: N802
        self, request: pb.ListRegisteredBlocksRequest, context: Context
    ) -> pb.ListRegisteredBlocksResponse:
        """List the names that Attach kept."""
        self._renew(request.epoch, request.instance_id)
        if request.give_up:
            await self._runner.clear_names()
            return pb.ListRegisteredBlocksResponse()
        blocks, next_page = await self._runner.kept_names(request.page_token)
        return pb.ListRegisteredBlocksResponse(blocks=blocks, next_page_token=next_page)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:  # noqa: N802
        """Renew the lease."""
        self._renew(request.epoch, request.instance_id)
        return pb.HeartbeatResponse(
            last_executed_step_id=self._runner.last_executed_step_id,
            step_cpu_time_us=self._runner.step_cpu_time_us,
            is_leaving=self._is_leaving,
        )

    async def Detach(self, request: pb.DetachRequest, context: Context) -> pb.DetachResponse:  # noqa: N802
        """End the lease of a scheduler that leaves."""
        require_believable(request.largest_incarnation, self._unix_s(), "largest_incarnation")
        self._renew(request.epoch, request.instance_id)
        if request.largest_incarnation and self._attachment.scheduler_id:
            self._attachment.note_incarnation(self._attachment.scheduler_id, request.largest_incarnation)
        self._attachment.release(request.epoch)
        self._detached.set()
        _logger.info(Event("detached", epoch=request.epoch))
        return pb.DetachResponse()

    async def StreamSteps(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.StreamStepsRequest], context: Context
    ) -> AsyncIterator[pb.StreamStepsResponse]:
        """Run the steps of one stream; resume where an earlier stream of the epoch broke."""
        start = await first_message(request_iterator)
        info = self._runner.worker.info
        self._renew(start.epoch, start.instance_id)
        # An older stream of this epoch is broken, even if its connection has not noticed yet.
        self._end_stream(FencedError("replaced by a newer stream of the same epoch"))
        # What the older stream has queued runs all the same; sent again, it is answered from the log.
        missed = self._runner.responses_since(start.last_received_step_id)
        last_step_id = start.last_received_step_id + len(missed)
        stream = self._stream = StepStream(self._runner, self._renew_by_step)
        self._attachment.note_stream(is_open=True, now=self._clock())
        try:
            _logger.info(Event("stream_opened", epoch=start.epoch, last_step_id=last_step_id, resent=len(missed)))
            started = pb.StreamStarted(instance_id=info.instance_id, last_executed_step_id=last_step_id)
            yield pb.StreamStepsResponse(started=started)
            for response in missed:
                yield pb.StreamStepsResponse(step=response)
            async for response in stream.responses(request_iterator):
                yield pb.StreamStepsResponse(step=response)
        finally:
            _logger.info(Event("stream_closed", epoch=start.epoch))
            if self._stream is stream:
                self._stream = None
                self._attachment.note_stream(is_open=False, now=self._clock())

    async def ExecuteModel(  # noqa: N802
        self, request: step_pb2.ExecuteModelRequest, context: Context
    ) -> step_pb2.ExecuteModelResponse:
        """Run one step."""
        self._renew_by_step(request)
        if self._stream is not None:
            raise FencedError("a step stream is open; send the step on it")
        return await self._runner.run(request)

    async def UpdateWeights(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.UpdateWeightsRequest], context: Context
    ) -> pb.UpdateWeightsResponse:
        """Put new weights in place, once they are all here."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("begin"):
            raise CallerError("the first message of an update must be its beginning")
        begin = first.begin
        self._require_updates(begin)
        weights_bytes = self._runner.worker.weights_bytes
        async with self._weight_updates.receiving(begin, request_iterator, weights_bytes) as folder:
            self._renew(begin.epoch, begin.instance_id)
            try:
                info = await to_its_end(
                    self._runner.update_weights(begin.epoch, begin.after_step_id, folder, begin.weights_digest)
                )
            except ModelLoadError as error:
                raise CallerError(str(error)) from error
        _logger.info(Event("weights_updated", epoch=begin.epoch, weights_digest=info.weights_digest))
        return pb.UpdateWeightsResponse(info=wire_info.encode_info(self._described()))

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:  # noqa: N802
        """Give memory back."""
        if request.level not in (1, 2):
            raise InvalidFieldError("level", request.level, "1 or 2")
        self._require_updates(request)
        await self._runner.sleep(request.epoch, request.after_step_id, request.level)
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeResponse:  # noqa: N802
        """End a sleep."""
        self._require_updates(request)
        try:
            await self._runner.wake(request.epoch)
        except ModelLoadError as error:
            raise FencedError(str(error)) from error
        return pb.WakeResponse()

    def _require_updates(self, request: pb.UpdateWeightsBegin | pb.SleepRequest | pb.WakeRequest) -> None:
        """Renew the lease of a caller that may change weights. Raises FencedError: it may not."""
        self._renew(request.epoch, request.instance_id)
        if not self._runner.changes_weights:
            raise FencedError("the capability WEIGHT_VERSIONS was not agreed on at Attach")

    async def GetTokenizer(  # noqa: N802
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> pb.GetTokenizerResponse:
        """Return the tokenizer files."""
        files = self._runner.worker.tokenizer_files()
        if not files:
            raise UnknownNameError(f"model {self._runner.worker.info.model_id!r} has no tokenizer.json")
        return pb.GetTokenizerResponse(
            files=[
                pb.TokenizerFile(name=file.name, content=file.content, sha256=hashlib.sha256(file.content).hexdigest())
                for file in files
            ]
        )

    async def GetBatchTable(  # noqa: N802
        self, request: pb.GetBatchTableRequest, context: Context
    ) -> pb.GetBatchTableResponse:
        """Show the batch table."""
        slot = request.slot if request.HasField("slot") else None

        def look(worker: Worker, log: KeptResponses) -> pb.GetBatchTableResponse:
            rows = _batch_table_rows(worker.table, slot, request.include_token_ids)
            return pb.GetBatchTableResponse(last_executed_step_id=log.last_step_id, rows=rows)

        response = await self._runner.between_steps(look)
        response.epoch = self._attachment.epoch
        response.scheduler_id = self._attachment.holder(self._clock())
        return response

    def _described(self) -> ExecutorInfo:
        """Return what the executor says of itself. Raises UnavailableError: it is loading, or shutting down."""
        info = self._runner.worker.info
        address = self.transfer_address if info.max_transfers else ""
        return replace(info, transfer_address=address, role=self.role)

    def _renew(self, epoch: int, instance_id: str) -> None:
        """Renew the lease of a caller that says which instance gave it the epoch.

        Raises: FencedError: the epoch is not the current one, or belongs to an earlier instance.
        """
        own = self._runner.worker.info.instance_id
        if instance_id not in ("", own):
            raise FencedError(f"instance {instance_id} has exited, and its cache is lost; this is {own}: attach again")
        self._attachment.renew(epoch, self._clock())

    def _renew_by_step(self, step: step_pb2.ExecuteModelRequest) -> None:
        self._attachment.renew(step.epoch, self._clock())

    def _end_stream(self, error: Exception) -> None:
        if self._stream is not None:
            self._stream.end(error)
            self._stream = None


def _check_attach(request: pb.AttachRequest) -> None:
    if not request.scheduler_id:
        raise InvalidFieldError("scheduler_id", "empty", "an id that is stable across restarts of the scheduler")
    if request.keep and capability_pb2.CAPABILITY_NAMED_BLOCKS not in request.capabilities:
        raise InvalidFieldError("keep", True, "false, unless capabilities has CAPABILITY_NAMED_BLOCKS")
    if not MIN_LEASE_MS <= request.lease_ms <= MAX_LEASE_MS:
        raise InvalidFieldError("lease_ms", request.lease_ms, f"{MIN_LEASE_MS} to {MAX_LEASE_MS}")


def _negotiate(request: pb.AttachRequest) -> int:
    """Return the highest wire version that both sides speak."""
    version = min(request.max_wire_version, wire.MAX_WIRE_VERSION)
    if version < max(request.min_wire_version, wire.MIN_WIRE_VERSION):
        offered = f"{request.min_wire_version} to {request.max_wire_version}"
        spoken = f"{wire.MIN_WIRE_VERSION} to {wire.MAX_WIRE_VERSION}"
        raise InvalidFieldError("max_wire_version", f"{offered} (the range)", f"a range that overlaps {spoken}")
    return version


def _batch_table_rows(table: BatchTable, slot: int | None, include_token_ids: bool) -> list[pb.BatchTableRow]:
    """Return the live slots in readable messages, ascending, or only `slot`.

    Raises: UnknownNameError: `slot` is not live.
    """
    live_slots = np.flatnonzero(table.live).tolist()
    if slot is None:
        return [_row(table, live_slot, include_token_ids) for live_slot in live_slots]
    if slot not in live_slots:
        raise UnknownNameError(f"slot {slot} is not live; {len(live_slots)} slots are")
    return [_row(table, slot, include_token_ids)]


def _row(table: BatchTable, slot: int, include_token_ids: bool) -> pb.BatchTableRow:
    return pb.BatchTableRow(
        slot=slot,
        generation=int(table.generation[slot]),
        active=bool(table.active[slot]),
        num_prompt_tokens=int(table.num_prompt_tokens[slot]),
        num_tokens=int(table.num_tokens[slot]),
        num_computed_tokens=int(table.num_scheduled_tokens[slot]),
        block_table=[block + group.first_id for group in table.all_tables for block in group.of_slot(slot).tolist()],
        sampling_params=wire.encode_sampling(SamplingRow(*table.sampling[slot].item())),
        token_ids=table.tokens_of(slot).tolist() if include_token_ids else [],
    )
