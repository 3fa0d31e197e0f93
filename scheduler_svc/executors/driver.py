"""Drives one executor: attach, send steps and take results until it is lost, attach again.

Several steps are in flight at once: the executor has the next step before it finishes the current one, which hides the
time of scheduling and of the network. `in_flight_limit.py` says how many.

The planner and the engine's state are only touched between two awaits, so they need no lock.
Read next: `session.py` for the session, `engine.py` for what becomes of the results.
"""

import asyncio
import logging
import math
import re
from collections import deque
from dataclasses import replace
from typing import NamedTuple

from octavo.values.wording import counted
from octavo_shared.errors import ExecutorFaultError, OctavoServiceError, TokenizerFileError
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import SLOW_STEP, Event
from octavo_shared.step_wire.step import StepResult
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_cost import StepCost
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.executors.circuit_breaker import CircuitBreaker, RetryPace
from scheduler_svc.executors.client import ExecutorClient, ExecutorRefusedError
from scheduler_svc.executors.driver_interface import DriverOwner, DriverSettings, FaultPoint, OtherDrivers
from scheduler_svc.executors.in_flight_limit import InFlightLimit
from scheduler_svc.executors.probe import probe
from scheduler_svc.executors.session import ExecutorLostError, ExecutorSession
from scheduler_svc.executors.step_watch import StepWatch, largest_grammar
from scheduler_svc.executors.transfer_keys import SessionTransfers
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.telemetry.meter import Meter
from scheduler_svc.telemetry.recent_steps import RecentStep, RecentSteps

log = logging.getLogger(__name__)

NUMBERS = re.compile(r"[\d.]+")

# A step that takes so much longer than it should hangs. The two are together below 2 s.
HANG_AFTER_S = 1.25
WATCH_INTERVAL_S = 0.5
# How long the executor may take to tell its processor time; it is asked one look before, too, to compare.
ASK_TIMEOUT_S = 1.0
# How often slow steps are logged.
TELL_SLOW_EVERY_S = 60.0


class CircuitOpenError(ExecutorRefusedError):
    """The executor failed, and must not be attached for a while."""


class _Processed(NamedTuple):
    """A result, its updates, and when it arrived."""

    result: StepResult
    updates: StepUpdates
    arrived_at_s: float


