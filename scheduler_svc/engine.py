"""The engine: the only owner of the fleet of cores and of the live requests.

    clients ── submit, abort ──> Engine ── queue ──> Fleet of cores (pure)
       ^                           │                    │ schedule, process
       └── Request.next_delta <────┘ deliver <── ExecutorDriver, one for each executor

Everything here runs on one event loop, and the cores are only touched between two awaits, so there are
no locks.

A lost executor costs its sequences their place in the cache and nothing else: they are taken out of
its core with the tokens that are known, and computed again on another executor, or on the same one
when it comes back; their streams go on.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.policy import Policy
from scheduler_svc.core.scheduler import Scheduler, StepUpdates
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.executor_client import ExecutorClient, ExecutorRefusedError, ExecutorSession
from scheduler_svc.executor_driver import ExecutorDriver
from scheduler_svc.membership import Membership
from scheduler_svc.request import Request
from scheduler_svc.request_validation import ValidRequest
from scheduler_svc.served_model import CoreSettings, ServedModel, serving_limits
from scheduler_svc.suspects import Suspects
from scheduler_svc.tokenizer import Tokenizer
from shared.errors import (
    CacheTooSmallError,
    OctavoServiceError,
    QueueFullError,
    RequestAbortedError,
    RequestExistsError,
    UnavailableError,
)

log = logging.getLogger(__name__)

PREFIX_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine takes from the configuration."""

    core: CoreSettings
    policy: Policy
    max_waiting_requests: int
    max_waiting_requests_per_tenant: int
    steps_in_flight: int
    max_beam_width: int
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    has_priorities: bool = False
    checks_batch_table: bool = False
    max_losses: int = 3
    retry_interval_s: float = 0.5
    queue_retry_after_s: float = 1.0

    @property
    def tenants(self) -> frozenset[str] | None:
        """The only tenants that are served; None: any."""
        return frozenset(self.tenant_weights) if self.tenant_weights else None


