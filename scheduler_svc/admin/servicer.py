"""AdminService: what operators see. Every answer is a snapshot between two steps.

It runs on the engine's event loop, so nothing changes while it reads. Next: `state.py`,
`explanation.py`, `steps.py`, `block_map.py`.
"""

from collections.abc import Callable, Sequence
from itertools import islice

import grpc.aio

import octavo
from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo_shared.errors import CallerError, InvalidFieldError, NoExecutorError, UnknownNameError
from octavo_shared.process.clock import monotonic_s
from scheduler_svc.admin.block_map import block_states, describe_block, encoder_states, num_blocks
from scheduler_svc.admin.explanation import explain, explain_ended, no_executor_text, queued_requests
from scheduler_svc.admin.life import ended_state, milliseconds
from scheduler_svc.admin.state import RequestLocations, executor_state, request_state
from scheduler_svc.admin.steps import step_state, step_summary
from scheduler_svc.admin.weight_calls import WeightCalls
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.engine.adapters import RegisteredAdapter
from scheduler_svc.engine.ended_requests import NUM_KEPT_REQUESTS
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.executors.driver import ExecutorDriver
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.telemetry.recent_steps import NUM_KEPT_STEPS

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_PAGE_TOKEN_LENGTH = 18  # digits; every such number is an index that Python takes
DEFAULT_NUM_STEPS = 20


