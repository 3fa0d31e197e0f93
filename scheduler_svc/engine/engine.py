"""The engine: the only owner of the live requests, the waiting queue and the fleet of planners.

    clients ── submit, abort ──> Engine ── queue ──> Fleet of planners (pure)
       ^                           │                    │ schedule, process
       └──── TokenSink <───────────┘ deliver <── ExecutorDriver, one for each executor

Everything here runs on one event loop, and the planners are only touched between two awaits, so they need
no lock.

A lost executor costs its sequences only their place in the cache: they are taken out of its planner with
their known tokens, and computed again on another executor, or on the same one when it comes back. Their
streams go on.

Read next: `live_requests.py`, `recovery.py`, `drivers.py`, `core/fleet/fleet.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from octavo_shared.errors import (
    CacheTooSmallError,
    CallerError,
    DrainingError,
    NoExecutorError,
    OctavoServiceError,
    RequestAbortedError,
    RequestExistsError,
    UnavailableError,
)
from octavo_shared.grpc.membership import Membership
from octavo_shared.process.clock import monotonic_s
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.engine.adapters import Adapters
from scheduler_svc.engine.ended_requests import EndedRequests
from scheduler_svc.engine.live_request import LiveRequest, group_of
from scheduler_svc.engine.live_requests import LiveRequests
from scheduler_svc.engine.load_estimate import LoadEstimate
from scheduler_svc.engine.orphans import Orphans
from scheduler_svc.engine.readiness import Readiness
from scheduler_svc.engine.recovery import Recovery
from scheduler_svc.engine.settings import EngineSettings
from scheduler_svc.engine.surroundings import Surroundings
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.engine.token_quotas import TokenQuotas, num_uncounted_tokens
from scheduler_svc.engine.waiting_limits import WaitingLimits
from scheduler_svc.engine.weights import FleetWeights
from scheduler_svc.executors.client import ExecutorClient
from scheduler_svc.executors.driver import ExecutorDriver
from scheduler_svc.executors.drivers import Drivers
from scheduler_svc.executors.fleet_model import FleetModel, LoadTokenizer
from scheduler_svc.executors.session import ExecutorSession
from scheduler_svc.request.admin_calls import no_admin
from scheduler_svc.request.engine_client import EngineLoad, TokenSink
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.losses import Losses
from scheduler_svc.request.served_model import ServedModel
from scheduler_svc.step_log.recording_fleet import RecordingFleet
from scheduler_svc.step_log.writer import StepLogWriter
from scheduler_svc.telemetry.meter import Meter
from scheduler_svc.telemetry.request_log import log_end

# A group that was dispatched to a stalled planner is given to another one within so many seconds.
TICK_INTERVAL_S = 0.5


class Engine:
    """Runs the live requests on the executors of a fleet.

    Args:
        membership: The addresses of the executors.
        connect: Makes the client of an address.
        settings: Limits of queue, requests and steps.
        load_tokenizer: Called before a model is served, with its executor's description and a function that fetches
            its tokenizer files; refuses the executor by raising TokenizerFileError.
        set_ready: Called with whether new requests find an executor, whenever that may have changed.
        step_log: Records the calls of the fleet; None: they are not recorded.
        surroundings: Secrets, randomness and the date; None: those of the machine.

    Attributes:
        admin: See `EngineClient`; who makes the engine sets it.
    """

    def __init__(
        self,
        membership: Membership,
        connect: Callable[[str], ExecutorClient],
        settings: EngineSettings,
        load_tokenizer: LoadTokenizer,
        set_ready: Callable[[bool], Awaitable[None]],
        step_log: StepLogWriter | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        surroundings = surroundings or Surroundings()
        self.settings = settings
        self.admin = no_admin()
        self.started_at_s = monotonic_s()
        self.step_log = step_log
        self.queue = WaitingQueue(settings.policy, settings.tenants.shares)
        self.token_quotas = TokenQuotas(settings.tenants)
        key = surroundings.prefix_key
        is_complete: Callable[[], bool] = lambda: self.drivers.is_complete  # noqa: E731
        self.fleet = (
            Fleet(self.queue, settings.policy, key, is_complete)
            if step_log is None
            else RecordingFleet(self.queue, settings.policy, key, is_complete, step_log)
        )
        self.meter = Meter()
        self.drivers = Drivers(
            membership,
            connect,
            self,
            settings.driver,
            self.meter,
            surroundings.draw,
            transfer_key=surroundings.transfer_key,
        )
        self.ended = EndedRequests()
        observers = [log_end, self.ended.add]
        self.requests = LiveRequests(
            self.fleet,
            self.dispatch,
            self.meter,
            observers,
            unix_s=surroundings.unix_s,
            on_room=lambda: self.drivers.wake(),
            token_quotas=self.token_quotas,
        )
        self.fleet_model = FleetModel(
            self.fleet,
            lambda: self.drivers.membership.addresses,
            settings.planner,
            load_tokenizer,
            self._abort_all,
            settings.served_model_name,
        )
        self.readiness = Readiness(self.fleet, lambda: self.last_trouble, set_ready)
        self.orphans = Orphans(self.fleet, self._waiting_requests, self._end_orphan, settings.orphan_timeout_s)
        self.estimate = LoadEstimate(self.fleet, self.queue, self.requests, self.meter)
        self.waiting = WaitingLimits(
            self.queue, self.requests.suspects, self.requests.held, settings, self.estimate.retry_after_s
        )
        self.recovery = Recovery(self.fleet, self.requests, settings.max_losses)
        self.adapters = Adapters(
            self.fleet,
            self._submit_own,
            self.fleet_model.name_adapters,
            model_name=lambda: "" if self.model is None else self.model.name,
            is_paused=lambda: self.weights.mode is not None,
        )
        self.weights = FleetWeights(self.fleet, self.drivers, self.requests, self.fleet_model, self._go_on)
        self._num_arrivals = 0

    # Requests ------------------------------------------------------------------------------------

    async def wait_until_reachable(self) -> None:
        """Return at once: the engine is in this process."""

    def admitting_model(self, request_id: str, tenant: str) -> ServedModel:
        """Return the model that a new request is to be checked against.

        Cheap, so that an overloaded scheduler refuses before it tokenizes.

        Raises: UnavailableError, NoExecutorError, RequestExistsError, QueueFullError, TokenQuotaError: it would not be
            queued.
        """
        model = self._admitting_model(request_id, tenant)
        self.token_quotas.require(tenant, 1, monotonic_s())
        self.waiting.require_room(tenant)
        return model

    def _admitting_model(self, request_id: str, tenant: str, *, needs_executor: bool = True) -> ServedModel:
        if self.readiness.is_draining:
            raise DrainingError(f"{self.readiness.why_not}; retry with another scheduler")
        if self.model is None or (needs_executor and not self.fleet.planners):
            raise NoExecutorError("no executor is attached", self.last_trouble)
        if needs_executor and all(planner.is_draining for planner in self.fleet.planners):
            raise NoExecutorError(self.readiness.why_not, self.last_trouble)
        if (tenant, request_id) in self.requests:
            raise RequestExistsError(request_id)
        return self.model

    @contextmanager
    def checking(self, request_id: str, tenant: str) -> Iterator[ServedModel]:
        """Let a new request count as waiting while it is tokenized and checked; gives the model to check against.

        Raises: UnavailableError, NoExecutorError, RequestExistsError, QueueFullError, TokenQuotaError: it would not be
            queued.
        """
        model = self.admitting_model(request_id, tenant)
        with self.waiting.counting(tenant):
            yield model

    async def submit(self, request: EngineRequest, sink: TokenSink, checked_for: ServedModel) -> None:
        """Queue a request that was checked for a model, right after `checking`.

        Raises:
            UnavailableError, NoExecutorError, RequestExistsError, QueueFullError, TokenQuotaError: it was not queued.
            CacheTooSmallError: no executor can ever hold it.
            InvalidFieldError: no adapter has its name.
            CallerError: no executor does its task, or computes so long a text; or its tenant may never run so many
                sequences at a time.
            DeadlineTooShortError: it would miss its deadline by far.
        """
        await self.submit_checked(request, sink, checked_for.info.model_hash, checked_for.max_model_len)

    async def submit_checked(
        self,
        request: EngineRequest,
        sink: TokenSink,
        model_hash: str,
        max_model_len: int,
        *,
        was_queued: bool = False,
        on_losses: Callable[[Losses], object] = lambda _: None,
    ) -> None:
        """Queue a request that was checked for the model of a hash and for its longest sequence; see `submit`.

        `was_queued`: an engine before this one had queued it. Then it is not new, and waits for an executor like any
        live request. So does a request whose client says for which length it was accepted before. `on_losses`: see
        `LiveRequest`.
        """
        if request.lora_adapter:
            adapter = self.adapters.resolve(request.lora_adapter, request.continuation, was_queued=was_queued)
            request = replace(request, adapter=adapter)
        self._supersede(request)
        self._admitting_model(request.request_id, request.tenant, needs_executor=not was_queued)
        before = self.ended.get((request.tenant, request.request_id))
        num_uncounted, num_known_tokens = num_uncounted_tokens(request, before)
        if not was_queued:
            self.tenants.require_slots(request)
            self.token_quotas.require(
                request.tenant, num_uncounted, monotonic_s(), num_known_tokens, adapter=request.lora_adapter
            )
        displaced = [] if was_queued else self.waiting.require_room(request.tenant, request.num_input_tokens)
        if not self.fleet_model.is_served(model_hash):
            raise UnavailableError("the executor came back with a different model, dtype or quantization; retry")
        group = group_of(request, self._num_arrivals + 1, max_model_len)
        group.expected_len = self.estimate.expected_len(request, group)
        live = LiveRequest(
            group,
            sink,
            monotonic_s(),
            request.trace_id,
            has_stop_strings=request.has_stop_strings,
            lora_adapter=request.lora_adapter,
            losses=request.losses,
            on_losses=on_losses,
        )
        is_taken = live.has_ended or self.fleet.can_ever_take(group)
        is_promised = request.continuation is not None and request.continuation.max_model_len is not None
        if self.fleet.planners and self.drivers.is_complete and not (is_taken or was_queued):
            if self.fleet.must_not_go_on(group):
                raise UnavailableError(self.fleet.why_never(group))
            if request.pooling is not None or not self.fleet.offers(group):
                raise CallerError(self.fleet.why_never(group))
            if not is_promised:
                raise CacheTooSmallError(self.fleet.why_never(group))
        if request.deadline_s is not None and not was_queued and request.continuation is None:
            self.estimate.require_time(request, group, request.deadline_s - monotonic_s())
        for other, error in displaced:
            self.requests.abort(self.requests.of(other), error)
        if not was_queued:
            num_taken, arrived_at_s = num_uncounted + num_known_tokens, live.times.arrived_at_s
            self.token_quotas.take(request.tenant, num_taken, arrived_at_s, adapter=request.lora_adapter)
        self._num_arrivals += 1
        self.requests.add(live)
        if not is_taken:
            self.orphans.add(live, live.times.arrived_at_s)

    async def _submit_own(self, request: EngineRequest, sink: TokenSink) -> None:
        """Queue a request of the scheduler itself, without quotas. Raises as `submit`."""
        model = self._admitting_model(request.request_id, request.tenant)
        if not model.info.num_adapter_slots:
            raise CallerError("no executor has slots for adapters (--lora and --lora-dir of executors)")
        await self.submit_checked(request, sink, model.info.model_hash, model.max_model_len, was_queued=True)

    def _supersede(self, request: EngineRequest) -> None:
        """End the call from which a continuation takes over a request.

        Either its client has left that call, which does not know it yet; or that call is another request, which took
        the id while this one was unknown here, and has no tokens yet.
        """
        live = self.requests.get((request.tenant, request.request_id))
        if live is None or request.continuation is None:
            return
        is_fresh = live.group.continuation is None and not live.num_output_tokens
        if request.continuation.attempt > live.attempt or is_fresh:
            self.requests.abort(live, RequestAbortedError("another call has taken over this request"))

    async def abort_request(self, request_id: str, tenant: str | None) -> bool:
        """See `EngineClient`: ends the requests, and frees their blocks."""
        found = self.requests.named(request_id, tenant)
        for request in found:
            self.requests.abort(request, RequestAbortedError(f"request {request_id!r} was aborted"))
        return bool(found)

    def _waiting_requests(self) -> list[LiveRequest]:
        """Return the requests that no executor has: queued and parked ones."""
        return [*(self.requests.of(group) for group in self.queue), *self.requests.suspects.parked]

    def _end_orphan(self, request: LiveRequest, error: OctavoServiceError) -> None:
        self.requests.abort(request, error)

    def _go_on(self) -> None:
        self.dispatch()
        self.drivers.wake()

    def _abort_all(self, message: str) -> None:
        for request in list(self.requests.values()):
            self.requests.abort(request, UnavailableError(message))

    @property
    def tenants(self) -> Tenants:
        """What each tenant may have now."""
        return self.waiting.tenants

    def set_tenants(self, tenants: Tenants) -> None:
        """Let other quotas hold from now on; no live request is ended."""
        self.waiting.tenants = tenants
        self.token_quotas.set_tenants(tenants, monotonic_s())
        self.fleet.set_tenant_shares(tenants.shares)
        self.dispatch()
        self.drivers.wake()

    async def start_draining(self) -> None:
        """Refuse new requests and be not ready; live requests go on."""
        self.readiness.is_draining = True
        await self.readiness.tell()

    async def drain_executor(self, driver: ExecutorDriver, *, is_draining: bool) -> None:
        """Give the groups of an executor to others as soon as these have room, or let it take groups again."""
        driver.drain(is_draining=is_draining)
        self.orphans.note_change()
        self.drivers.wake()
        await self.readiness.tell()

    async def drain(self, timeout_s: float, let_go: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start to drain, wait for the live requests, and end requests that take longer than `timeout_s`.

        `let_go` is awaited before these end: it takes away requests that can go on elsewhere.
        """
        await self.start_draining()
        try:
            async with asyncio.timeout(timeout_s):
                await self.requests.wait_until_all_ended()
        except TimeoutError:
            if let_go is not None:
                await let_go()
            self._abort_all("the scheduler shut down; retry")

    async def run(self) -> None:
        """Drive the executors, and watch the waiting requests, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.drivers.run())
            group.create_task(self.orphans.watch())
            group.create_task(self._tick())
            group.create_task(self.adapters.load_offered())

    async def _tick(self) -> None:
        """While groups wait, wake all drivers again and again: a planner with groups in its inbox may have stalled."""
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            if self.has_waiting:
                self.drivers.wake()

    # What there is -------------------------------------------------------------------------------

    @property
    def why_not_ready(self) -> str:
        """Why new requests find no executor, in words; empty: they find one."""
        return self.readiness.why_not

    @property
    def is_draining(self) -> bool:
        """Whether admission was stopped."""
        return self.readiness.is_draining

    @property
    def load(self) -> EngineLoad:
        """The load now."""
        planners = self.fleet.planners
        pools = [(planner.blocks.fullest, planner.limits.block_size) for planner in planners]
        return EngineLoad(
            num_requests=len(self.requests),
            num_running=sum(len(planner.batch.running) for planner in planners),
            num_waiting_prompt_tokens=self.waiting.num_prompt_tokens,
            max_num_seqs=sum(planner.limits.max_num_seqs for planner in planners),
            num_taken_slots=sum(planner.batch.num_rows for planner in planners),
            num_cache_tokens=sum(pool.num_blocks * block_size for pool, block_size in pools),
            num_used_cache_tokens=sum(pool.num_used_blocks * block_size for pool, block_size in pools),
        )

    def waits_for(self, request_id: str, tenant: str) -> str:
        """See `EngineClient`."""
        request = self.requests.get((tenant, request_id))
        if request is None or request.group not in self.queue:
            return ""
        return self.estimate.place_of(request.group)

    @property
    def max_requests(self) -> int | None:
        """Requests that one caller may have here at once, waiting and running; None: executors are missing."""
        if not self.drivers.is_complete:
            return None
        return self.waiting.most_of_a_tenant + sum(planner.limits.max_num_seqs for planner in self.fleet.planners)

    @property
    def model(self) -> ServedModel | None:
        """The model that is served, or was last; None: no executor has been attached yet."""
        return self.fleet_model.model

    @property
    def has_waiting(self) -> bool:
        """Whether a group is in the queue; parked requests are not."""
        return len(self.queue) > 0

    @property
    def last_trouble(self) -> str:
        """Why executors are not attached, in one line; empty: no trouble is known."""
        return self.drivers.last_trouble

    # Executors come and go: called by their drivers ----------------------------------------------

    async def admit(self, session: ExecutorSession, address: str) -> ExecutorPlanner:
        """Return a planner for an executor that was just attached at an address.

        Raises: ExecutorRefusedError, ExecutorFaultError, TokenizerFileError: it cannot be used.
        """
        return await self.fleet_model.admit(session, address)

    async def on_attached(self, driver: ExecutorDriver) -> None:
        """Note that an executor takes groups from now on."""
        self.orphans.note_change()
        self.drivers.wake()
        if driver.planner is not None and driver.planner.info is not None:
            self.adapters.note_offered(driver.planner.info.adapter_names)
        await self.readiness.tell()

    async def on_detached(self, driver: ExecutorDriver) -> None:
        """Note that an executor takes groups no more."""
        await self.readiness.tell()

    async def on_addresses_changed(self) -> None:
        """Note that executors are to come or to leave: the limits and the readiness may change."""
        self.fleet_model.update_limits()
        self.orphans.note_change()
        await self.readiness.tell()

    def take_back(self, planner: ExecutorPlanner, address: str, cause: str, *, was_probed: bool = False) -> bool:
        """Let the requests of a lost executor wait again. See `Recovery`."""
        self.orphans.note_change()
        return self.recovery.take_back(planner, address, cause, was_probed=was_probed)

    def on_probed(self, address: str, *, works: bool) -> None:
        """Note whether an executor that was lost without a result works. See `Recovery`."""
        self.recovery.on_probed(address, works=works)

    def fail_all(self, planner: ExecutorPlanner | None) -> None:
        """After a bug of ours, end the requests of a planner, and waiting ones; None: it never got any.

        See `Recovery`.
        """
        if planner is not None:
            self.recovery.fail_all(planner)

    # Steps: called by the drivers ----------------------------------------------------------------

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be decided: the fleet is paused."""
        return self.weights.holds_steps

    def deliver(self, planner: ExecutorPlanner, updates: StepUpdates) -> None:
        """Give the updates of a planner's step to its requests; end requests that are complete."""
        self.requests.deliver(planner, updates)

    def schedule(self, planner: ExecutorPlanner, address: str, now_s: float) -> StepInFlight | None:
        """Return the next step of a planner at an address; None: nothing to do. End requests that can never go on."""
        if self.holds_steps:
            return None
        decision, dispatched_to = self.fleet.schedule(planner, now_s)
        step_id = None if decision.step is None else decision.step.step_id
        self.requests.note_events(decision.events, address, step_id, now_s)
        self.requests.end_failed(decision.failures)
        if decision.step is None:
            dispatched_to.discard(planner)  # what it was given with this decision it has passed over
        self.drivers.wake_those_of(dispatched_to)
        return decision.in_flight

    def dispatch(self) -> None:
        """Give the first groups in line to planners with room, and wake their drivers; not while no step is decided."""
        if self.holds_steps:
            return
        self.drivers.wake_those_of(self.fleet.dispatch(monotonic_s()))
