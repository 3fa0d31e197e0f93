"""The engine's own rules, on cores that nobody drives."""

import asyncio
import logging
from dataclasses import replace

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo_shared.errors import CacheTooSmallError, InvalidFieldError, OctavoServiceError, QueueFullError
from octavo_shared.step_wire.step import Step
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.engine import engine as engine_module
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.tenants import TenantQuota, Tenants
from scheduler_svc.request.served_model import ServedModel
from tests.support.driving import group, small_limits
from tests.support.each_row import each_row
from tests.support.idle_engine import IdleEngine
from tests.support.patience import PATIENCE_S
from tests.support.toy_executor import ToyExecutor, count_up


def crowded() -> IdleEngine:
    """An engine where a tenant may let one request wait, and the nameless one does."""
    idle = IdleEngine(["a"], small_limits())
    engine = idle.engine
    engine.set_tenants(Tenants(others=TenantQuota(max_waiting=1)))
    engine.fleet_model.model = ServedModel(FakeWorker().info, 24, 4)
    idle.add(group(0, 4))
    return idle


def test_a_tenant_whose_share_of_the_queue_is_full_is_refused() -> None:
    with pytest.raises(QueueFullError, match="the waiting queue is full"):
        crowded().engine.admitting_model("new", "")


def test_a_full_share_of_the_queue_keeps_nobody_else_out() -> None:
    engine = crowded().engine
    assert engine.admitting_model("new", "another") is engine.model


def test_a_request_that_is_being_tokenized_has_its_place_in_the_queue() -> None:
    idle = crowded()
    engine = idle.engine
    engine.waiting.settings = replace(engine.waiting.settings, max_waiting_requests=3)
    with engine.checking("first", "another"):
        with pytest.raises(QueueFullError, match="of tenant 'another'"):
            engine.admitting_model("second", "another")
        with engine.checking("second", "a third one"):
            assert engine.waiting.num_waiting == 3
            with pytest.raises(QueueFullError, match=r"full \(3 requests\)"):
                engine.admitting_model("third", "a fourth one")
    assert engine.waiting.num_waiting == 1
    assert engine.admitting_model("third", "another") is engine.model


def test_a_request_that_is_refused_while_it_is_tokenized_leaves_its_place() -> None:
    engine = crowded().engine
    with pytest.raises(InvalidFieldError), engine.checking("bad", "another"):
        raise InvalidFieldError("text", "empty", "at least 1 character long")
    assert engine.waiting.num_waiting == 1


async def test_a_scheduler_whose_last_executor_leaves_is_not_ready_until_one_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "scheduler_svc.engine.readiness")
    idle = IdleEngine(["a", "b"], small_limits())
    engine, (first, second) = idle.engine, idle.engine.drivers.values()
    await engine.on_addresses_changed()
    for retired in ([first], [first, second], [second], []):
        for driver in (first, second):
            driver.retire(is_retired=driver in retired)
        await engine.on_addresses_changed()
    await engine.start_draining()
    assert idle.readiness == [True, True, False, True, True, False]
    assert caplog.messages == [
        "event=ready",
        "event=not_ready cause='every executor is leaving the fleet'",
        "event=ready",
        "event=not_ready cause='the scheduler is draining'",
    ]


async def test_a_scheduler_without_executors_is_not_ready_and_says_why() -> None:
    idle = IdleEngine(["a"], None)
    idle.engine.drivers["a"].last_trouble = "it loads"
    await idle.engine.on_detached(idle.engine.drivers["a"])
    assert idle.readiness == [False]
    assert idle.engine.readiness.why_not == "no executor is attached (a: it loads)"


def test_a_bug_ends_the_requests_of_its_core_and_those_that_wait_and_no_others() -> None:
    idle = IdleEngine(["a", "b"], small_limits(max_num_seqs=1))
    broken, sound = idle.planners
    failed, kept = idle.add(group(0, 4)), idle.add(group(1, 4))
    broken.schedule(0.0)
    sound.schedule(0.0)
    waiting, suspect, parked = (
        idle.add(group(2, 4)),
        idle.add(group(3, 4), num_losses=2),
        idle.add(group(4, 4), num_losses=2),
    )
    suspects = idle.engine.requests.suspects
    assert (suspects.current, suspects.parked) == (suspect, [parked])
    idle.engine.fail_all(broken)
    assert list(idle.engine.requests.values()) == [kept]
    assert not idle.engine.queue
    assert (suspects.current, suspects.parked) == (None, [])
    assert idle.engine.fleet.planners == [sound]
    assert [type(request.error) for request in (failed, waiting, suspect, parked)] == [OctavoServiceError] * 4
    assert kept.error is None


@each_row("take_back", "fail_all")
def test_preemptions_of_a_core_that_is_gone_still_count(end: str) -> None:
    idle = IdleEngine(["a", "b"], small_limits())
    for count, planner in enumerate(idle.planners, start=1):
        planner.preemption.num_preemptions[PreemptionMode.SWAP] = count
    if end == "take_back":
        idle.engine.take_back(idle.planners[0], "a", "it is gone")
    else:
        idle.engine.fail_all(idle.planners[0])
    assert idle.engine.fleet.num_preemptions == {PreemptionMode.RECOMPUTE: 0, PreemptionMode.SWAP: 3}


