"""AdminService: what operators see. Every answer is a picture taken between two steps."""

import time

import grpc.aio

from octavo.admin.v1 import admin_pb2, admin_service_pb2_grpc
from octavo.admin.v1 import admin_service_pb2 as pb
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.engine import Engine
from scheduler_svc.request import Request
from scheduler_svc.step_log import LoggedStep
from shared.errors import InvalidFieldError, UnknownNameError

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_PAGE_TOKEN_LENGTH = 20  # digits of the largest 64-bit number


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Shows one engine. It runs on the engine's event loop, so nothing moves while it looks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def GetSchedulerState(  # noqa: N802 (named by the proto)
        self,
        request: pb.GetSchedulerStateRequest,
        context: grpc.aio.ServicerContext[pb.GetSchedulerStateRequest, pb.GetSchedulerStateResponse],
    ) -> pb.GetSchedulerStateResponse:
        """Give queue lengths, blocks and counters."""
        engine = self._engine
        state = pb.GetSchedulerStateResponse(
            num_waiting_requests=engine.num_waiting,
            num_preemptions=engine.num_preemptions,
            is_draining=engine.is_draining,
            executors=[executor_state(engine)],
        )
        if engine.core is not None:
            core, allocator = engine.core, engine.core.block_manager.allocator
            state.num_running_requests = len(core.running)
            state.num_free_blocks = allocator.num_free_blocks
            state.num_used_blocks = allocator.num_used_blocks
            state.num_blocks = allocator.num_blocks
            state.last_sent_step_id = core.last_scheduled_step_id
            state.last_processed_step_id = core.last_processed_step_id
        return state

    async def ListRequests(  # noqa: N802
        self,
        request: pb.ListRequestsRequest,
        context: grpc.aio.ServicerContext[pb.ListRequestsRequest, pb.ListRequestsResponse],
    ) -> pb.ListRequestsResponse:
        """Give a page of the live requests; the token is the arrival number of the last one."""
        if request.page_size > MAX_PAGE_SIZE:
            raise InvalidFieldError("page_size", request.page_size, f"from 0 to {MAX_PAGE_SIZE}")
        last_arrival = arrival_of(request.page_token)
        page_size = request.page_size or DEFAULT_PAGE_SIZE
        live = [r for r in self._engine.requests.values() if r.group.arrival > last_arrival]
        page = live[:page_size]
        return pb.ListRequestsResponse(
            requests=[request_state(self._engine, r) for r in page],
            next_page_token=str(page[-1].group.arrival) if len(live) > page_size else "",
        )

    async def GetRequest(  # noqa: N802
        self,
        request: pb.GetRequestRequest,
        context: grpc.aio.ServicerContext[pb.GetRequestRequest, pb.GetRequestResponse],
    ) -> pb.GetRequestResponse:
        """Give one live request."""
        live = self._engine.requests.get(request.request_id)
        if live is None:
            raise UnknownNameError(f"no live request has request_id {request.request_id!r}")
        return pb.GetRequestResponse(request=request_state(self._engine, live))

    async def GetStep(  # noqa: N802
        self, request: pb.GetStepRequest, context: grpc.aio.ServicerContext[pb.GetStepRequest, pb.GetStepResponse]
    ) -> pb.GetStepResponse:
        """Give one of the last steps."""
        logged = self._engine.step_log.get(request.step_id)
        if logged is None:
            first, last = self._engine.step_log.kept_ids
            raise UnknownNameError(f"step {request.step_id} is not kept; kept are {first} to {last}")
        return pb.GetStepResponse(step=step_state(logged))

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        """Stop admission; live requests go on."""
        await self._engine.start_draining()
        return pb.DrainResponse(num_live_requests=len(self._engine.requests))


def arrival_of(page_token: str) -> int:
    """Return the arrival number in a page token; 0 if it is empty.

    Raises: InvalidFieldError: the service gave out no such token.
    """
    if not page_token:
        return 0
    if len(page_token) > MAX_PAGE_TOKEN_LENGTH or not (page_token.isascii() and page_token.isdecimal()):
        raise InvalidFieldError("page_token", page_token, "a next_page_token of this service")
    return int(page_token)


def executor_state(engine: Engine) -> admin_pb2.ExecutorState:
    """Return the executor as the engine sees it."""
    state = admin_pb2.ExecutorState(
        address=engine.client.address,
        status=admin_pb2.EXECUTOR_STATUS_CONNECTING,
        num_losses=engine.num_losses,
        last_error=engine.last_trouble,
    )
    if engine.session is not None:
        state.status = admin_pb2.EXECUTOR_STATUS_ATTACHED
        state.instance_id = engine.session.info.instance_id
        state.epoch = engine.session.epoch
        state.model_id = engine.session.info.model_id
    return state


def request_state(engine: Engine, request: Request) -> admin_pb2.RequestState:
    """Return where a live request is."""
    group, sequence = request.group, request.group.sequence
    state = admin_pb2.RequestState(
        request_id=group.request_id,
        status=admin_pb2.REQUEST_STATUS_WAITING,
        num_prompt_tokens=group.num_prompt_tokens,
        num_output_tokens=len(request.total.token_ids),
        num_preemptions=sequence.num_preemptions,
        age_ms=round((time.monotonic() - request.arrived_at_s) * 1000),
    )
    if engine.core is not None and sequence.status is SequenceStatus.RUNNING:
        state.status = admin_pb2.REQUEST_STATUS_RUNNING
        state.slot = sequence.slot
        state.num_computed_tokens = int(engine.core.num_computed_tokens[sequence.slot])
        state.block_table.extend(engine.core.table.blocks_of(sequence.slot).tolist())
    return state


def step_state(logged: LoggedStep) -> admin_pb2.StepState:
    """Return a step in words."""
    delta, layout, result = logged.step.delta, logged.layout, logged.result
    num_decodes = len(layout.slots) - len(delta.prefill_chunks)
    state = admin_pb2.StepState(
        step_id=logged.step.step_id,
        epoch=logged.step.epoch,
        decode_slots=layout.slots[:num_decodes].tolist(),
        prefill_chunks=[
            admin_pb2.PrefillChunk(slot=slot, start=start, num_tokens=length)
            for slot, start, length in zip(
                layout.slots[num_decodes:].tolist(),
                layout.starts[num_decodes:].tolist(),
                layout.lengths[num_decodes:].tolist(),
                strict=True,
            )
        ],
        admitted_slots=[admission.slot for admission in delta.admissions],
        released_slots=delta.released_slots.tolist(),
        request_bytes=logged.request_bytes,
    )
    if result is not None:
        state.execute_duration_us = result.execute_duration_us
        state.num_sampled_tokens = len(result.sampled_token_ids)
    return state