class Engine:
    """Drives a fleet of executors and feeds the live requests.

    Args:
        membership: The addresses of the executors.
        connect: Makes the client of an address.
        settings: Limits of queue and steps.
        load_tokenizer: Makes the tokenizer from a session, or from the operator's own directory.
        on_attached: Called with whether any executor is attached, at each change.
    """

    def __init__(
        self,
        membership: Membership,
        connect: Callable[[str], ExecutorClient],
        settings: EngineSettings,
        load_tokenizer: Callable[[ExecutorSession], Awaitable[Tokenizer]],
        on_attached: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.membership = membership
        self.settings = settings
        self.requests: dict[str, Request] = {}
        self.drivers: dict[str, ExecutorDriver] = {}
        self.model: ServedModel | None = None
        self.is_draining = False
        self.attached = asyncio.Event()
        self.queue = WaitingQueue(settings.policy, settings.tenant_weights)
        self.fleet = Fleet(self.queue, settings.policy, secrets.token_bytes(PREFIX_KEY_BYTES))
        self._connect = connect
        self._load_tokenizer = load_tokenizer
        self._on_attached = on_attached
        self._suspects = Suspects()
        self._num_arrivals = 0
        self._past_preemptions = dict.fromkeys(PreemptionMode, 0)
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._adopting = asyncio.Lock()

    # Requests ------------------------------------------------------------------------------------

    def admitting_model(self, request_id: str, tenant: str = "") -> ServedModel:
        """Return the model that a new request is to be checked against.

        Cheap, so that an overloaded scheduler refuses before it tokenizes.

        Raises: UnavailableError, RequestExistsError, QueueFullError: it would not be queued.
        """
        if self.is_draining:
            raise UnavailableError("the scheduler is draining; send the request to another one")
        if not self.fleet.cores or self.model is None:
            cause = f" ({self.last_trouble})" if self.last_trouble else ""
            raise UnavailableError(f"no executor is attached{cause}; retry in a moment")
        if request_id in self.requests:
            raise RequestExistsError(request_id)
        if self.num_waiting >= self.settings.max_waiting_requests:
            raise QueueFullError(self.num_waiting, self.settings.queue_retry_after_s)
        num_waiting_of_tenant = self.queue.num_waiting_of(tenant)
        if num_waiting_of_tenant >= self.settings.max_waiting_requests_per_tenant:
            raise QueueFullError(num_waiting_of_tenant, self.settings.queue_retry_after_s, tenant)
        return self.model

    def submit(self, valid: ValidRequest, checked_for: ServedModel) -> Request:
        """Queue a request that was checked for a model.

        Raises:
            UnavailableError, RequestExistsError, QueueFullError: it was not queued.
            CacheTooSmallError: no executor can ever hold it.
        """
        model = self.admitting_model(valid.request_id, valid.tenant)
        if model.info.model_hash != checked_for.info.model_hash:
            raise UnavailableError("the executor came back with another model; send the request again")
        group = valid.to_group(self._num_arrivals + 1)
        if not self.fleet.can_ever_take(group):
            raise CacheTooSmallError(self.fleet.why_never(group))
        self._num_arrivals += 1
        request = Request(group, valid.answer_options, model.tokenizer, time.monotonic())
        self.requests[valid.request_id] = request
        self._all_ended.clear()
        self._enqueue(request)
        return request

    def abort(self, request_id: str, error: OctavoServiceError | None = None) -> bool:
        """End a live request with an error and free its blocks; return False if there is none."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.fail(error or RequestAbortedError(f"request {request_id!r} was aborted"))
        self.fleet.abort(request.group)
        self._forget(request)
        self._wake()
        return True

    async def start_draining(self) -> None:
        """Admit nothing more and be not ready; live requests go on."""
        self.is_draining = True
        await self._on_attached(False)

    async def drain(self, timeout_s: float) -> None:
        """Start to drain, wait for the live requests, end those that take longer."""
        await self.start_draining()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_ended.wait()
        except TimeoutError:
            for request_id in list(self.requests):
                self.abort(request_id, UnavailableError("the scheduler shut down; send the request again"))

    # What there is -------------------------------------------------------------------------------

    @property
    def num_preemptions(self) -> dict[PreemptionMode, int]:
        """Preemptions since the start, over all attachments."""
        cores = [core.preemption.num_preemptions for core in self.fleet.cores]
        return {mode: self._past_preemptions[mode] + sum(counts[mode] for counts in cores) for mode in PreemptionMode}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place in a batch, or for an executor."""
        return len(self.queue) + len(self._suspects.parked)

    @property
    def parked(self) -> Sequence[Request]:
        """Requests that wait because of `suspect`: see `suspects.py`."""
        return self._suspects.parked

    @property
    def suspect(self) -> Request | None:
        """The one that may be computed of those that are suspected to break executors; None: nobody is."""
        return self._suspects.current

    @property
    def has_waiting(self) -> bool:
        """Whether groups wait in the queue."""
        return len(self.queue) > 0

    @property
    def last_trouble(self) -> str:
        """Why executors are not attached, in one line; empty: no trouble is known."""
        troubles = [driver.last_trouble for driver in self.drivers.values() if driver.core is None]
        return "; ".join(filter(None, [*troubles, *self.membership.troubles.values()]))

    # The fleet -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a driver for each executor that there ought to be; until cancelled."""
        try:
            await self.membership.watch(self._follow)
            await asyncio.Event().wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, addresses: list[str]) -> None:
        """Start drivers for new addresses, retire those whose address is gone."""
        for address, driver in self.drivers.items():
            driver.retire(is_retired=address not in addresses)
        for address in addresses:
            if address not in self._tasks:
                self._start(address)

    def _start(self, address: str) -> None:
        settings = self.settings
        driver = self.drivers[address] = ExecutorDriver(
            self._connect(address),
            self,
            steps_in_flight=settings.steps_in_flight,
            checks_batch_table=settings.checks_batch_table,
            retry_interval_s=settings.retry_interval_s,
        )
        task = self._tasks[address] = asyncio.create_task(driver.run(), name=f"executor {address}")
        task.add_done_callback(lambda ended: self._stopped(address, ended))

    def _stopped(self, address: str, ended: asyncio.Task[None]) -> None:
        """A retired executor has nothing left to do; should its address be back meanwhile, begin anew."""
        del self._tasks[address], self.drivers[address]
        if not ended.cancelled() and address in self.membership.addresses:
            self._start(address)

    async def adopt(self, session: ExecutorSession) -> Scheduler:
        """Return a core for an executor that was just attached.

        The first one of a fleet says what is served; others must be able to serve the same.

        Raises: ExecutorRefusedError, ExecutorFaultError, TokenizerFileError: it cannot be used.
        """
        async with self._adopting:  # two that attach at once must agree on the model
            info, old = session.info, self.model
            is_first = not self.fleet.cores
            if old is not None and (old.info.model_hash, old.info.dtype) != (info.model_hash, info.dtype):
                if not is_first:
                    raise ExecutorRefusedError(f"it has another model or number format, {info.model_id} {info.dtype}")
                for request_id in list(self.requests):
                    self.abort(request_id, UnavailableError("the executor came back with another model"))
            served_len = None if is_first or old is None else old.max_model_len
            limits = serving_limits(info, self.settings.core, served_len)
            if is_first or old is None:
                is_same_instance = old is not None and old.info.instance_id == info.instance_id
                tokenizer = old.tokenizer if old and is_same_instance else await self._load_tokenizer(session)
                self.model = ServedModel(info, tokenizer, limits.max_model_len, limits.max_num_seqs)
            return self.fleet.join(limits, session.epoch)

    async def on_attached(self, driver: ExecutorDriver) -> None:
        """The executor takes groups from now on."""
        self.attached.set()
        self._wake()
        if driver.is_retired and driver.core is not None:
            driver.core.takes_groups = False
        await self._on_attached(True)

    async def on_detached(self, driver: ExecutorDriver) -> None:
        """The executor takes groups no more."""
        if not self.fleet.cores:
            self.attached.clear()
            await self._on_attached(False)

    def take_back(self, core: Scheduler) -> None:
        """The executor is lost: queue its groups again, except those that lost too many."""
        for mode, count in core.preemption.num_preemptions.items():
            self._past_preemptions[mode] += count
        running = set(core.batch.running)
        groups = self.fleet.leave(core)
        log.info("event=executor_lost requests=%d", len(groups))
        for group in groups:
            request = self.requests[group.request_id]
            request.num_losses += group in running
            if request.num_losses > self.settings.max_losses:
                text = f"the executor was lost {request.num_losses} times in a row while it ran this request"
                self.abort(group.request_id, UnavailableError(text))
            else:
                self._enqueue(request)

    def fail_all(self, core: Scheduler | None) -> None:
        """A bug of ours: end the requests of a core, and those that wait, without asking it any more.

        One of those that wait may be what it stumbled over. `core` None: it had not begun.
        """
        if core is not None:
            self.fleet.cores.remove(core)
        error = OctavoServiceError("the scheduler failed; its log has the reason")
        for request in list(self.requests.values()):
            if self.fleet.core_of(request.group) is None:
                request.fail(error)
                if request.group in self.queue:
                    self.queue.remove(request.group)
                request.group.end()
                self._forget(request)

    # What steps bring ----------------------------------------------------------------------------

    def deliver(self, core: Scheduler, updates: StepUpdates) -> None:
        """Give tokens to their requests; end those that are complete."""
        logprobs: Sequence[float | None] = updates.logprobs or [None] * len(updates.token_ids)
        for row, sequence in enumerate(updates.sequences):
            request = self.requests[sequence.group.request_id]
            has_stop_string = request.push(sequence.index, updates.token_ids[row], logprobs[row])
            if row in updates.finished:
                request.finish_output(sequence.index, updates.finished[row])
            elif has_stop_string:
                core.finish(sequence)
            self._note_progress(request)
        for group in updates.advanced_searches:
            request = self.requests[group.request_id]
            request.num_losses = 0
            self._note_progress(request)
        for group in updates.finished_searches:
            assert group.beams is not None
            request = self.requests[group.request_id]
            request.finish_search(group.beams.finished_hypotheses())
            self._note_progress(request)

    def take_failures(self, core: Scheduler) -> None:
        """End the requests that a core gave up, since they can never go on."""
        for failure in core.take_failures():
            request = self.requests[failure.group.request_id]
            request.fail(CacheTooSmallError(failure.message))
            self._forget(request)

    def _note_progress(self, request: Request) -> None:
        """A request got a token, or ended."""
        if request.has_ended:
            self._forget(request)
        else:
            self._clear_suspect(request)

    # Where a request is --------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        """Queue a live request, or park it: a suspect behind other suspects."""
        if self._suspects.may_run(request):
            self.queue.add(request.group)
            self._wake()

    def _clear_suspect(self, request: Request) -> None:
        following = self._suspects.clear(request)
        if following is not None:
            self.queue.add(following.group)
            self._wake()

    def _forget(self, request: Request) -> None:
        self.requests.pop(request.request_id, None)
        self._clear_suspect(request)
        if not self.requests:
            self._all_ended.set()

    def wake_sleepers(self) -> None:
        """A core left groups in the queue: those that have nothing to do and do not look may take them."""
        for driver in self.drivers.values():
            if driver.is_asleep:
                driver.work.set()

    def _wake(self) -> None:
        """Something changed that a core may act on."""
        for driver in self.drivers.values():
            driver.work.set()