# Whom a loss counts against ---------------------------------------------------------------------------


def decide(idle: IdleEngine, planner: ExecutorPlanner) -> Step:
    """Let the engine have a core decide a step."""
    scheduled = idle.engine.schedule(planner, "a", 0.0)
    assert scheduled is not None
    return scheduled.step


def test_a_request_that_can_never_go_on_has_ended_when_the_step_is_there() -> None:
    """Nothing is awaited in between, so that nobody meets a live request whose group has ended."""
    idle = IdleEngine(["a"], small_limits(max_model_len=24))
    too_long = idle.add(group(0, 24))
    too_long.group.has_run = True
    kept = idle.add(group(1, 4))

    decide(idle, idle.planners[0])

    assert isinstance(too_long.error, CacheTooSmallError)
    assert list(idle.engine.requests.values()) == [kept]


def lost(*, has_result: bool) -> tuple[IdleEngine, LiveRequest, LiveRequest]:
    """Return two requests that ran on a lost executor: one from its first step on, and one that came later."""
    idle = IdleEngine(["a"], small_limits())
    [planner] = idle.planners
    executor = ToyExecutor(planner.limits, count_up)
    first = idle.add(group(0, 4))
    result = executor.execute(decide(idle, planner))
    if has_result:
        idle.engine.deliver(planner, planner.process(result))
    later = idle.add(group(1, 4))
    decide(idle, planner)
    idle.engine.take_back(planner, "a", "it is gone")
    return idle, first, later


def test_a_loss_counts_at_once_against_those_that_came_after_a_finished_step() -> None:
    _, first, later = lost(has_result=True)
    assert (first.num_losses, later.num_losses) == (0, 1)
    assert (first.group.lost_on, later.group.lost_on) == ("a", "a")


@each_row(True, False)
def test_a_loss_without_a_result_counts_if_a_probe_succeeds_and_is_forgotten_if_it_fails(works: bool) -> None:
    idle, *both = lost(has_result=False)
    assert [request.num_losses for request in both] == [0, 0]
    idle.engine.on_probed("b", works=True)
    assert [request.num_losses for request in both] == [0, 0], "another executor says nothing"
    idle.engine.on_probed("a", works=works)
    assert [request.num_losses for request in both] == [works, works]
    idle.engine.on_probed("a", works=True)
    assert [request.num_losses for request in both] == [works, works]


def test_who_had_a_token_since_is_not_counted() -> None:
    idle, first, later = lost(has_result=False)
    first.forgive_losses()
    idle.engine.fleet.forgive_loss(first.group)
    idle.engine.on_probed("a", works=True)
    assert (first.num_losses, later.num_losses) == (0, 1)
    assert first.group.lost_on == ""


def lose_again(idle: IdleEngine, request: LiveRequest) -> None:
    """Let another executor, which works, be lost as soon as it computes a request."""
    planner = idle.join("b", small_limits())
    executor = ToyExecutor(planner.limits, count_up)
    while request.group not in planner.groups_in_flight:
        sent = idle.engine.schedule(planner, "b", 0.0)
        if sent is not None and request.group not in planner.groups_in_flight:
            idle.engine.deliver(planner, planner.process(executor.execute(sent.step)))
    idle.engine.take_back(planner, "b", "it is gone")
    idle.engine.on_probed("b", works=True)


def test_who_shared_two_losses_is_computed_alone_and_ends_after_the_fourth_loss_suffered_so() -> None:
    idle, first, later = lost(has_result=False)
    idle.engine.on_probed("a", works=True)
    lose_again(idle, first)
    suspects = idle.engine.requests.suspects
    assert (suspects.current, suspects.parked, first.num_lone_losses) == (first, [later], 0)
    third = idle.add(group(2, 4))
    for num_lone_losses in range(1, 4):
        lose_again(idle, first)
        assert first.num_lone_losses == num_lone_losses
    assert first.error is None
    lose_again(idle, first)
    assert str(first.error) == "the executor was lost 4 times in a row while running this request alone"
    assert (suspects.current, later.num_lone_losses, third.num_losses) == (later, 0, 0)


def test_a_loss_between_two_steps_is_nobodys_fault() -> None:
    idle = IdleEngine(["a"], small_limits())
    request = idle.add(group(0, 4))
    [planner] = idle.planners
    updates = planner.process(ToyExecutor(planner.limits, count_up).execute(decide(idle, planner)))
    idle.engine.take_back(planner, "a", "it is gone")
    idle.engine.deliver(planner, updates)
    assert (request.num_losses, request.unclear_losses, request.num_lost_executors) == (0, {}, 1)


async def test_while_groups_wait_the_cores_look_at_them_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "TICK_INTERVAL_S", 0.001)
    idle = crowded()
    work = idle.engine.drivers["a"].work
    running = asyncio.create_task(idle.engine.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                await work.wait()
                work.clear()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
