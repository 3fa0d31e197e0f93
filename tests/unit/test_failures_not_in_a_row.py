"""What failures leave behind is gone after a success: the next ones are met as the first ones were."""

import asyncio
import itertools
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.batch import runner
from octavo.batch.batch_file import Request
from octavo.calls.resumption import ResumeWindow
from octavo.errors import LocalServiceError, UnavailableError
from octavo.local import restarts
from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.watched_files import WatchedFiles
from scheduler_svc.engine.suspects import is_suspect
from scheduler_svc.executors import driver as executor_driver
from scheduler_svc.executors.circuit_breaker import Backoff, CircuitBreaker, RetryPace
from scheduler_svc.executors.client import ExecutorRefusedError
from scheduler_svc.executors.step_watch import StepWatch
from scheduler_svc.front.openai.chat_outputs import CallsEnding
from scheduler_svc.front.tool_calls.parser import ToolCallParser
from scheduler_svc.processes import supervisor
from scheduler_svc.processes.supervisor import KeptProcess
from tests.support.each_row import each_row
from tests.support.live_requests import live_request
from tests.unit.scheduler_svc.executors.test_driver import Stage, settle
from tests.unit.scheduler_svc.front.tool_calls.parsing import TOOLS, Parsed, format_named
from tests.unit.scheduler_svc.front.tool_calls.test_broken_calls import WRITTEN, wrong_texts

# Fails once more and returns what is seen of it; succeeds once.
Pair = tuple[Callable[[], object], Callable[[], object]]


def breaker() -> Pair:
    one = CircuitBreaker(lambda: 1.0, Backoff(1.0, 60.0))

    def fail() -> float:
        one.fail("a", "it broke", 0.0)
        return one.wait_s("a", 0.0)

    return fail, one.close


def resume_window() -> Pair:
    now_s = itertools.count(0.0, 10.0)
    one = ResumeWindow(35.0, lambda: 0.0)

    def fail() -> object:
        try:
            return one.pause_s(UnavailableError("gone"), next(now_s))
        except UnavailableError:
            return "given up"

    return fail, one.note_news


def request_that_loses_executors() -> Pair:
    one = live_request()

    def fail() -> tuple[bool, int]:
        one.note_loss("a", counts=True, was_alone=True)
        one.note_loss(f"b{one.num_losses}", counts=False)
        return is_suspect(one), one.num_losses + one.num_lone_losses + len(one.unclear_losses)

    return fail, one.forgive_losses


def step_that_stands_still() -> Pair:
    one, step_ids = StepWatch(), [1]
    return lambda: one.look(step_ids[-1], 0, 1.0), lambda: step_ids.append(step_ids[-1] + 1)


@each_row(
    (breaker, [1.0, 2.0, 4.0]),
    (resume_window, [0.05, 0.1, 0.2, 0.4, "given up"]),
    (request_that_loses_executors, [(True, 3), (True, 6), (True, 9)]),
    (step_that_stands_still, [False, True, True]),
)
def test_after_a_success_failures_are_met_as_the_first_ones(make: Callable[[], Pair], seen: list[object]) -> None:
    fail, succeed = make()
    for _ in range(3):
        assert [fail() for _ in seen] == seen
        succeed()


async def test_an_executor_that_was_attached_is_soon_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pauses = itertools.count(0.0), list[float]()

    class Pace(RetryPace):
        def next_pause_s(self, now_s: float) -> float:
            pauses.append(super().next_pause_s(next(clock)))
            return 0.0

    monkeypatch.setattr(executor_driver, "RetryPace", lambda longest_s: Pace(3.0))
    stage = Stage()
    stage.client.refusals = [ExecutorRefusedError("not yet")] * 3
    async with stage.running():
        await settle()
        stage.client.refusals = [ExecutorRefusedError("not yet")] * 2
        stage.session.lose()
        await settle()
    assert pauses[:6] == pytest.approx([0.05, 0.1, 0.2] * 2)


class Child:
    """A service that is started again: each start fails, or serves for so many seconds."""

    service, title, log_hint, has_ended = "executor", "executor 1", "", True

    def __init__(self, served_s: list[float | None]) -> None:
        self.now_s = 0.0
        self._served_s = iter(served_s)
        self._next_s: float | None = 0.0

    async def start(self) -> None:
        self._next_s = next(self._served_s)

    async def wait_until_serving(self) -> None:
        if self._next_s is None:
            raise LocalServiceError("it fails")

    async def wait_for_end(self) -> str:
        self.now_s += self._next_s or 0.0
        return "it stopped"

    def failure(self, cause: str) -> LocalServiceError:
        return LocalServiceError(cause)


