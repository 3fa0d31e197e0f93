"""The sender against targets of this process, which answer when the test says so."""

import asyncio
import io
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from rich.console import Console

from octavo.bench.config import BenchConfig, BenchError, RequestFailedError
from octavo.bench.load import Load, LoadResult, SessionResult
from octavo.bench.plan import plan_load
from octavo.bench.record import Outcome, RequestRecord, TargetInfo, TokenUsage
from octavo.bench.session import run_session, shown
from tests.support.each_row import each_row
from tests.unit.octavo.bench.settings import bench_config

INFO = TargetInfo("octavo", "here", "tiny", 1024, 1000)


class ScriptedTarget:
    """Answers with one token, when `gate` is open; `fails` says which requests fail."""

    def __init__(self, fails: Callable[[RequestRecord], bool] = lambda record: False) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.records: list[RequestRecord] = []
        self.num_running = self.most_running = 0
        self.arrived: asyncio.Queue[RequestRecord] = asyncio.Queue()
        self.answer_s = 0.0
        self._fails = fails

    async def describe(self) -> TargetInfo:
        return INFO

    async def send(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.arrived.put_nowait(record)
        try:
            await self.gate.wait()
            await asyncio.sleep(self.answer_s)
            if self._fails(record):
                raise RequestFailedError("scripted")
            record.add_event(time.perf_counter(), 1)
            record.usage = TokenUsage(len(record.planned.prompt), 1)
        finally:
            self.num_running -= 1


async def run(target: ScriptedTarget, stop: asyncio.Event | None = None, **fields: object) -> LoadResult:
    return await Load(target, plan_load(bench_config(**fields), INFO, ()), stop or asyncio.Event()).run()


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    target = ScriptedTarget()
    target.gate.clear()
    load = asyncio.create_task(run(target, rate=2000.0, num_requests=40))
    for _ in range(40):
        await target.arrived.get()
    assert target.num_running == 40
    target.gate.set()
    assert [record.outcome for record in (await load).records] == [Outcome.COMPLETED] * 40


async def test_an_open_loop_sends_in_time_and_says_how_late_it_was() -> None:
    result = await run(ScriptedTarget(), rate=200.0, num_requests=60)
    for record in result.records:
        assert record.planned.scheduled_s is not None
        assert record.scheduled_s == result.begin_s + record.planned.scheduled_s
        assert record.lateness_s is not None
        assert record.lateness_s >= -0.002  # a timer may be early by its resolution
    assert result.lags_s


async def test_a_sender_that_is_held_up_is_late_and_sends_all_the_same() -> None:
    target = ScriptedTarget()

    def hold_up(record: RequestRecord) -> bool:
        if record.planned.index == 0:
            time.sleep(0.1)
        return False

    target._fails = hold_up
    result = await run(target, rate=1000.0, num_requests=100)
    latenesses = [record.lateness_s or 0.0 for record in result.records]
    assert max(latenesses) > 0.05
    assert len(latenesses) == 100
    # The clock ticks every 10 ms, so 100 ms are late for about ten ticks.
    assert sum(lag > 0.01 for lag in result.lags_s) >= 5


async def test_a_closed_loop_has_so_many_requests_at_once() -> None:
    target = ScriptedTarget()
    target.gate.clear()
    load = asyncio.create_task(run(target, concurrency=3, num_requests=20))
    for _ in range(3):
        await target.arrived.get()
    assert target.num_running == 3
    target.gate.set()
    result = await load
    assert target.most_running == 3
    assert [record.planned.index for record in result.records] == list(range(20))
    assert {record.lateness_s for record in result.records} == {None}


async def test_a_closed_loop_ends_with_its_duration() -> None:
    target = ScriptedTarget()
    target.answer_s = 0.005
    result = await run(target, concurrency=2, num_requests=None, duration_s=0.1)
    assert 2 <= len(result.records) < 100  # of the 502 that are planned
    assert result.end_s == max(record.ended_s for record in result.records)
    assert result.end_s - result.begin_s >= 0.1


async def test_failures_are_noted_and_the_load_goes_on() -> None:
    result = await run(ScriptedTarget(lambda record: record.planned.index % 4 == 1), concurrency=8, num_requests=8)
    assert [record.error for record in result.records] == [None, "scripted", None, None] * 2
    assert [record.outcome for record in result.records][:2] == [Outcome.COMPLETED, Outcome.FAILED]


async def test_a_client_whose_server_is_gone_does_not_ask_without_a_pause() -> None:
    result = await run(ScriptedTarget(lambda record: True), concurrency=1, num_requests=None, duration_s=0.25)
    assert 1 <= len(result.records) <= 3


@each_row({"rate": 1000.0}, {"concurrency": 5})
async def test_an_interrupted_load_ends_at_once_with_what_it_has(how: dict[str, float]) -> None:
    target, stop = ScriptedTarget(), asyncio.Event()
    load = asyncio.create_task(run(target, stop, num_requests=1000, **how))
    await target.arrived.get()
    while not target.records[0].event_times_s:
        await asyncio.sleep(0)
    target.gate.clear()
    before = len(target.records)
    while len(target.records) == before:
        await asyncio.sleep(0)
    stop.set()
    result = await load
    assert result.is_interrupted
    assert target.num_running == 0
    assert result.records[0].outcome is Outcome.COMPLETED
    assert result.records[-1].outcome is Outcome.CANCELLED
    assert math.isfinite(result.records[-1].ended_s)
    assert len(result.records) < 1000


async def session(target: ScriptedTarget, config: BenchConfig) -> tuple[SessionResult, list[str]]:
    titles: list[str] = []

    def watch(load: Load, title: str) -> AbstractContextManager[None]:
        titles.append(title)
        return nullcontext()

    return await run_session(config, target, asyncio.Event(), watch), titles


async def test_a_session_asks_once_warms_up_and_measures() -> None:
    target = ScriptedTarget()
    result, titles = await session(target, bench_config(num_requests=5, warmup=3))
    assert titles == ["warming up", "measuring"]
    assert len(target.records) == 1 + 3 + 5
    assert target.records[4:] == result.load.records
    assert result.info == INFO


async def test_nothing_is_sent_if_the_requests_do_not_fit() -> None:
    target = ScriptedTarget()
    with pytest.raises(BenchError, match="takes at most 1024 tokens"):
        await session(target, bench_config(input_len="2000"))
    assert not target.records


async def test_nothing_is_measured_if_the_first_request_fails() -> None:
    target = ScriptedTarget(lambda record: True)
    with pytest.raises(BenchError, match="nothing was measured: the first request failed at here: scripted"):
        await session(target, bench_config(warmup=2))
    assert len(target.records) == 1


async def test_nothing_is_measured_if_the_whole_warm_up_fails() -> None:
    with pytest.raises(BenchError, match="every request of the warm-up failed"):
        await session(ScriptedTarget(lambda record: record.planned.max_tokens > 1), bench_config(warmup=2))


async def test_a_load_in_which_nothing_arrives_is_refused() -> None:
    with pytest.raises(BenchError, match="the load has no request"):
        await session(ScriptedTarget(), bench_config(rate=0.001, num_requests=None, duration_s=0.01))


async def test_a_terminal_shows_how_far_the_load_is() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    target = ScriptedTarget()
    target.gate.clear()
    load = Load(target, plan_load(bench_config(), INFO, ()), asyncio.Event())
    assert isinstance(console.file, io.StringIO)
    with shown(console, load, "measuring"):
        running = asyncio.create_task(load.run())
        while "0 answered, 4 running" not in console.file.getvalue():
            await asyncio.sleep(0)
        target.gate.set()
        await running


async def test_what_is_no_terminal_shows_nothing() -> None:
    console = Console(file=io.StringIO())
    load = Load(ScriptedTarget(), plan_load(bench_config(), INFO, ()), asyncio.Event())
    with shown(console, load, "measuring"):
        await load.run()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


@each_row({"rate": 1000.0}, {"concurrency": 2})
async def test_an_unexpected_error_is_that_of_its_request_and_the_load_goes_on(how: dict[str, Any]) -> None:
    def break_down(record: RequestRecord) -> bool:
        if record.planned.index == 1:
            raise ZeroDivisionError
        if record.planned.index == 2:
            raise ValueError("no such part")
        return False

    result = await run(ScriptedTarget(break_down), num_requests=4, **how)
    assert [record.error for record in result.records] == [None, "ZeroDivisionError", "ValueError: no such part", None]
    assert [record.outcome for record in result.records][1:] == [Outcome.FAILED, Outcome.FAILED, Outcome.COMPLETED]
