"""The step loop: the only owner of the core, of the live requests and of the executor's session.

    clients ── submit, abort ──> Engine ── schedule ──> Scheduler (core)
       ^                           │ send, receive
       └── Request.next_delta <────┘ process

Everything here runs on one event loop, and the core is only touched between two awaits, so there are
no locks. Up to `steps_in_flight` steps are on their way at once: with two, the executor has the next
step before it finishes the current one, and the time of scheduling and of the network is hidden.

A lost executor costs its sequences their place in the cache and nothing else: they are taken out of
the core with the tokens that are known, wait for the next attachment and are computed again; their
streams go on. A request that loses its executor `max_losses` times without getting a token ends with
an error, so that one that breaks executors does not break them forever.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from scheduler_svc.core.block_manager import AllocStatus
from scheduler_svc.core.scheduler import BY_ARRIVAL, Scheduler, StepUpdates
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.errors import TokenizerFileError
from scheduler_svc.executor_client import (
    ExecutorClient,
    ExecutorLostError,
    ExecutorRefusedError,
    ExecutorSession,
)
from scheduler_svc.output_text import OutputText
from scheduler_svc.request import Request
from scheduler_svc.request_validation import ValidRequest
from scheduler_svc.served_model import ServedModel, serving_limits
from scheduler_svc.step_log import LoggedStep, StepLog
from scheduler_svc.tokenizer import Tokenizer
from shared.errors import (
    ExecutorFaultError,
    OctavoServiceError,
    QueueFullError,
    RequestAbortedError,
    RequestExistsError,
    UnavailableError,
)

log = logging.getLogger(__name__)

NUMBERS = re.compile(r"[\d.]+")

# Losses without a token in between after which a request is suspected to break executors: it is
# computed while no other suspect is, so that the innocent are not counted out with the guilty.
LOSSES_OF_A_SUSPECT = 2


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine takes from the configuration; `None`: as much as the executor allows."""

    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_waiting_requests: int
    steps_in_flight: int
    checks_batch_table: bool = False
    max_losses: int = 3
    retry_interval_s: float = 0.5
    queue_retry_after_s: float = 1.0