class AdminServicer(WeightCalls):
    """Shows one engine to operators.

    Args:
        fronts: Returns the front processes.
        page_port: Returns the port of the live page; 0: it is not served.
    """

    def __init__(
        self,
        engine: Engine,
        fronts: Callable[[], Sequence[admin_pb2.FrontState]] = tuple,
        page_port: Callable[[], int] = int,
    ) -> None:
        self._engine = engine
        self._fronts = fronts
        self._page_port = page_port

    # The whole -----------------------------------------------------------------------------------

    async def GetSchedulerState(  # noqa: N802 (named by the proto)
        self,
        request: pb.GetSchedulerStateRequest,
        context: grpc.aio.ServicerContext[pb.GetSchedulerStateRequest, pb.GetSchedulerStateResponse],
    ) -> pb.GetSchedulerStateResponse:
        """Give queue lengths, blocks and counters."""
        engine, now_s = self._engine, monotonic_s()
        executors = [executor_state(driver, now_s) for driver in engine.drivers.values()]
        attached = [executor for executor in executors if executor.epoch]
        only = attached[0] if len(attached) == 1 else None
        preemptions, meter = engine.fleet.num_preemptions, engine.meter
        return pb.GetSchedulerStateResponse(
            is_draining=engine.readiness.is_draining,
            num_waiting_requests=engine.waiting.num_waiting,
            num_parked_requests=len(engine.requests.suspects.parked),
            num_running_requests=sum(executor.num_running_requests for executor in executors),
            num_swapped_requests=sum(executor.num_swapped_requests for executor in executors),
            num_preempted_requests=sum(executor.num_preempted_requests for executor in executors),
            num_blocks=sum(executor.num_blocks for executor in executors),
            num_free_blocks=sum(executor.num_free_blocks for executor in executors),
            num_used_blocks=sum(executor.num_used_blocks for executor in executors),
            num_cached_blocks=sum(executor.num_cached_blocks for executor in executors),
            num_host_blocks=sum(executor.num_host_blocks for executor in executors),
            num_free_host_blocks=sum(executor.num_free_host_blocks for executor in executors),
            num_used_host_blocks=sum(executor.num_used_host_blocks for executor in executors),
            num_preemptions=sum(preemptions.values()),
            num_recompute_preemptions=preemptions[PreemptionMode.RECOMPUTE],
            num_swap_preemptions=preemptions[PreemptionMode.SWAP],
            last_sent_step_id=only.last_sent_step_id if only else 0,
            last_processed_step_id=only.last_processed_step_id if only else 0,
            executors=executors,
            num_shared_blocks=sum(executor.num_shared_blocks for executor in executors),
            num_prompt_tokens=meter.num_prompt_tokens,
            num_output_tokens=meter.num_output_tokens,
            num_queried_tokens=meter.num_queried_tokens,
            num_hit_tokens=meter.num_hit_tokens,
            num_host_hit_tokens=meter.num_hit_tokens_of["host"],
            num_pulled_hit_tokens=meter.num_hit_tokens_of["executor"],
            num_finished_requests=meter.num_finished.total(),
            num_failed_requests=meter.num_errors.total(),
            uptime_ms=milliseconds(now_s - engine.started_at_s),
            version=octavo.__version__,
            max_waiting_requests=engine.settings.max_waiting_requests,
            num_refused_requests=engine.waiting.num_refused + engine.token_quotas.num_refused,
            has_mixed_numerics=len({planner.numerics for planner in engine.fleet.planners}) > 1,
            step_log_trouble=engine.step_log.trouble if engine.step_log is not None else "",
            fronts=self._fronts(),
            page_port=self._page_port(),
            status_text=f"not ready: {why_not}"
            if (why_not := engine.readiness.why_not)
            else engine.weights.why_paused or "ready",
        )

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        """Stop admission; live requests go on."""
        await self._engine.start_draining()
        return pb.DrainResponse(num_live_requests=len(self._engine.requests))

    async def DrainExecutor(  # noqa: N802
        self,
        request: pb.DrainExecutorRequest,
        context: grpc.aio.ServicerContext[pb.DrainExecutorRequest, pb.DrainExecutorResponse],
    ) -> pb.DrainExecutorResponse:
        """Empty an executor, or let it take requests again."""
        driver = self._driver(request.executor)
        await self._engine.drain_executor(driver, is_draining=not request.undo)
        num_requests = 0 if driver.planner is None else len(driver.planner.groups)
        return pb.DrainExecutorResponse(executor=driver.address, num_requests=num_requests)

    # Requests ------------------------------------------------------------------------------------

    async def ListRequests(  # noqa: N802
        self,
        request: pb.ListRequestsRequest,
        context: grpc.aio.ServicerContext[pb.ListRequestsRequest, pb.ListRequestsResponse],
    ) -> pb.ListRequestsResponse:
        """Give a page of the live requests, without block tables; the token is the arrival of the last one."""
        page_size, last_arrival = page_size_of(request.page_size), number_in(request.page_token)
        live = [r for r in self._engine.requests.values() if r.group.arrival > last_arrival]
        page, locations, now_s = live[:page_size], RequestLocations(self._engine), monotonic_s()
        return pb.ListRequestsResponse(
            requests=[request_state(listed, locations.of(listed), now_s, is_whole=False) for listed in page],
            next_page_token=str(page[-1].group.arrival) if len(live) > page_size else "",
        )

    async def GetRequest(  # noqa: N802
        self,
        request: pb.GetRequestRequest,
        context: grpc.aio.ServicerContext[pb.GetRequestRequest, pb.GetRequestResponse],
    ) -> pb.GetRequestResponse:
        """Give one live or ended request."""
        found, now_s = self._request(request), monotonic_s()
        if isinstance(found, EndedRequest):
            return pb.GetRequestResponse(request=ended_state(found, now_s))
        return pb.GetRequestResponse(request=request_state(found, RequestLocations(self._engine).of(found), now_s))

    async def ListEndedRequests(  # noqa: N802
        self,
        request: pb.ListEndedRequestsRequest,
        context: grpc.aio.ServicerContext[pb.ListEndedRequestsRequest, pb.ListEndedRequestsResponse],
    ) -> pb.ListEndedRequestsResponse:
        """Give the last requests that ended."""
        if request.num_requests > NUM_KEPT_REQUESTS:
            raise InvalidFieldError("num_requests", request.num_requests, f"from 0 to {NUM_KEPT_REQUESTS}")
        newest, now_s = self._engine.ended.newest(request.num_requests or DEFAULT_PAGE_SIZE), monotonic_s()
        return pb.ListEndedRequestsResponse(
            requests=[ended_state(ended, now_s, shows_events=False) for ended in newest]
        )

    async def ListQueue(  # noqa: N802
        self,
        request: pb.ListQueueRequest,
        context: grpc.aio.ServicerContext[pb.ListQueueRequest, pb.ListQueueResponse],
    ) -> pb.ListQueueResponse:
        """Give a page of the waiting queue; the token is the place of the next one."""
        page_size, first = page_size_of(request.page_size), number_in(request.page_token)
        end = first + page_size
        return pb.ListQueueResponse(
            requests=islice(queued_requests(self._engine, monotonic_s()), first, end),
            next_page_token=str(end) if len(self._engine.queue) > end else "",
        )

    async def ExplainRequest(  # noqa: N802
        self,
        request: pb.ExplainRequestRequest,
        context: grpc.aio.ServicerContext[pb.ExplainRequestRequest, pb.ExplainRequestResponse],
    ) -> pb.ExplainRequestResponse:
        """Say why a request waits, that it runs, or how it ended."""
        found, now_s = self._request(request), monotonic_s()
        if isinstance(found, EndedRequest):
            return explain_ended(found, now_s)
        return explain(self._engine, found, now_s)

    def _request(self, asked: pb.GetRequestRequest | pb.ExplainRequestRequest) -> LiveRequest | EndedRequest:
        """Return the named request: the live one, or else the ended one.

        Raises: UnknownNameError: there is none. InvalidFieldError: several tenants have one, and the call names none.
        """
        request_id, tenant = asked.request_id, asked.tenant if asked.HasField("tenant") else None
        live = self._engine.requests.named(request_id, tenant)
        ended = [] if live else self._engine.ended.named(request_id, tenant)
        tenants = [*(one.group.tenant for one in live), *(one.tenant for one in ended)]
        if len(tenants) > 1:
            raise InvalidFieldError(
                "tenant", "not set", f"one of {', '.join(map(repr, tenants))}: each has a request {request_id!r}"
            )
        if not tenants:
            raise UnknownNameError(
                f"no live request has request_id {request_id!r}, and none of the last {NUM_KEPT_REQUESTS:,} that "
                "ended; rejected requests are not kept"
            )
        return live[0] if live else ended[0]

    # Steps ---------------------------------------------------------------------------------------

    async def GetStep(  # noqa: N802
        self, request: pb.GetStepRequest, context: grpc.aio.ServicerContext[pb.GetStepRequest, pb.GetStepResponse]
    ) -> pb.GetStepResponse:
        """Give one of the last steps."""
        recent_steps = self._driver(request.executor).recent_steps
        logged = recent_steps.get(request.step_id)
        if logged is None:
            first, last = recent_steps.kept_ids
            if not last:
                raise UnknownNameError("no steps are kept: the executor has run none since it was attached")
            raise UnknownNameError(f"step {request.step_id} is not kept; steps {first} to {last} are")
        return pb.GetStepResponse(step=step_state(logged))

    async def ListSteps(  # noqa: N802
        self,
        request: pb.ListStepsRequest,
        context: grpc.aio.ServicerContext[pb.ListStepsRequest, pb.ListStepsResponse],
    ) -> pb.ListStepsResponse:
        """Give the last steps, one line each."""
        if request.num_steps > NUM_KEPT_STEPS:
            raise InvalidFieldError("num_steps", request.num_steps, f"from 0 to {NUM_KEPT_STEPS}")
        driver = self._driver(request.executor)
        steps = driver.recent_steps.last(request.num_steps or DEFAULT_NUM_STEPS)
        return pb.ListStepsResponse(
            executor=driver.address,
            epoch=steps[-1].step.epoch if steps else 0,
            steps=[step_summary(logged) for logged in steps],
        )

    # Blocks --------------------------------------------------------------------------------------

    async def GetBlockMap(  # noqa: N802
        self,
        request: pb.GetBlockMapRequest,
        context: grpc.aio.ServicerContext[pb.GetBlockMapRequest, pb.GetBlockMapResponse],
    ) -> pb.GetBlockMapResponse:
        """Give the state of every block."""
        driver = self._driver(request.executor)
        planner = _attached_planner(driver)
        return pb.GetBlockMapResponse(
            executor=driver.address,
            block_size_tokens=planner.limits.block_size,
            states=block_states(planner.blocks.allocator).tobytes(),
            host_states=block_states(planner.swapped.host).tobytes(),
            encoder_states=encoder_states(planner),
        )

    async def GetBlock(  # noqa: N802
        self, request: pb.GetBlockRequest, context: grpc.aio.ServicerContext[pb.GetBlockRequest, pb.GetBlockResponse]
    ) -> pb.GetBlockResponse:
        """Say which sequences use a block."""
        planner = _attached_planner(self._driver(request.executor))
        if request.block >= num_blocks(planner):
            raise InvalidFieldError("block", request.block, f"from 0 to {num_blocks(planner) - 1}")
        return describe_block(planner, request.block)

    # Adapters ------------------------------------------------------------------------------------

    async def LoadAdapter(  # noqa: N802
        self,
        request: pb.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.LoadAdapterRequest, pb.LoadAdapterResponse],
    ) -> pb.LoadAdapterResponse:
        """Load an adapter, so that requests may name it."""
        loaded = await self._engine.adapters.load(request.name, request.source, in_place=request.in_place)
        return pb.LoadAdapterResponse(adapter=_adapter(loaded))

    async def UnloadAdapter(  # noqa: N802
        self,
        request: pb.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.UnloadAdapterRequest, pb.UnloadAdapterResponse],
    ) -> pb.UnloadAdapterResponse:
        """Let no new request name an adapter."""
        self._engine.adapters.unload(request.name)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802
        self,
        request: pb.ListAdaptersRequest,
        context: grpc.aio.ServicerContext[pb.ListAdaptersRequest, pb.ListAdaptersResponse],
    ) -> pb.ListAdaptersResponse:
        """Give the adapters that requests may name."""
        return pb.ListAdaptersResponse(adapters=map(_adapter, self._engine.adapters.all))

    def _driver(self, address: str) -> ExecutorDriver:
        """Return the executor with an address, or the only one if it is empty."""
        drivers = self._engine.drivers
        if not drivers:
            raise UnknownNameError(no_executor_text(self._engine))
        if address:
            if address not in drivers:
                raise UnknownNameError(
                    f"no executor has the address {address!r}; the executors are {', '.join(drivers)}"
                )
            return drivers[address]
        if len(drivers) > 1:
            raise CallerError(f"there are {len(drivers)} executors; give one of {', '.join(drivers)}")
        return next(iter(drivers.values()))


def _adapter(registered: RegisteredAdapter) -> pb.Adapter:
    adapter = registered.adapter
    return pb.Adapter(name=registered.name, source=adapter.source, digest=adapter.digest.hex())


def _attached_planner(driver: ExecutorDriver) -> ExecutorPlanner:
    if driver.planner is None:
        raise NoExecutorError(f"the executor at {driver.address} is not attached", driver.last_trouble)
    return driver.planner


def page_size_of(page_size: int) -> int:
    """Return the page size that a request asks for. Raises InvalidFieldError: it is too large."""
    if page_size > MAX_PAGE_SIZE:
        raise InvalidFieldError("page_size", page_size, f"from 0 to {MAX_PAGE_SIZE}")
    return page_size or DEFAULT_PAGE_SIZE


def number_in(page_token: str) -> int:
    """Return the number in a page token; 0 if it is empty. Raises InvalidFieldError: the token is not ours."""
    if not page_token:
        return 0
    if len(page_token) > MAX_PAGE_TOKEN_LENGTH or not (page_token.isascii() and page_token.isdecimal()):
        raise InvalidFieldError("page_token", page_token, "a next_page_token of this service")
    return int(page_token)
