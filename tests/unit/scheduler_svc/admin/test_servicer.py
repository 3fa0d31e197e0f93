"""What AdminService refuses, as far as it takes no executor; the rest is in the contract tests."""

from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError, UnknownNameError
from scheduler_svc.admin.servicer import MAX_PAGE_SIZE, AdminServicer, number_in, page_size_of
from scheduler_svc.step_log.writer import StepLogSettings, StepLogWriter
from tests.support.driving import small_limits
from tests.support.each_row import each_row
from tests.support.idle_engine import IdleEngine

NO_CONTEXT: Any = None


async def test_there_is_no_step_without_an_executor() -> None:
    idle = IdleEngine([], None)
    idle.engine.drivers.membership.troubles["executors:50061"] = "executors:50061 cannot be looked up: no answer"
    with pytest.raises(UnknownNameError, match=r"no executor is attached \(executors:50061 cannot be looked up"):
        await AdminServicer(idle.engine).GetStep(pb.GetStepRequest(), NO_CONTEXT)


async def test_there_is_no_step_before_the_first_one() -> None:
    servicer = AdminServicer(IdleEngine(["localhost:50061"], small_limits()).engine)
    with pytest.raises(UnknownNameError, match="no steps are kept: the executor has run none"):
        await servicer.GetStep(pb.GetStepRequest(), NO_CONTEXT)


async def test_a_fleet_without_executors_is_all_zeros() -> None:
    state = await AdminServicer(IdleEngine([], None).engine).GetSchedulerState(
        pb.GetSchedulerStateRequest(), NO_CONTEXT
    )
    assert state == pb.GetSchedulerStateResponse(
        uptime_ms=state.uptime_ms,
        version=octavo.__version__,
        max_waiting_requests=1000,
        status_text="not ready: no executor is attached",
    )


async def test_a_fleet_that_only_drains_is_not_ready() -> None:
    idle = IdleEngine(["e"], small_limits())
    servicer, asked = AdminServicer(idle.engine), pb.GetSchedulerStateRequest()
    (driver,) = idle.engine.drivers.values()
    texts = []
    for is_draining in (False, True):
        await idle.engine.drain_executor(driver, is_draining=is_draining)
        texts.append((await servicer.GetSchedulerState(asked, NO_CONTEXT)).status_text)
    assert texts == ["ready", "not ready: every executor is draining"]


async def test_a_step_log_that_stopped_says_why(tmp_path: Path) -> None:
    engine = IdleEngine([], None).engine
    engine.step_log = StepLogWriter(StepLogSettings(tmp_path, 2**20))
    servicer = AdminServicer(engine)
    troubles = []
    for trouble in ("", "No space left on device"):
        if trouble:
            engine.step_log._stop(trouble)
        troubles.append((await servicer.GetSchedulerState(pb.GetSchedulerStateRequest(), NO_CONTEXT)).step_log_trouble)
    engine.step_log.close()
    assert troubles == ["", "No space left on device"]


@each_row("x", "-1", "1.0", "\u0663", "9" * 19)
def test_a_page_token_is_a_number_that_was_given_out(token: str) -> None:
    with pytest.raises(InvalidFieldError, match="next_page_token"):
        number_in(token)


def test_an_empty_page_token_is_the_start() -> None:
    assert number_in("") == 0
    assert number_in("17") == 17


def test_a_page_has_a_limit_and_a_default() -> None:
    assert page_size_of(0) == 100
    assert page_size_of(MAX_PAGE_SIZE) == MAX_PAGE_SIZE
    with pytest.raises(InvalidFieldError, match="from 0 to 1000"):
        page_size_of(MAX_PAGE_SIZE + 1)