class Engine:
    """Drives one executor and feeds the live requests.

    Args:
        client: The executor.
        settings: Limits of queue and steps.
        load_tokenizer: Makes the tokenizer from a session, or from the operator's own directory.
        on_attached: Called with whether an executor is attached, at each change.
    """

    def __init__(
        self,
        client: ExecutorClient,
        settings: EngineSettings,
        load_tokenizer: Callable[[ExecutorSession], Awaitable[Tokenizer]],
        on_attached: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.client = client
        self.settings = settings
        self.requests: dict[str, Request] = {}
        self.core: Scheduler | None = None
        self.session: ExecutorSession | None = None
        self.model: ServedModel | None = None
        self.is_draining = False
        self.num_losses = 0
        self.step_log = StepLog()
        self.attached = asyncio.Event()
        self._load_tokenizer = load_tokenizer
        self._on_attached = on_attached
        # Groups that wait for an executor, or for the suspect to be cleared; by arrival.
        self._parked: list[SequenceGroup] = []
        self._suspect: Request | None = None
        self._num_arrivals = 0
        self._num_past_preemptions = 0
        self._work = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self.last_trouble = ""

    # Requests ------------------------------------------------------------------------------------

    def admitting_model(self, request_id: str) -> ServedModel:
        """Return the model that a new request is to be checked against.

        Cheap, so that an overloaded scheduler refuses before it tokenizes.

        Raises: UnavailableError, RequestExistsError, QueueFullError: it would not be queued.
        """
        if self.is_draining:
            raise UnavailableError("the scheduler is draining; send the request to another one")
        if self.core is None or self.model is None:
            cause = f" ({self.last_trouble})" if self.last_trouble else ""
            raise UnavailableError(f"no executor is attached{cause}; retry in a moment")
        if request_id in self.requests:
            raise RequestExistsError(request_id)
        if self.num_waiting >= self.settings.max_waiting_requests:
            raise QueueFullError(self.num_waiting, self.settings.queue_retry_after_s)
        return self.model

    def submit(self, valid: ValidRequest, checked_for: ServedModel) -> Request:
        """Queue a request that was checked for a model.

        Raises: UnavailableError, RequestExistsError, QueueFullError: it was not queued.
        """
        model = self.admitting_model(valid.request_id)
        if model.info.model_hash != checked_for.info.model_hash:
            raise UnavailableError("the executor came back with another model; send the request again")
        self._num_arrivals += 1
        group = SequenceGroup(
            request_id=valid.request_id,
            prompt_token_ids=valid.prompt_token_ids,
            sampling=valid.sampling,
            stop_conditions=valid.stop_conditions,
            arrival=self._num_arrivals,
        )
        request = Request(group, OutputText(model.tokenizer, valid.text_options), time.monotonic())
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
        self._leave_core(request)
        self._forget(request)
        return True

    async def start_draining(self) -> None:
        """Admit nothing more and be not ready; live requests go on."""
        self.is_draining = True
        await self._on_attached(False)

    async def drain(self, timeout_s: float) -> None:
        """Start to drain, wait for the live requests, end those that take longer."""
        await self.start_draining()
        try:
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        except TimeoutError:
            for request_id in list(self.requests):
                self.abort(request_id, UnavailableError("the scheduler shut down; send the request again"))

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start, over all attachments."""
        return self._num_past_preemptions + (self.core.num_preemptions if self.core else 0)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place in the batch, or for an executor."""
        return len(self._parked) + (len(self.core.waiting) if self.core else 0)

    # The executor --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Attach, drive, and attach again after a loss; until cancelled."""
        while True:
            try:
                await self._run_attachment()
            except Exception:
                # Our own bug. What the core believed is in doubt, so nothing of it is asked any more:
                # its requests end here, and the service goes on with an empty core.
                log.exception("event=engine_failed requests=%d", len(self.requests))
                self._fail_all(OctavoServiceError("the scheduler failed; its log has the reason"))
            self.attached.clear()
            await self._on_attached(False)
            await asyncio.sleep(self.settings.retry_interval_s)

    async def _run_attachment(self) -> None:
        """Attach and drive the executor until it is lost; keep its requests for the next one."""
        try:
            async with self.client.attach() as session:
                await self._serve(session)
        except (ExecutorLostError, ExecutorRefusedError, ExecutorFaultError, TokenizerFileError) as error:
            self._park_all()
            self._report_trouble(error)

    async def _serve(self, session: ExecutorSession) -> None:
        """Drive the executor until it is lost."""
        self.core, self.session = await self._adopt(session), session
        self.step_log.clear()
        parked, self._parked = self._parked, []
        for group in parked:
            self._enqueue(self.requests[group.request_id])
        log.info("event=attached executor=%s epoch=%d requests=%d", self.client.address, session.epoch, len(parked))
        self.last_trouble = ""
        self.attached.set()
        await self._on_attached(True)
        await self._drive(self.core, session)

    async def _adopt(self, session: ExecutorSession) -> Scheduler:
        """Take over the executor's model and limits; return an empty core for them."""
        info, old = session.info, self.model
        if old is not None and (old.info.model_hash, old.info.dtype) != (info.model_hash, info.dtype):
            for group in list(self._parked):
                self.abort(group.request_id, UnavailableError("the executor came back with another model"))
        is_same_instance = old is not None and old.info.instance_id == info.instance_id
        tokenizer = old.tokenizer if old is not None and is_same_instance else await self._load_tokenizer(session)
        limits = serving_limits(info, self.settings.max_num_seqs, self.settings.max_num_batched_tokens)
        self.model = ServedModel(info, tokenizer, limits.max_model_len)
        return Scheduler(limits, session.epoch)

    async def _drive(self, core: Scheduler, session: ExecutorSession) -> None:
        """Send and receive steps until one direction fails."""
        tasks = [
            asyncio.create_task(self._send_steps(core, session), name="send-steps"),
            asyncio.create_task(self._receive_results(core, session), name="receive-results"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                if task.cancelled():
                    raise ExecutorLostError("the step stream was cancelled")
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_steps(self, core: Scheduler, session: ExecutorSession) -> None:
        while True:
            while len(core.in_flight) < self.settings.steps_in_flight and (step := core.schedule()):
                layout = core.in_flight[-1].layout
                if self.settings.checks_batch_table:
                    step = replace(step, table_digest=core.table.digest())
                logged = LoggedStep(step, layout)
                self.step_log.add(logged)
                logged.request_bytes = await session.send(step)
            self._work.clear()
            await self._work.wait()

    async def _receive_results(self, core: Scheduler, session: ExecutorSession) -> None:
        while True:
            result = await session.receive()
            updates = core.process(result)
            self._work.set()
            self.step_log.set_result(result)
            self._deliver(updates)

    def _deliver(self, updates: StepUpdates) -> None:
        """Give tokens to their requests; end those that are complete."""
        logprobs: Sequence[float | None] = updates.logprobs or [None] * len(updates.token_ids)
        for row, sequence in enumerate(updates.sequences):
            request = self.requests[sequence.group.request_id]
            request.push(updates.token_ids[row], logprobs[row])
            if request.has_ended:  # its text holds a stop string
                self._leave_core(request)
            elif row in updates.finished:
                request.finish(updates.finished[row])
            if request.has_ended:
                self._forget(request)
            elif request is self._suspect:
                self._clear_suspect()

    # Where a group is ----------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        """Put a live request into the core, or park it: a suspect behind other suspects."""
        assert self.core is not None, "requests are queued while an executor is attached"
        if request.num_losses >= LOSSES_OF_A_SUSPECT:
            if self._suspect is not None:
                self._parked.append(request.group)
                return
            self._suspect = request
        if self.core.add(request.group) is AllocStatus.NEVER:
            request.fail(UnavailableError("the executor came back with a cache too small for this request"))
            self._forget(request)
        self._work.set()

    def _clear_suspect(self) -> None:
        """The suspect got a token or ended: compute the next one."""
        self._suspect = None
        parked, self._parked = self._parked, []
        for group in parked:
            self._enqueue(self.requests[group.request_id])

    def _leave_core(self, request: Request) -> None:
        if request.group in self._parked:
            self._parked.remove(request.group)
        elif self.core is not None:
            self.core.finish(request.group.sequence)
        self._work.set()

    def _park_all(self) -> None:
        """The executor is lost: keep its groups for the next one, except those that lost too many."""
        core, self.core, self.session, self._suspect = self.core, None, None, None
        if core is None:
            return
        self.num_losses += 1
        self._num_past_preemptions += core.num_preemptions
        running = {sequence.group.request_id for sequence in core.running}
        self._parked = sorted([*core.evacuate(), *self._parked], key=BY_ARRIVAL)
        for group in list(self._parked):
            request = self.requests[group.request_id]
            request.num_losses += group.request_id in running
            if request.num_losses > self.settings.max_losses:
                text = f"the executor was lost {request.num_losses} times in a row while it ran this request"
                self.abort(group.request_id, UnavailableError(text))

    def _fail_all(self, error: OctavoServiceError) -> None:
        """End every live request without asking the core."""
        self.core = self.session = self._suspect = None
        self._parked.clear()
        for request in list(self.requests.values()):
            request.fail(error)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self.requests.pop(request.request_id, None)
        if request is self._suspect:
            self._clear_suspect()
        if not self.requests:
            self._all_ended.set()

    def _report_trouble(self, error: OctavoServiceError) -> None:
        """Log why there is no executor, once for each new reason; numbers (a countdown) make no new one."""
        is_new = NUMBERS.sub("", str(error)) != NUMBERS.sub("", self.last_trouble)
        self.last_trouble = str(error)
        if is_new:
            address, requests = self.client.address, len(self.requests)
            log.warning("event=no_executor address=%s requests=%d cause=%r", address, requests, self.last_trouble)
