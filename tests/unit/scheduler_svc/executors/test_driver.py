"""The driver on a virtual session: no gRPC, real cores, the fake worker; the test answers step by step."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain, count, repeat

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo_shared.errors import OctavoServiceError
from octavo_shared.step_wire.step import SamplingRow, Step, StepResult
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.executors import driver as executor_driver
from scheduler_svc.executors import step_watch
from scheduler_svc.executors.circuit_breaker import Backoff, CircuitBreaker
from scheduler_svc.executors.client import ExecutorClient, ExecutorRefusedError
from scheduler_svc.executors.driver import ExecutorDriver
from scheduler_svc.executors.driver_interface import DriverSettings
from scheduler_svc.executors.serving_limits import PlannerSettings, serving_limits
from scheduler_svc.executors.session import ExecutorLostError, ExecutorSession, SessionTimings
from scheduler_svc.executors.transfer_keys import TransferKeys
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.telemetry.meter import Meter
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S
from tests.support.stack import until

ADDRESS = "virtual:1"


class VirtualSession(ExecutorSession):
    """An attachment whose steps wait until the test answers them."""

    def __init__(self, epoch: int, worker: FakeWorker) -> None:
        self.worker = worker
        self.worker.reset()
        self.epoch = epoch
        self.info = self.worker.info
        self.sent: list[Step] = []
        self.num_answered = 0
        self.cpu_times_us: Iterator[int | None] = repeat(None)
        self.is_resuming = False
        self.arrived_at_s = self.write_began_at_s = 0.0
        self._incoming: asyncio.Queue[StepResult | OctavoServiceError] = asyncio.Queue()

    async def send(self, step: Step) -> int:
        self.sent.append(step)
        return 1

    async def receive(self) -> StepResult:
        incoming = await self._incoming.get()
        if isinstance(incoming, OctavoServiceError):
            raise incoming
        return incoming

    async def step_cpu_time_us(self, timeout_s: float) -> int | None:
        return next(self.cpu_times_us)

    def answer(self, **changes: int) -> None:
        """Execute the oldest unanswered step; its result arrives, with these fields changed."""
        result = self.worker.execute(self.sent[self.num_answered])
        self.num_answered += 1
        self._incoming.put_nowait(replace(result, **changes))  # type: ignore[arg-type]

    def lose(self) -> None:
        self._incoming.put_nowait(ExecutorLostError("the connection is gone"))


class VirtualClient(ExecutorClient):
    """Attaches to a new executor each time, or to `worker`; `refusals` come first."""

    def __init__(self) -> None:
        super().__init__(ADDRESS, "the test", SessionTimings(), 2**20)
        self.refusals: list[OctavoServiceError] = []
        self.sessions: list[VirtualSession] = []
        self.worker: FakeWorker | None = None
        self.believed: list[bool] = []  # whether what it had cached was, at each attachment

    @asynccontextmanager
    async def attach(self, claim: Callable[[str], None], *, keeps_blocks: bool = True) -> AsyncIterator[VirtualSession]:
        if self.refusals:
            raise self.refusals.pop(0)
        self.believed.append(keeps_blocks)
        session = VirtualSession(len(self.sessions) + 1, self.worker or FakeWorker())
        claim(session.info.instance_id)
        self.sessions.append(session)
        yield session


class Owner:
    """Stands in for the engine: queues what comes back, and notes what it is told."""

    has_room = True
    holds_steps = False
    transfer_keys = TransferKeys(b"key")

    def transfer_place(self, address: str) -> tuple[str, str]:
        return address, ""

    def __init__(self) -> None:
        self.fleet = Fleet(WaitingQueue(FcfsPolicy()), FcfsPolicy())
        self.token_ids: list[int] = []
        self.events: list[str] = []
        self.num_deals = 0
        self.when_admitted: Callable[[], None] = lambda: None
        self.holder: ExecutorDriver | None = None

    async def on_addresses_changed(self) -> None:
        raise AssertionError("a driver does not say so")

    def holder_of(self, instance_id: str) -> ExecutorDriver | None:
        return self.holder

    async def admit(self, session: ExecutorSession, address: str) -> ExecutorPlanner:
        self.when_admitted()
        return self.fleet.join(serving_limits(session.info, PlannerSettings()), session.epoch, address)

    async def on_attached(self, driver: ExecutorDriver) -> None:
        assert driver.planner is not None
        assert driver.planner.takes_groups is not driver.is_retired
        self.events.append("attached")

    async def on_detached(self, driver: ExecutorDriver) -> None:
        assert driver.planner is None
        assert driver.session is None
        self.events.append("detached")

    def deliver(self, planner: ExecutorPlanner, updates: StepUpdates) -> None:
        assert planner in self.fleet.planners
        self.token_ids += updates.token_ids

    def schedule(self, planner: ExecutorPlanner, address: str, now_s: float) -> StepInFlight | None:
        decision, _ = self.fleet.schedule(planner, now_s)
        self.events += [failure.message for failure in decision.failures]
        return decision.in_flight

    def take_back(self, planner: ExecutorPlanner, address: str, cause: str, *, was_probed: bool) -> bool:
        groups = self.fleet.leave(planner)
        self.events.append(f"took {len(groups)} back")
        for group in groups:
            self.fleet.queue.add(group)
        return False

    def on_probed(self, address: str, *, works: bool) -> None:
        self.events.append("probe succeeded" if works else "probe failed")

    def fail_all(self, planner: ExecutorPlanner | None) -> None:
        assert planner is not None
        self.fleet.planners.remove(planner)
        self.events.append("failed all")

    def dispatch(self) -> None:
        self.num_deals += 1


class Stage:
    """A driver that runs, and all around it."""

    def __init__(
        self, steps_in_flight: int | None = 2, *, checks_batch_table: bool = False, backoff: Backoff | None = None
    ) -> None:
        self.client = VirtualClient()
        self.owner = Owner()
        self.driver = ExecutorDriver(
            self.client,
            self.owner,
            self.owner,
            DriverSettings(steps_in_flight, checks_batch_table, retry_interval_s=0.0),
            Meter(),
            CircuitBreaker(lambda: 1.0, backoff or Backoff(0.0, 0.0)),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        task = asyncio.create_task(self.driver.run())
        await settle()
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def session(self) -> VirtualSession:
        """The last attachment."""
        return self.client.sessions[-1]

    def add(self, max_tokens: int = 100, arrival: int = 1) -> SequenceGroup:
        """Queue a group, without waking anybody."""
        prompt = np.array([65 + arrival, 66, 67], np.int32)
        group = SequenceGroup(f"r{arrival}", prompt, SamplingRow(), StopConditions(max_tokens), arrival)
        self.owner.fleet.queue.add(group)
        return group

    async def submit(self, max_tokens: int = 100, arrival: int = 1) -> SequenceGroup:
        """Queue a group and wake the driver."""
        group = self.add(max_tokens, arrival)
        self.driver.work.set()
        await settle()
        return group

    async def answer(self, num_steps: int = 1, **changes: int) -> None:
        for _ in range(num_steps):
            self.session.answer(**changes)
            await settle()


async def settle() -> None:
    """Let everything happen that can happen by itself."""
    for _ in range(20):
        await asyncio.sleep(0)


@each_row(1, 2, 4)
async def test_no_more_steps_are_sent_than_may_be_in_flight(steps_in_flight: int) -> None:
    stage = Stage(steps_in_flight)
    async with stage.running():
        await stage.submit()
        for num_answered in range(4):
            assert [step.step_id for step in stage.session.sent] == list(range(1, num_answered + steps_in_flight + 1))
            await stage.answer()


async def test_steps_in_flight_follow_the_link_and_rows_computed_in_vain_are_counted() -> None:
    stage = Stage(None)
    async with stage.running():
        group = await stage.submit(max_tokens=200)
        await stage.answer(execute_duration_us=200_000)
        assert len(stage.session.sent) == 3
        for _ in range(8):  # a slow link
            stage.session.on_heartbeat(0.5)
        await stage.answer(8, execute_duration_us=200_000)
        assert stage.driver.in_flight.limit == 4
        assert len(stage.session.sent) - stage.session.num_answered == 4

        assert stage.driver.planner is not None
        stage.driver.planner.abort(group)
        await stage.answer(4)
        assert stage.driver.num_void_rows == 4


async def test_the_owner_is_told_of_a_group_that_failed_and_the_others_go_on() -> None:
    stage = Stage()
    async with stage.running():
        too_wide = stage.add(arrival=1)
        too_wide.sequences *= 300
        too_wide.has_run = True
        await stage.submit(max_tokens=2, arrival=2)
        assert ["slots of the batch" in event for event in stage.owner.events if "needs" in event] == [True]
        assert len(stage.session.sent) == 2


async def test_tokens_are_delivered_as_results_come_and_the_last_step_releases_the_slot() -> None:
    stage = Stage()
    async with stage.running():
        await stage.submit(max_tokens=4)
        for num_tokens in range(1, 5):
            await stage.answer()
            assert len(stage.owner.token_ids) == num_tokens
        assert stage.session.sent[-1].delta.released_slots.tolist() == [0]
        await stage.answer()
        assert stage.session.num_answered == len(stage.session.sent) == 5


async def test_the_next_step_is_sent_before_what_the_last_one_brought_is_delivered() -> None:
    stage = Stage(1)
    num_sent_at_delivery = []

    def deliver(planner: ExecutorPlanner, updates: StepUpdates) -> None:
        num_sent_at_delivery.append(len(stage.session.sent))

    stage.owner.deliver = deliver  # type: ignore[method-assign]
    async with stage.running():
        await stage.submit(max_tokens=3)
        await stage.answer(3)
    assert num_sent_at_delivery == [2, 3, 4]  # the last one releases the slot


@pytest.mark.parametrize("num_others", [0, 50])
async def test_between_a_result_and_the_next_step_nothing_else_has_its_turn(
    monkeypatch: pytest.MonkeyPatch, num_others: int
) -> None:
    """The others are what may wait for the event loop when a result comes: streams of clients, for example."""
    stage, order = Stage(1), list[str]()
    receive, send, deliver = VirtualSession.receive, VirtualSession.send, stage.owner.deliver

    async def receive_noted(session: VirtualSession) -> StepResult:
        result = await receive(session)
        order.append("a result arrives")
        for _ in range(num_others):
            asyncio.get_running_loop().call_soon(order.append, "another runs")
        return result

    async def send_noted(session: VirtualSession, step: Step) -> int:
        order.append("a step is written")
        await asyncio.sleep(0)
        return await send(session, step)

    def deliver_noted(planner: ExecutorPlanner, updates: StepUpdates) -> None:
        order.append("tokens are delivered")
        deliver(planner, updates)

    monkeypatch.setattr(VirtualSession, "receive", receive_noted)
    monkeypatch.setattr(VirtualSession, "send", send_noted)
    stage.owner.deliver = deliver_noted  # type: ignore[method-assign]
    async with stage.running():
        await stage.submit()
        order.clear()
        await stage.answer(3)
    turn = ["a result arrives", "a step is written", *["another runs"] * num_others, "tokens are delivered"]
    assert order == turn * 3


async def test_the_turnaround_ends_when_the_write_of_the_next_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, send = Stage(1), VirtualSession.send

    async def send_slowly(session: VirtualSession, step: Step) -> int:
        session.write_began_at_s = session.arrived_at_s + 0.25
        for _ in range(5):  # tokens are delivered meanwhile
            await asyncio.sleep(0)
        session.arrived_at_s += 10.0  # of what comes next
        return await send(session, step)

    monkeypatch.setattr(VirtualSession, "send", send_slowly)
    async with stage.running():
        await stage.submit()
        await stage.answer(4)
    turnaround = stage.driver._meter.step_turnaround
    assert (turnaround.num_observed, turnaround.sum) == (4, 1.0)


@pytest.mark.parametrize("how", ["retires", "fails", "cancelled"])
async def test_what_was_processed_is_delivered_whatever_the_sender_does_meanwhile(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(1)
    async with stage.running() as running:
        await stage.submit(max_tokens=1)
        if how == "retires":
            stage.driver.is_retired = True  # the sender has nothing left to do when the token is processed
        elif how == "fails":
            monkeypatch.setattr(ExecutorPlanner, "schedule", lambda *_: 1 / 0)
        else:
            process = ExecutorPlanner.process

            def cancel_in_between(planner: ExecutorPlanner, result: StepResult) -> StepUpdates:
                running.cancel()
                return process(planner, result)

            monkeypatch.setattr(ExecutorPlanner, "process", cancel_in_between)
        await stage.answer()
    assert len(stage.owner.token_ids) == 1


async def test_the_step_log_keeps_steps_with_their_results_and_begins_anew_with_each_attachment() -> None:
    stage = Stage(1)
    async with stage.running():
        await stage.submit()
        await stage.answer(2)
        logged = stage.driver.recent_steps.get(2)
        assert logged is not None
        assert logged.result is not None
        assert logged.request_bytes == 1
        stage.session.lose()
        await settle()
        assert stage.driver.recent_steps.kept_ids == (1, 1)


async def test_a_lost_executor_gives_its_groups_back_and_the_next_one_goes_on() -> None:
    undisturbed, stage = Stage(), Stage()
    async with undisturbed.running():
        await undisturbed.submit(max_tokens=9)
        await undisturbed.answer(9)
    async with stage.running():
        await stage.submit(max_tokens=9)
        await stage.answer(4)
        stage.session.lose()
        await settle()
        assert stage.owner.events == ["attached", "took 1 back", "detached", "attached"]
        assert stage.driver.num_losses == 1
        assert stage.driver.last_trouble == ""  # it is attached again
        await stage.answer(5)
        assert stage.session.epoch == 2
        assert stage.owner.token_ids == undisturbed.owner.token_ids


async def test_a_refusal_is_no_loss_and_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    reasons = ["it is held for 3.5 s", "it is held for 2.5 s", "it loads", "it is held for 1 s"]
    stage.client.refusals = [ExecutorRefusedError(reason) for reason in reasons]
    async with stage.running():
        await settle()
        assert stage.driver.session is not None
    assert stage.driver.num_losses == 0
    assert stage.owner.events == [*["detached"] * 4, "attached"]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    told = [reasons[0], *reasons[2:]]
    assert warned == [f"event=no_executor address={ADDRESS} cause={reason!r}" for reason in told]


async def test_an_executor_of_another_driver_is_not_attached_a_second_time_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage, other = Stage(), Stage()
    stage.owner.holder = other.driver
    async with stage.running():
        await settle()
        assert stage.client.sessions == []
        assert stage.owner.events.count("detached") > 1
        was_held = [stage.driver.holds_instance]
        stage.owner.holder = None
        await settle()
        was_held.append(stage.driver.holds_instance)
        assert was_held == [False, True]
        assert stage.driver.instance_id == stage.session.info.instance_id
    assert stage.driver.num_losses == 0
    cause = f"it is the same executor as {ADDRESS}; only that address is used"
    assert caplog.messages == [f"event=no_executor address={ADDRESS} cause={cause!r}"]


async def test_an_address_where_nobody_answers_any_more_has_no_executor() -> None:
    stage = Stage()
    async with stage.running():
        stage.client.refusals = [ExecutorLostError("nobody answers")] * 100
        stage.session.lose()
        await settle()
        assert stage.driver.instance_id == ""
        assert not stage.driver.holds_instance


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"step_id": 3}, "epoch 1 step 3 came instead of 1 2"),
        ({"step_id": 1}, "epoch 1 step 1 came instead of 1 2"),
        ({"epoch": 7}, "epoch 7 step 2 came instead of 1 2"),
    ],
)
async def test_the_result_of_another_step_is_a_loss_and_the_log_says_so(
    changes: dict[str, int], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    async with stage.running():
        await stage.submit()
        await stage.answer()
        await stage.answer(**changes)
        assert stage.driver.num_losses == 1
        assert stage.owner.events == ["attached", "took 1 back", "detached", "attached"]
        assert len(stage.owner.token_ids) == 1
    assert f"event=no_executor address={ADDRESS} cause={cause!r}" in caplog.messages


async def test_what_an_executor_has_cached_is_not_believed_after_nonsense_and_is_after_a_loss() -> None:
    stage = Stage()
    async with stage.running():
        await stage.submit()
        await stage.answer()
        await stage.answer(step_id=77)
        await stage.answer()
        stage.session.lose()
        await settle()
    assert stage.client.believed == [True, False, True]


async def test_a_bug_of_ours_asks_the_core_nothing_any_more_and_begins_with_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("an invariant does not hold")

    stage = Stage()
    async with stage.running():
        await stage.submit()
        for method in ("process", "evacuate"):
            monkeypatch.setattr(stage.driver.planner, method, broken)
        await stage.answer()
        assert stage.owner.events == ["attached", "failed all", "detached", "attached"]
        assert stage.driver.num_losses == 0
        await stage.submit(max_tokens=1, arrival=2)
        await stage.answer()
        assert len(stage.owner.token_ids) == 1
    assert "an invariant does not hold" in caplog.text


async def test_a_retired_executor_without_work_is_let_go_and_not_counted_as_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    async with stage.running() as running:
        stage.driver.retire(is_retired=True)
        await settle()
        assert running.done()
    assert stage.owner.events == ["attached", "took 0 back", "detached"]
    assert not stage.owner.fleet.planners
    assert stage.driver.num_losses == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("is_retired", "is_killed", "event"),
    [
        (True, False, "event=retired executor=virtual:1 requests=0"),
        (True, True, "event=retired executor=virtual:1 requests=1"),
        (False, True, "event=executor_lost executor=virtual:1 requests=1"),
    ],
)
async def test_the_log_says_lost_only_of_an_executor_that_was_not_retired(
    is_retired: bool, is_killed: bool, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stage = Stage()
    async with stage.running():
        await stage.submit(max_tokens=2)
        if is_retired:
            stage.driver.retire(is_retired=True)
        if is_killed:
            stage.session.lose()
            await settle()
        else:
            await stage.answer(2)
        assert stage.driver.num_losses == is_killed
    gone = ("event=retired", "event=executor_lost")
    assert [message for message in caplog.messages if message.startswith(gone)] == [event]


async def test_an_executor_that_is_retired_while_it_is_attached_takes_no_groups() -> None:
    stage = Stage()
    waiting = stage.add()
    stage.owner.when_admitted = lambda: stage.driver.retire(is_retired=True)
    async with stage.running() as running:
        assert running.done()
    assert stage.owner.events == ["attached", "took 0 back", "detached"]
    assert waiting in stage.owner.fleet.queue
    assert not stage.session.sent


async def test_a_retired_executor_ends_its_work_and_takes_no_more() -> None:
    stage = Stage()
    async with stage.running() as running:
        await stage.submit(max_tokens=5)
        await stage.answer()
        stage.driver.retire(is_retired=True)
        waiting = await stage.submit(arrival=2)
        await stage.answer(3)
        assert not running.done()
        assert waiting in stage.owner.fleet.queue
        await stage.answer()
        assert running.done()
    assert len(stage.owner.token_ids) == 5
    assert waiting in stage.owner.fleet.queue
    assert stage.driver.num_losses == 0


async def test_an_executor_that_is_no_longer_retired_takes_groups_again() -> None:
    stage = Stage()
    async with stage.running() as running:
        await stage.submit()
        stage.driver.retire(is_retired=True)
        waiting = await stage.submit(arrival=2)
        stage.driver.retire(is_retired=False)
        await stage.answer()
        assert waiting not in stage.owner.fleet.queue
        assert not running.done()


async def test_a_retired_executor_that_is_lost_is_not_looked_for_again() -> None:
    stage = Stage()
    async with stage.running() as running:
        await stage.submit()
        stage.driver.retire(is_retired=True)
        stage.session.lose()
        await settle()
        assert running.done()
    assert stage.owner.events[-2:] == ["took 1 back", "detached"]
    assert stage.driver.num_losses == 1


async def test_before_a_driver_waits_it_has_the_line_dealt() -> None:
    stage = Stage()
    async with stage.running():
        before = stage.owner.num_deals
        await stage.submit()
        after_sending = stage.owner.num_deals
        await stage.answer()
    assert before < after_sending < stage.owner.num_deals, "what a core preempted may run on another one"


async def test_groups_that_can_never_go_on_are_reported_even_if_there_is_no_step() -> None:
    stage = Stage()
    async with stage.running():
        assert stage.driver.planner is not None
        group = stage.add()
        group.sequences = [replace(group.sequences[0]) for _ in range(stage.driver.planner.limits.max_num_seqs + 1)]
        group.has_run = True
        stage.driver.work.set()
        await settle()
        assert not stage.session.sent
        assert group not in stage.owner.fleet.queue
        assert len(stage.owner.events) == 2


@each_row(False, True)
async def test_steps_carry_a_digest_only_for_debugging(checks_batch_table: bool) -> None:
    stage = Stage(checks_batch_table=checks_batch_table)
    async with stage.running():
        await stage.submit()
        await stage.answer(3)
        assert all((step.table_digest is not None) == checks_batch_table for step in stage.session.sent)
        assert stage.driver.num_losses == 0


# After a loss without a result -----------------------------------------------------------------------


async def answer_probe(stage: Stage) -> None:
    """Answer the steps of the probe that runs."""
    session = stage.session
    while stage.session is session:
        await stage.answer()


async def lose_without_a_result(stage: Stage) -> None:
    """Lose an attachment whose first step is on its way."""
    await stage.submit(max_tokens=5)
    stage.session.lose()
    await settle()


async def test_an_executor_lost_without_a_result_runs_a_probe_and_then_one_group_until_a_step_has_finished() -> None:
    stage = Stage()
    async with stage.running():
        await lose_without_a_result(stage)
        assert (stage.driver.planner, len(stage.client.sessions)) == (None, 2)
        await answer_probe(stage)
        assert stage.owner.events[-2:] == ["probe succeeded", "attached"]
        assert stage.driver.planner is not None
        await stage.submit(arrival=2)
        assert (stage.driver.planner.is_probing, len(stage.driver.planner.groups)) == (True, 1)
        await stage.answer()
        assert (stage.driver.planner.is_probing, len(stage.driver.planner.groups)) == (False, 2)
        assert stage.driver.num_losses == 1


async def test_a_probe_that_is_lost_costs_no_group_anything_and_counts_as_a_loss() -> None:
    stage = Stage()
    async with stage.running():
        await lose_without_a_result(stage)
        for num_losses in (1, 2, 3):
            assert stage.driver.num_losses == num_losses
            stage.session.lose()
            await settle()
        assert stage.owner.events.count("took 1 back") == 1
        assert stage.owner.events.count("probe failed") == 3


async def test_an_executor_lost_before_it_was_asked_for_anything_is_attached_again_without_a_probe() -> None:
    stage = Stage()
    async with stage.running():
        stage.session.lose()
        await settle()
        assert stage.driver.planner is not None
        assert not stage.driver.planner.is_probing


async def test_an_executor_that_failed_is_left_alone_for_a_while_and_says_so() -> None:
    stage = Stage(backoff=Backoff(100.0, 100.0))
    stage.client.worker = FakeWorker()  # the same process each time
    async with stage.running():
        await lose_without_a_result(stage)
        assert len(stage.client.sessions) == 1
        assert re.fullmatch(
            r"the connection is gone; it failed 1 time in a row before its first result; next attempt in \d+\.\d s",
            stage.driver.last_trouble,
        )
        stage.client.worker = FakeWorker()  # restarted
        await settle()
        assert len(stage.client.sessions) == 2


# A step that hangs -----------------------------------------------------------------------------------


async def until_lost(stage: Stage, num_losses: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while stage.driver.num_losses < num_losses:
            await asyncio.sleep(0.001)


async def test_a_step_that_takes_much_longer_than_it_should_is_given_up_and_the_next_one_gets_more_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor_driver, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(executor_driver, "HANG_AFTER_S", 0.02)
    stage = Stage(1)
    stage.client.worker = FakeWorker()
    async with stage.running():
        await stage.submit()
        await asyncio.sleep(0.1)
        assert stage.driver.num_losses == 0, "nothing is known of the first step"
        assert stage.driver.planner is not None
        cost = stage.driver.planner.step_cost
        await stage.answer(3)
        await until_lost(stage, 1)
        await until(lambda: stage.driver.planner is not None)
        assert stage.owner.events == ["attached", "took 1 back", "detached", "attached"]
        assert stage.driver.planner.step_cost is cost
        assert cost.slack > 2.0
        stage.client.worker = FakeWorker()
        stage.session.lose()
        await settle()
        await answer_probe(stage)
        assert stage.driver.planner.step_cost is not cost, "another process may be slower"
    assert "event=no_executor address=virtual:1 cause='step 4 hangs: it has been running for" in caplog.text


async def test_a_step_does_not_hang_while_its_stream_is_being_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_driver, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(executor_driver, "HANG_AFTER_S", 0.02)
    stage = Stage(1)
    async with stage.running():
        await stage.submit()
        stage.session.is_resuming = True
        await stage.answer(3)
        await asyncio.sleep(0.1)
        assert stage.driver.num_losses == 0
        stage.session.is_resuming = False
        await until_lost(stage, 1)


@pytest.mark.parametrize(
    ("cpu_times_us", "is_lost"),
    [
        pytest.param(count(0, 50_000), False, id="uses its processor"),
        pytest.param(count(0, 10), True, id="wakes up at times"),
        pytest.param(repeat(7_000_000), True, id="stands still"),
        pytest.param(chain(range(0, 10**6, 50_000), repeat(10**6)), True, id="stands still after a while"),
        pytest.param(count(0, 10**6), True, id="is in a loop"),
        pytest.param(repeat(None), True, id="does not tell"),
        pytest.param(chain([10**6, 2 * 10**6], repeat(None)), True, id="answers no more"),
    ],
)
async def test_a_step_that_uses_its_processor_is_slow_and_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cpu_times_us: Iterator[int | None], is_lost: bool
) -> None:
    """The executor is asked every 10 ms; a step may take 20 ms longer than it should, or use 4 s of its processor."""
    monkeypatch.setattr(executor_driver, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(executor_driver, "HANG_AFTER_S", 0.02)
    monkeypatch.setattr(step_watch, "MOST_TIMES", 200.0)
    stage = Stage(1)
    async with stage.running():
        await stage.submit()
        asked: list[int | None] = []
        all_asked = asyncio.Event()

        def ask() -> Iterator[int | None]:
            for cpu_time_us in cpu_times_us:
                asked.append(cpu_time_us)
                if len(asked) == 60:
                    all_asked.set()
                yield cpu_time_us

        stage.session.cpu_times_us = ask()
        await stage.answer(3)
        if is_lost:
            await until_lost(stage, 1)
        else:
            async with asyncio.timeout(PATIENCE_S):
                await all_asked.wait()
            assert stage.driver.num_losses == 0
            # Of step 4, or of an earlier one that a busy machine held up: they are told once a minute.
            assert (
                len(re.findall(r"event=slow_step executor=virtual:1 step_id=\d cause='it has been ru", caplog.text))
                == 1
            )
            await stage.answer()
            assert stage.driver.num_losses == 0