class ExecutorDriver:
    """Drives one executor of the fleet, attached or not.

    Attributes:
        planner: Decides the steps; None while no executor is attached.
        session: The attachment; None while there is none.
        recent_steps: The last steps of the last attachment.
        in_flight: The limit of steps in flight in this attachment.
        num_losses: How often an attachment was lost.
        num_void_rows: Rows that it computed since the start for sequences that had ended.
        num_drafts, num_accepted_drafts: Drafts that it computed since the start, and tokens that came as drafts.
        num_output_tokens: Tokens that requests got from it since the start; in a beam search, one for each beam.
        last_trouble: Why the executor is not attached; empty: it is, or no trouble is known.
        instance_id: The executor process that answers at the address; empty: none did when last asked.
        holds_instance: Whether this driver has the process, or is about to: a process may have several addresses.
        is_retired: Whether the address is gone from the fleet.
        is_leaving: Whether the attached executor said that it is going to end.
        is_draining: Whether the executor process is being drained, so that it can be ended.
        work: Set after every change that the planner may act on.
    """

    def __init__(
        self,
        client: ExecutorClient,
        owner: DriverOwner,
        others: OtherDrivers,
        settings: DriverSettings,
        meter: Meter,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self.client = client
        self.planner: ExecutorPlanner | None = None
        self.session: ExecutorSession | None = None
        self.recent_steps = RecentSteps(observe=meter.step_processed)
        self.in_flight = InFlightLimit(settings.steps_in_flight)
        self.num_losses = 0
        self.num_output_tokens = 0
        self.num_void_rows = 0
        self.num_drafts = 0
        self.num_accepted_drafts = 0
        self.last_trouble = ""
        self.instance_id = ""
        self.holds_instance = False
        self.is_retired = self.is_leaving = self.is_draining = False
        self._draining_instance_id = ""  # empty: the process of the next attachment
        self.work = asyncio.Event()
        self._owner = owner
        self._others = others
        self._settings = settings
        self._meter = meter
        self._breaker = breaker or CircuitBreaker()
        self._step_cost = StepCost()
        self._watch = StepWatch()
        self._told_slow_at_s = -math.inf
        self._arrived_at_s: float | None = None  # of a result after which no step was decided yet
        self._is_sending = False
        self._load_timer: asyncio.TimerHandle | None = None
        self._undelivered: deque[_Processed] = deque()
        self._has_undelivered = asyncio.Event()
        self._cost_of = ""  # the executor process of `_step_cost`
        self._retry_pace = RetryPace(settings.retry_interval_s)
        self._transfers = SessionTransfers(others.transfer_keys, others.transfer_place)
        self._answered_nonsense = False  # in the last attachment: its cached blocks are not used

    @property
    def address(self) -> str:
        """The address of the executor."""
        return self.client.address

    def trouble(self, now_s: float) -> str:
        """Return what is wrong with the attached executor, in words; `now_s` is the monotonic time."""
        if self.planner is None or self.session is None:
            return ""
        silence = self.session.trouble(now_s)
        stalled_s = None if self.session.is_resuming else self.planner.oldest_step.stalled_s(now_s)
        stall = [] if stalled_s is None else [f"a step has been running for {stalled_s:.1f} s"]
        if stall and self.planner.in_flight[0].step.step_id == self._watch.slow_step_id:
            stall.append("the step is still using its CPU")
        return "; ".join([*stall, silence] if silence else stall)

    @property
    def is_spare(self) -> bool:
        """Whether the executor is not looked for, because the scheduler has as many executors as it may."""
        return not (self.holds_instance or self._others.has_room)

    def retire(self, *, is_retired: bool) -> None:
        """Take no new groups because the address is gone from the fleet, or take groups again."""
        self.is_retired = is_retired
        if self.planner is not None:
            self._tell_fleet(self.planner)
        self.work.set()

    async def _note_leaving(self) -> None:
        """Give no new groups to an executor that says that it ends; it is detached when its groups have ended."""
        if self.is_leaving or self.planner is None:
            return
        self.is_leaving = True
        log.info(Event("executor_leaving", executor=self.address, requests=len(self.planner.groups)))
        self._tell_fleet(self.planner)
        self.work.set()
        await self._owner.on_addresses_changed()

    def drain(self, *, is_draining: bool) -> None:
        """Give the groups of this executor process to others, or take groups again."""
        if is_draining != self.is_draining:
            num_requests = 0 if self.planner is None else len(self.planner.groups)
            name = "executor_draining" if is_draining else "executor_takes_requests_again"
            log.info(Event(name, executor=self.address, requests=num_requests))
        self.is_draining, self._draining_instance_id = is_draining, self.instance_id
        if self.planner is not None:
            self._tell_fleet(self.planner)
        self.work.set()

    def _tell_fleet(self, planner: ExecutorPlanner) -> None:
        """Tell the fleet whether a planner takes groups, and whether it gives its own away."""
        takes_groups = not (self.is_retired or self.is_leaving or self.is_draining)
        self._owner.fleet.set_takes_groups(planner, takes_groups)
        self._owner.fleet.set_draining(planner, self.is_draining)

    async def run(self) -> None:
        """Attach, drive, and attach again after a loss; until cancelled, or retired and out of work."""
        while not self.is_retired:
            try:
                await self._run_attachment()
            except Exception:
                # Our own bug. The planner's state is in doubt, so it is not used any more:
                # its requests end here, and the service goes on with an empty planner.
                log.exception(Event("engine_failed", executor=self.address))
                planner, self.planner, self.session = self.planner, None, None
                self._owner.fail_all(planner)
            self.holds_instance = False
            await self._owner.on_detached(self)
            if not self.is_retired:
                await asyncio.sleep(self._retry_pace.next_pause_s(monotonic_s()))

    async def _run_attachment(self) -> None:
        """Attach and drive the executor until it is lost, or leaves and has no groups; its requests wait again."""
        was_probed = self.is_leaving = False
        try:
            self._check_room()
            was_probed = not self._breaker.is_closed
            if was_probed:
                await self._probe()
            async with self.client.attach(self._claim, keeps_blocks=not self._answered_nonsense) as session:
                self.planner, self.session = await self._owner.admit(session, self.address), session
                fleet = self._owner.fleet
                if self._draining_instance_id not in ("", session.info.instance_id):
                    self.is_draining = False  # the drained process has ended, and this is another one
                self._draining_instance_id = session.info.instance_id
                self._tell_fleet(self.planner)
                fleet.set_probing(self.planner, not self._breaker.is_closed)
                if self._cost_of != session.info.instance_id:
                    self._step_cost, self._cost_of = StepCost(), session.info.instance_id
                fleet.set_step_cost(self.planner, self._step_cost)
                self.recent_steps.clear()
                self._watch = StepWatch()
                self.in_flight = InFlightLimit(self._settings.steps_in_flight)
                self._transfers = SessionTransfers(self._others.transfer_keys, self._others.transfer_place)
                session.on_heartbeat = self.in_flight.note_round_trip
                session.on_leaving = self._note_leaving
                self.last_trouble = ""
                self._retry_pace.attached()
                log.info(Event("attached", executor=self.address, epoch=session.epoch))
                self._answered_nonsense = False
                await self._owner.on_attached(self)
                await self._drive(self.planner, session)
            self._give_up_planner("retired", "it left the fleet")
        except (ExecutorLostError, ExecutorRefusedError, ExecutorFaultError, TokenizerFileError) as error:
            self._answered_nonsense |= isinstance(error, ExecutorFaultError)
            if self.planner is not None:
                fails = bool(self.planner.last_scheduled_step_id and not self.planner.last_processed_step_id)
                self._count_loss()
                event = "retired" if self.is_retired else "executor_lost"
                if self._give_up_planner(event, str(error), was_probed=was_probed) or fails:
                    self._breaker.fail(self.instance_id, str(error), monotonic_s())
            elif isinstance(error, ExecutorLostError):
                self.instance_id = ""
            self._report_trouble(error)

    async def _probe(self) -> None:
        """Run the probe on an executor that failed, in an attachment of its own.

        Raises: ExecutorLostError, ExecutorFaultError, ExecutorRefusedError: it does not, or not yet.
        """
        async with self.client.attach(self._claim, keeps_blocks=not self._answered_nonsense) as session:
            try:
                await probe(session)
            except (ExecutorLostError, ExecutorFaultError) as error:
                self._breaker.fail(session.info.instance_id, str(error), monotonic_s())
                self._count_loss()
                self._owner.on_probed(self.address, works=False)
                raise
        self.holds_instance = False  # claimed again for the attachment that follows
        log.info(Event("probe_succeeded", executor=self.address))
        self._owner.on_probed(self.address, works=True)

    def _count_loss(self) -> None:
        self.num_losses += 1
        self._meter.num_executor_losses += 1

    def _claim(self, instance_id: str) -> None:
        """Claim the executor process that answers, before it is attached: a second Attach would end the first.

        Raises: ExecutorRefusedError: the driver of another address has it, or its breaker is open.
        """
        if wait_s := self._breaker.wait_s(instance_id, monotonic_s()):
            raise CircuitOpenError(
                f"{self._breaker.cause}; it failed {counted(self._breaker.num_failures, 'time')} in a row before its "
                f"first result; next attempt in {wait_s:.1f} s"
            )
        self.instance_id = instance_id
        holder = self._others.holder_of(instance_id) if instance_id else None
        if holder is not None:
            raise ExecutorRefusedError(f"it is the same executor as {holder.address}; only that address is used")
        self._check_room()  # another executor may have been attached meanwhile
        self.holds_instance = True

    def _check_room(self) -> None:
        """Raise ExecutorRefusedError if the scheduler has as many executors as it may; then none is dialled."""
        if not self._others.has_room:
            raise ExecutorRefusedError(
                f"this scheduler already has the maximum of --max-executors, {self._settings.max_executors}"
            )

    def _give_up_planner(self, event: str, cause: str, *, was_probed: bool = False) -> bool:
        """Give up the planner; its requests are computed on other executors. Returns what `take_back` does."""
        assert self.planner is not None
        log.info(Event(event, executor=self.address, requests=len(self.planner.groups)))
        is_open = self._owner.take_back(self.planner, self.address, cause, was_probed=was_probed)
        self.planner = self.session = None  # only now: if `take_back` raises, `run` ends the requests of the planner
        return is_open

    async def _drive(self, planner: ExecutorPlanner, session: ExecutorSession) -> None:
        """Send and receive steps until one direction fails, or the executor leaves and has nothing left to do."""
        self._arrived_at_s = None
        self._undelivered.clear()
        tasks = [
            asyncio.create_task(self._send_steps(planner, session), name="send-steps"),
            asyncio.create_task(self._receive_results(planner, session), name="receive-results"),
            asyncio.create_task(self._deliver_results(planner), name="deliver-results"),
            asyncio.create_task(self._watch_steps(planner, session), name="watch-steps"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():
                    raise ExecutorLostError("the step stream was cancelled")
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._deliver(planner)  # however they ended, processed results reach their requests

    async def _send_steps(self, planner: ExecutorPlanner, session: ExecutorSession) -> None:
        """Send steps when there is new work; return when the executor leaves and has no group left."""
        while not ((self.is_retired or self.is_leaving) and not (planner.groups or planner.transfers)):
            self.work.clear()
            if not self._is_sending:
                await self._send_what_is_due(planner, session)
            await self.work.wait()

    async def _send_what_is_due(self, planner: ExecutorPlanner, session: ExecutorSession) -> None:
        """Decide and send as many steps as may be in flight; the first write begins before any other task runs."""
        self._is_sending = True
        try:
            while (num_in_flight := len(planner.in_flight)) < self.in_flight.limit:
                decided_at_s = monotonic_s()
                scheduled = self._owner.schedule(planner, self.address, decided_at_s)
                if scheduled is None:
                    break
                step = scheduled.step
                if self._settings.checks_batch_table:
                    step = replace(step, table_digest=planner.table.digest())
                logged = RecentStep(step, scheduled.layout, decided_at_s=decided_at_s)
                self.recent_steps.add(logged)
                self.in_flight.note_sent(logged.logged_at_s, is_alone=num_in_flight == 0)
                self._settings.at_fault_point(FaultPoint.BEFORE_SEND, self.address)
                arrived_at_s, self._arrived_at_s = self._arrived_at_s, None
                if planner.limits.max_transfers:
                    step = self._transfers.sealed(step)
                logged.request_bytes = await session.send(step)
                self._settings.at_fault_point(FaultPoint.AFTER_SEND, self.address)
                if arrived_at_s is not None:
                    self._meter.step_turnaround.observe(session.write_began_at_s - arrived_at_s)
            self._arrived_at_s = None  # the result led to no step
            self._owner.dispatch()  # groups that this planner preempted may run on another one
            self._look_again_for_loads(planner)
        finally:
            self._is_sending = False

    def _look_again_for_loads(self, planner: ExecutorPlanner) -> None:
        """Send a step in a while if the executor has nothing to compute, and loads grammars or moves blocks."""
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None
        if not self._owner.holds_steps and (due_s := planner.poll_due_s) is not None:
            self._load_timer = asyncio.get_running_loop().call_later(max(0.0, due_s - monotonic_s()), self.work.set)

    async def _receive_results(self, planner: ExecutorPlanner, session: ExecutorSession) -> None:
        """Take results. The next step is written before any other task runs, so that no executor waits for clients.

        If `_send_steps` is writing a step just then, it also sends the steps that are due after the result.
        """
        while True:
            result = await session.receive()
            if planner.limits.max_transfers:
                result = self._transfers.opened(result)
            self._deliver(planner)  # the result before, if `_deliver_results` has not
            self._settings.at_fault_point(FaultPoint.AFTER_ANSWER, self.address)
            self._arrived_at_s = arrived_at_s = session.arrived_at_s
            updates = self._owner.fleet.process(planner, result)
            self._undelivered.append(_Processed(result, updates, arrived_at_s))
            self._has_undelivered.set()
            self._note_answered(arrived_at_s, result, updates)
            if not self._breaker.is_closed:
                self._breaker.close()
                self._owner.fleet.set_probing(planner, False)
            if self.is_retired or self.is_leaving:
                self.work.set()  # `_send_steps` ends once no group is left
            if not self._is_sending:
                await self._send_what_is_due(planner, session)

    async def _deliver_results(self, planner: ExecutorPlanner) -> None:
        while True:
            await self._has_undelivered.wait()
            self._deliver(planner)

    def _deliver(self, planner: ExecutorPlanner) -> None:
        """Give processed results to their requests."""
        self._has_undelivered.clear()
        while self._undelivered:
            processed = self._undelivered.popleft()
            self._owner.deliver(planner, processed.updates)
            self.recent_steps.set_result(processed.result, processed.arrived_at_s)

    def _note_answered(self, now_s: float, result: StepResult, updates: StepUpdates) -> None:
        """Count the tokens and rows of an answered step."""
        self.num_output_tokens += updates.num_tokens
        self.num_void_rows += updates.num_void_rows
        self._meter.num_void_rows += updates.num_void_rows
        if result.draft_counts is not None:
            self.num_drafts += self._meter.drafts_proved(result)
            self.num_accepted_drafts += updates.num_drafted
        num_stops = sum(reason is FinishReason.STOP for reason in updates.finished.values())
        execute_s, num_rows = result.execute_duration_us * 1e-6, result.num_rows
        self.in_flight.note_answered(now_s, execute_s, num_rows, num_stops, updates.num_void_rows)

    async def _watch_steps(self, planner: ExecutorPlanner, session: ExecutorSession) -> None:
        """Watch the steps, until cancelled. Raises ExecutorLostError: a step hangs."""
        while True:
            planned_s = monotonic_s() + WATCH_INTERVAL_S
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_s = monotonic_s()
            if now_s - planned_s > WATCH_INTERVAL_S / 2 or session.is_resuming:
                continue  # this task ran late, and the result may be here: it is taken first
            if not planner.oldest_step.hangs(now_s, HANG_AFTER_S - WATCH_INTERVAL_S):
                continue
            step_id = planner.in_flight[0].step.step_id
            cpu_time_us = await session.step_cpu_time_us(ASK_TIMEOUT_S)
            now_s = monotonic_s()
            longest_s = planner.oldest_step.longest_s() if planner.in_flight else None
            running_s = planner.oldest_step.running_s(now_s)
            if longest_s is None or running_s is None or planner.in_flight[0].step.step_id != step_id:
                continue  # its result came meanwhile
            hangs = self._watch.look(step_id, cpu_time_us, longest_s + HANG_AFTER_S)
            took = f"it has been running for {running_s:.1f} s; similar steps take at most {longest_s:.3f} s"
            guided = largest_grammar(planner.batch.running, planner.batch.things.grammars)
            if hangs and planner.oldest_step.hangs(now_s, HANG_AFTER_S):
                if guided:
                    log.warning(Event("hung_step_has_grammars", executor=self.address, step_id=step_id, **guided))
                self._owner.fleet.note_hang(planner)
                raise ExecutorLostError(f"step {step_id} hangs: {took}")
            if self._watch.slow_step_id == step_id and now_s > self._told_slow_at_s + TELL_SLOW_EVERY_S:
                self._told_slow_at_s = now_s
                log.warning(Event(SLOW_STEP, executor=self.address, step_id=step_id, cause=took, **guided))

    def _report_trouble(self, error: OctavoServiceError) -> None:
        """Log why the executor is not attached, once for each new reason; new numbers (a countdown) are none."""
        is_new = not isinstance(error, CircuitOpenError) and NUMBERS.sub("", str(error)) != NUMBERS.sub(
            "", self.last_trouble
        )
        self.last_trouble = str(error)
        if is_new:
            log.warning(Event("no_executor", address=self.address, cause=self.last_trouble))