async def test_starts_that_fail_are_counted_in_a_row_and_pauses_begin_anew_behind_a_steady_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child, num_restarts = Child([None, None, 1.0, None, None, 99.0, None, None, None]), list[int]()
    monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=lambda: child.now_s))

    class Policy(restarts.RestartPolicy):
        def pause_s(self, num: int, share: float) -> float:
            num_restarts.append(num)
            return 0.0

    keeping: Any = restarts.Restarts([child], lambda said: None, Policy(max_failed_starts=3))  # type: ignore[list-item]
    assert "3 starts in a row failed" in str(await keeping.run())
    assert num_restarts == [0, 1, 2, 3, 4, 5, 0, 1, 2]


async def test_a_process_that_has_run_for_long_is_soon_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.004)
    ran_s = iter([0.0, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0])

    class Process(KeptProcess):
        async def _run(self) -> float:
            if (one := next(ran_s, None)) is None:
                self.stop()
            return one or 0.0

    process: Any = Process("core", "module", settings=lambda: None, on_line=lambda name, line: None)  # type: ignore[arg-type, return-value]
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(process.keep(), 5.0)
    pauses = [message.rpartition("=")[2] for message in caplog.messages]
    assert pauses == ["0.001", "0.002", "0.004", "0.004", "0.001", "0.002", "0.004"]


async def test_a_server_that_was_away_may_be_busy_as_long_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, statuses = itertools.count(0.0, runner.PATIENCE_S / 3), iter([503, 503, None, 200, 503, 503, 200])
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    class Server(runner.Server):
        async def _send(self, method: str, path: str, **options: Any) -> tuple[int, Any, Any]:
            if (status := next(statuses)) is None:
                raise ConnectionError("it is gone")
            return status, {"Retry-After": "0"}, {}

    async with Server("http://server", {}, ssl.create_default_context(), print) as server:
        answer = await server.ask(Request("/v1/completions", {}))
    assert answer.response is not None
    assert answer.response["status_code"] == 200


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "json"])  # it has no marker for the next one
def test_each_call_of_an_output_is_read_as_if_it_were_alone(name: str) -> None:
    texts = [WRITTEN[name].text, *wrong_texts(name)]
    alone = {text: read(name, text) for text in texts}
    for pair in itertools.product(texts, repeat=2):
        both, (first, second) = read(name, "\n".join(pair)), (alone[text] for text in pair)
        assert both.parsed.content.split() == [*first.parsed.content.split(), *second.parsed.content.split()], pair
        assert both.parsed.calls == [*first.parsed.calls, *second.parsed.calls], pair
        assert both.parsed.remains == [*first.parsed.remains, *second.parsed.remains], pair
        assert both.reason == ("stop" if both.parsed.remains else second.reason), pair
        if not first.parsed.calls and not first.parsed.remains:
            assert both.parsed.ids == second.parsed.ids, "the id of a call that nobody was told of is free"


@dataclass
class Read:
    """What an output with calls is to clients, and why it ended for them."""

    parsed: Parsed
    reason: str


def read(name: str, text: str) -> Read:
    parser, parsed, ending = ToolCallParser(format_named(name), TOOLS, "a"), Parsed(), CallsEnding()
    for start in range(0, len(text), 5):
        parsed.add(events := parser.feed(text[start : start + 5]))
        ending.add(events)
    parsed.add(events := parser.finish())
    ending.add(events)
    return Read(parsed, ending.of("stop"))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, is_first: bool) -> None:
    path, following = tmp_path / "file", ["two"] if is_first else []

    def write(text: str) -> None:
        other = tmp_path / "other"
        other.write_text(text)
        os.replace(other, path)

    def load() -> str:
        text = path.read_text()
        if following:
            write(following.pop())
        if "bad" in text:
            raise OctavoServiceError("it is bad")
        return text

    write("one")
    watched = WatchedFiles("words", [path], load, lambda: 0.0)
    assert watched.current() == ("two" if is_first else "one")
    for text, next_text, values in (("six", "ten", ["six", "ten"]), ("bad", "red", ["ten", "red"])):
        following.append(next_text)
        write(text)
        assert [watched.current(), watched.current()] == values
