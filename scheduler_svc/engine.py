"""The engine: the only owner of the live requests, the waiting queue and the fleet of cores.

    clients ── submit, abort ──> Engine ── queue ──> Fleet of cores (pure)
       ^                           │                    │ schedule, process
       └── Request.next_delta <────┘ deliver <── ExecutorDriver, one for each executor

Everything here runs on one event loop, and the cores are only touched between two awaits, so they need
no lock.

A lost executor costs its sequences their place in the cache and nothing else: they are taken out of
its core with the tokens that are known, and computed again on another executor, or on the same one
when it comes back; their streams go on.

Read next: `live_requests.py`, `drivers.py`, `core/fleet.py`.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.limits import PreemptionMode, SchedulerLimits
from scheduler_svc.core.policy import Policy
from scheduler_svc.core.results import StepUpdates
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.drivers import Drivers
from scheduler_svc.executor_client import ExecutorClient, ExecutorRefusedError, ExecutorSession
from scheduler_svc.executor_driver import DriverSettings, ExecutorDriver
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.membership import Membership
from scheduler_svc.request import Request
from scheduler_svc.request_validation import ValidRequest
from scheduler_svc.served_model import CoreSettings, ServedModel, serving_limits
from scheduler_svc.tokenizer import Tokenizer
from shared.errors import (
    CacheTooSmallError,
    OctavoServiceError,
    QueueFullError,
    RequestAbortedError,
    RequestExistsError,
    UnavailableError,
)

PREFIX_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine takes from the configuration.

    `max_losses` is how often in a row a request may lose its executor while it runs there,
    `queue_retry_after_s` what clients are told when the queue is full, in seconds.
    """

    core: CoreSettings
    driver: DriverSettings
    policy: Policy
    max_waiting_requests: int
    max_waiting_requests_per_tenant: int
    max_beam_width: int
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    has_priorities: bool = False
    max_losses: int = 3
    queue_retry_after_s: float = 1.0

    @property
    def tenants(self) -> frozenset[str] | None:
        """The only tenants that are served; None: any."""
        return frozenset(self.tenant_weights) if self.tenant_weights else None


