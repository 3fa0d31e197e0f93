"""How long a request waits that no attached executor can take."""

from dataclasses import replace

import numpy as np
import pytest

from octavo_shared.errors import CacheTooSmallError, RequestAbortedError, UnavailableError
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.parameters import StopConditions
from tests.support.driving import group, small_limits
from tests.support.idle_engine import IdleEngine

TIMEOUT_S = 300.0  # the default


def look(idle: IdleEngine, now_s: float, *, has_changed: bool = False) -> None:
    if has_changed:
        idle.engine.orphans.note_change()
    idle.engine.orphans.look(now_s)


def too_long(idle: IdleEngine, arrival: int = 0) -> LiveRequest:
    """Return a request that waits for an executor with room for 64 tokens; those that are there have 24."""
    return idle.add(group(arrival, 5, StopConditions(100).accept(5, 64)))


def test_what_nobody_can_take_ends_when_its_time_is_up_and_the_rest_waits_on() -> None:
    idle = IdleEngine(["a"], small_limits())
    orphan, other = too_long(idle), idle.add(group(1, 5))
    look(idle, 10.0, has_changed=True)
    look(idle, 10.0 + TIMEOUT_S - 0.1)
    assert idle.engine.orphans.left_s(orphan, 10.0 + TIMEOUT_S - 0.1) == pytest.approx(0.1)
    assert orphan in idle.engine.requests.values()
    look(idle, 10.0 + TIMEOUT_S)
    assert isinstance(orphan.error, UnavailableError)
    assert (other.error, list(idle.engine.queue)) == (None, [other.group])


def test_an_executor_that_can_take_it_sets_the_clock_back_and_another_one_does_not() -> None:
    idle = IdleEngine(["a"], small_limits())
    orphan = too_long(idle)
    look(idle, 0.0, has_changed=True)
    idle.engine.fleet.join(small_limits(), 1)
    look(idle, 100.0, has_changed=True)
    assert idle.engine.orphans.left_s(orphan, 100.0) == TIMEOUT_S - 100.0
    idle.engine.fleet.join(small_limits(max_model_len=64, blocks=64), 1)
    look(idle, 200.0, has_changed=True)
    assert idle.engine.orphans.left_s(orphan, 200.0) is None


def test_an_executor_that_came_and_went_between_two_looks_leaves_orphans() -> None:
    idle = IdleEngine(["a"], None)
    planner = idle.engine.fleet.join(small_limits(), 1, "a")
    request = idle.add(group(0, 5))
    planner.schedule(0.0)
    idle.engine.take_back(planner, "a", "it is gone")
    look(idle, 1.0)
    look(idle, 1.0 + TIMEOUT_S)
    assert str(request.error) == ("no executor was attached within 300 s (--orphan-timeout-s); retry later")


def test_what_outgrows_those_that_are_there_waits_no_longer_for_one_that_is_expected() -> None:
    idle = IdleEngine(["a"], small_limits(max_num_seqs=2))
    idle.engine.drivers.add("b")  # which never comes
    look(idle, 0.0, has_changed=True)
    grown = idle.add(group(0, 4, num_sequences=3))
    grown.group.has_run = True
    idle.engine.schedule(idle.planners[0], "a", 1.0)
    look(idle, 1.0)
    assert idle.engine.orphans.left_s(grown, 1.0) == TIMEOUT_S
    look(idle, 1.0 + TIMEOUT_S)
    assert str(grown.error).startswith(
        "the request needs 3 slots of the batch, which has 2; no larger one was attached within"
    )


def test_what_has_outgrown_every_cache_elsewhere_is_not_told_to_retry() -> None:
    idle = IdleEngine(["a"], small_limits(blocks=8))
    outputs = tuple(ContinuedOutput(np.full(15, token_id, np.int32)) for token_id in range(3))
    grown = idle.add(replace(group(0, 4, num_sequences=3), continuation=Continuation(outputs)))
    look(idle, 0.0, has_changed=True)
    look(idle, TIMEOUT_S)
    assert isinstance(grown.error, CacheTooSmallError)
    assert str(grown.error).endswith("no larger one was attached within 300 s (--orphan-timeout-s)")


def test_a_parked_request_is_an_orphan_too_and_one_that_ended_is_none() -> None:
    idle = IdleEngine(["a"], None)
    requests = [idle.add(group(arrival, 5), num_losses=2) for arrival in range(3)]
    look(idle, 0.0, has_changed=True)
    idle.engine.requests.abort(requests[0], RequestAbortedError("aborted"))
    first_error = requests[0].error
    look(idle, TIMEOUT_S)
    assert requests[0].error is first_error
    assert [type(request.error) for request in requests[1:]] == [UnavailableError] * 2
    assert not idle.engine.requests