class Engine:
    """Feeds the live requests with what the executors of a fleet compute.

    Args:
        membership: The addresses of the executors.
        connect: Makes the client of an address.
        settings: Limits of queue, requests and steps.
        load_tokenizer: Makes the tokenizer from a session, or from the operator's own directory.
        set_ready: Called with whether new requests are taken, whenever that may have changed.
    """

    def __init__(
        self,
        membership: Membership,
        connect: Callable[[str], ExecutorClient],
        settings: EngineSettings,
        load_tokenizer: Callable[[ExecutorSession], Awaitable[Tokenizer]],
        set_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.settings = settings
        self.model: ServedModel | None = None
        self.is_draining = False
        self.queue = WaitingQueue(settings.policy, settings.tenant_weights)
        self.fleet = Fleet(self.queue, settings.policy, secrets.token_bytes(PREFIX_KEY_BYTES), self._is_complete)
        self.drivers = Drivers(membership, connect, self, settings.driver)
        self.requests = LiveRequests(self.queue, self.drivers.wake)
        self._load_tokenizer = load_tokenizer
        self._set_ready = set_ready
        self._num_arrivals = 0
        self._past_preemptions: Counter[PreemptionMode] = Counter()
        self._adopting = asyncio.Lock()
        self._serving_addresses: set[str] = set()  # where the served model was when last attached

    # Requests ------------------------------------------------------------------------------------

    def admitting_model(self, request_id: str, tenant: str) -> ServedModel:
        """Return the model that a new request is to be checked against.

        Cheap, so that an overloaded scheduler refuses before it tokenizes.

        Raises: UnavailableError, RequestExistsError, QueueFullError: it would not be queued.
        """
        settings = self.settings
        if self.is_draining:
            raise UnavailableError("the scheduler is draining; send the request to another one")
        if not self.fleet.cores or self.model is None:
            cause = f" ({self.last_trouble})" if self.last_trouble else ""
            raise UnavailableError(f"no executor is attached{cause}; retry in a moment")
        if request_id in self.requests:
            raise RequestExistsError(request_id)
        if self.num_waiting >= settings.max_waiting_requests:
            raise QueueFullError(self.num_waiting, settings.queue_retry_after_s)
        num_of_tenant = self.queue.num_waiting_of(tenant)
        if num_of_tenant >= settings.max_waiting_requests_per_tenant:
            raise QueueFullError(num_of_tenant, settings.queue_retry_after_s, tenant)
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
        self.requests.add(request)
        return request

    def abort(self, request_id: str, error: OctavoServiceError | None = None) -> bool:
        """End a live request with an error and free its blocks; return False if there is none."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.requests.fail(request, error or RequestAbortedError(f"request {request_id!r} was aborted"))
        self.fleet.abort(request.group)
        self.drivers.wake()
        return True

    def _abort_all(self, message: str) -> None:
        for request_id in list(self.requests):
            self.abort(request_id, UnavailableError(message))

    async def start_draining(self) -> None:
        """Admit nothing more and be not ready; live requests go on."""
        self.is_draining = True
        await self._tell_readiness()

    async def drain(self, timeout_s: float) -> None:
        """Start to drain, wait for the live requests, end those that take longer."""
        await self.start_draining()
        try:
            async with asyncio.timeout(timeout_s):
                await self.requests.wait_until_all_ended()
        except TimeoutError:
            self._abort_all("the scheduler shut down; send the request again")

    # What there is -------------------------------------------------------------------------------

    @property
    def num_preemptions(self) -> dict[PreemptionMode, int]:
        """Preemptions since the start, over all attachments."""
        counts = self._past_preemptions.copy()
        for core in self.fleet.cores:
            counts.update(core.preemption.num_preemptions)
        return {mode: counts[mode] for mode in PreemptionMode}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place in a batch, or for an executor; the parked ones count."""
        return len(self.queue) + len(self.parked)

    @property
    def has_waiting(self) -> bool:
        """Whether a core may find a group in the queue; parked requests are not there."""
        return len(self.queue) > 0

    @property
    def parked(self) -> Sequence[Request]:
        """Requests that wait because of `suspect`: see `suspects.py`."""
        return self.requests.suspects.parked

    @property
    def suspect(self) -> Request | None:
        """The one that may be computed of those that are suspected to break executors; None: nobody is."""
        return self.requests.suspects.current

    @property
    def last_trouble(self) -> str:
        """Why executors are not attached, in one line; empty: no trouble is known."""
        return self.drivers.last_trouble

    # Executors come and go: called by their drivers ----------------------------------------------

    async def adopt(self, session: ExecutorSession, address: str) -> Scheduler:
        """Return a core for an executor that was just attached at an address.

        The first one of a fleet says what is served; others must be able to serve the same, also while the
        first one is away for a restart.

        Raises: ExecutorRefusedError, ExecutorFaultError, TokenizerFileError: it cannot be used.
        """
        async with self._adopting:  # two that attach at once must agree on the model
            if self.fleet.cores:
                limits = self._limits_beside_others(session)
            else:
                self._require_same_model(session, address)
                limits = await self._serve_model_of(session)
            self._serving_addresses.add(address)
            return self.fleet.join(limits, session.epoch)

    def _require_same_model(self, session: ExecutorSession, address: str) -> None:
        """Refuse another model as long as another address of the fleet served ours when it was last attached."""
        info, served = session.info, self.model
        if served is None or (info.model_hash, info.dtype) == (served.info.model_hash, served.info.dtype):
            return
        self._serving_addresses.discard(address)
        expected = sorted(self._serving_addresses & self.drivers.keys())
        if expected:
            what = f"it has another model or number format, {info.model_id} {info.dtype}"
            raise ExecutorRefusedError(f"{what}; the fleet serves {served.info.model_id} from {', '.join(expected)}")

    def _limits_beside_others(self, session: ExecutorSession) -> SchedulerLimits:
        info, served = session.info, self.model
        assert served is not None, "the first executor said what is served"
        if (info.model_hash, info.dtype) != (served.info.model_hash, served.info.dtype):
            raise ExecutorRefusedError(f"it has another model or number format, {info.model_id} {info.dtype}")
        return serving_limits(info, self.settings.core, served.max_model_len)

    async def _serve_model_of(self, session: ExecutorSession) -> SchedulerLimits:
        """Serve what this executor, the first one, has; requests for anything else end."""
        info, old = session.info, self.model
        if old is not None and (info.model_hash, info.dtype) != (old.info.model_hash, old.info.dtype):
            self._abort_all("the executor came back with another model")
            self._serving_addresses.clear()
        limits = serving_limits(info, self.settings.core)
        is_same_instance = old is not None and old.info.instance_id == info.instance_id
        tokenizer = old.tokenizer if old and is_same_instance else await self._load_tokenizer(session)
        self.model = ServedModel(info, tokenizer, limits.max_model_len, limits.max_num_seqs)
        return limits

    async def on_attached(self, driver: ExecutorDriver) -> None:
        """The executor takes groups from now on."""
        self.drivers.wake()
        await self._tell_readiness()

    async def on_detached(self, driver: ExecutorDriver) -> None:
        """The executor takes groups no more."""
        await self._tell_readiness()

    def _is_complete(self) -> bool:
        return all(driver.core is not None for driver in self.drivers.values())

    async def _tell_readiness(self) -> None:
        await self._set_ready(bool(self.fleet.cores) and not self.is_draining)

    def take_back(self, core: Scheduler) -> None:
        """The executor is gone: queue its groups again, except those that lost too many."""
        self._past_preemptions.update(core.preemption.num_preemptions)
        running = set(core.batch.running)
        for group in self.fleet.leave(core):
            request = self.requests.of(group)
            request.num_losses += group in running
            if request.num_losses > self.settings.max_losses:
                text = f"the executor was lost {request.num_losses} times in a row while it ran this request"
                self.abort(group.request_id, UnavailableError(text))
            else:
                self.requests.enqueue(request)

    def fail_all(self, core: Scheduler | None) -> None:
        """A bug of ours: end the requests of a core, and those that wait, without asking it any more.

        One of those that wait may be what it stumbled over. `core` None: it had not begun, with none of them.
        """
        if core is None:
            return
        self._past_preemptions.update(core.preemption.num_preemptions)
        self.fleet.cores.remove(core)
        error = OctavoServiceError("the scheduler failed; its log has the reason")
        for request in list(self.requests.values()):
            if self.fleet.core_of(request.group) is None:
                self.abort(request.request_id, error)

    # Steps: called by the drivers ----------------------------------------------------------------

    def deliver(self, core: Scheduler, updates: StepUpdates) -> None:
        """Give what a step of a core brought to its requests; end those that are complete."""
        self.requests.deliver(core, updates)

    def take_failures(self, core: Scheduler) -> None:
        """End the requests that a core gave up, since they can never go on."""
        self.requests.take_failures(core)

    def wake_sleepers(self) -> None:
        """A core left groups in the queue: drivers that do not look at it by themselves are to look."""
        self.drivers.wake_sleepers()
