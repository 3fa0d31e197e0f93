"""What a cell refuses before it asks an engine."""

import asyncio
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo_shared.errors import NoExecutorError, QueueFullError, UnavailableError
from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.link.cell import Cell
from scheduler_svc.link.engines_in_use import Joined
from scheduler_svc.link.messages import UNREACHABLE, EngineState
from scheduler_svc.link.remote_engine import RemoteEngine
from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.engine_client import EngineLoad
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.request.served_model import Reproducibility, ServedModel

MODEL = ServedModel(FakeWorker().info, 99, 8, None, Reproducibility((), "", ""))
FULL = replace(
    UNREACHABLE,
    model=MODEL,
    why_not_ready="",
    has_executor=True,
    num_waiting=2,
    max_waiting=2,
    load=EngineLoad(*[0] * 7),
)


async def nothing(*_: object) -> None:
    """Stand for what is of no interest here."""


def cell_of(*states: EngineState) -> Cell:
    """Return a cell that has joined an engine in each of these states."""
    cell = Cell(Mock(), Mock(), nothing, nothing, has_own_tokenizer=True)
    for number, state in enumerate(states):
        engine = RemoteEngine(Mock(), "0", nothing, cell._on_change)
        engine.state, engine.model, engine.scheduler_id = state, state.model, f"s{number}"
        cell._joined[str(number)] = Joined(engine, Mock())
    cell._addresses = list(cell._joined)
    cell._on_change()
    return cell


def test_a_full_queue_refuses_whom_all_engines_name_and_who_fills_it_with_what_is_checked() -> None:
    """All others are asked for at an engine, which knows the shares."""
    red = replace(FULL, tenants_at_share=frozenset({"red"}))
    one, two = cell_of(red), cell_of(red, FULL)
    with pytest.raises(QueueFullError, match=r"is full \(2 requests\)"), one.checking("new", "red"):
        pass
    with two.checking("new", "red"):
        pass
    with one.checking("new", "blue"), one.checking("newer", "blue") as found:
        assert found is MODEL
        with pytest.raises(QueueFullError, match=r"is full \(4 requests\)"), one.checking("newest", "blue"):
            pass
    with one.checking("newest", "blue"):
        pass
    tokens = replace(red, num_waiting=1, max_waiting_tokens=9, load=EngineLoad(1, 0, 9, 0, 0, 0, 0))
    with (
        pytest.raises(QueueFullError, match=r"is full \(1 request with 9 prompt tokens\)"),
        cell_of(tokens).checking("new", "red"),
    ):
        pass


async def test_whichever_engine_answers_first_what_most_serve_is_used_until_its_engines_are_gone() -> None:
    """A front that starts while a model is changed for another one."""

    def serves(weights: str) -> EngineState:
        return replace(FULL, model=replace(MODEL, reproducibility=Reproducibility(("n",), weights, "")))

    def tell(cell: Cell, number: int, state: EngineState) -> str:
        engine = cell.engines[number]
        engine.state, engine.model = state, state.model
        cell._on_change()
        assert cell.model is not None
        return cell.model.reproducibility.weights_digest

    for is_silent in (False, True):
        cell = cell_of(UNREACHABLE, UNREACHABLE, serves("new"), UNREACHABLE, UNREACHABLE)
        if is_silent:
            for engine in cell.engines[3:]:
                engine._stream.trouble = "connection refused"
        tell(cell, 0, serves("old"))
        assert tell(cell, 1, serves("old")) == "old"
        tell(cell, 3, serves("new"))
        assert tell(cell, 4, serves("new")) == ("old" if is_silent else "new")


async def test_whoever_cannot_be_placed_hears_why() -> None:
    draining = replace(FULL, is_draining=True, why_not_ready="the scheduler is draining")
    alone = replace(FULL, has_executor=False, why_not_ready="no executor is attached", last_trouble="refused")
    leaving = replace(FULL, why_not_ready="every executor is draining")
    rows: list[tuple[tuple[EngineState, ...], type[Exception], str]] = [
        ((UNREACHABLE,), UnavailableError, "the engine does not answer; retry in a moment"),
        ((), UnavailableError, "the engine does not answer; retry in a moment"),
        ((draining, draining), UnavailableError, "draining; retry with another scheduler"),
        ((draining, alone), NoExecutorError, "1: refused"),
        ((alone, leaving), NoExecutorError, "every executor is draining; retry in a moment"),
    ]
    for states, error, words in rows:
        with pytest.raises(error) as caught, cell_of(*states).checking("new", ""):
            pass
        assert words in str(caught.value), states


async def asked(cell: Cell, num_requests: int) -> "list[asyncio.Task[None]]":
    """Have the first engine of a cell be asked for so many requests."""
    [engine, *_], sink = cell.engines, Mock(so_far=lambda: Continuation((ContinuedOutput(np.array([], np.int32)),)))
    requests = [
        EngineRequest(f"r{n}", np.zeros(3, np.int32), SamplingRow(), StopConditions()) for n in range(num_requests)
    ]
    tasks = [asyncio.create_task(engine.submit(request, sink, MODEL)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def test_what_was_aborted_goes_on_nowhere_when_its_engine_is_gone() -> None:
    same = replace(FULL, model=replace(MODEL, reproducibility=Reproducibility(("n",), "w", "")))
    cell = cell_of(same, same)
    lost, other = cell.engines
    tasks = await asked(cell, 3)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.sleep(0)
    await lost.lose("it is gone")
    await asyncio.sleep(0)
    assert [remote.request.request_id for remote in other._requests.values()] == ["r2"]
    assert lost.num_requests == 0
    tasks[2].cancel()


async def test_requests_that_no_other_engine_goes_on_with_end_each_once() -> None:
    """The scheduler is back with another model: at another address, or at its own one."""
    cell = cell_of(FULL, FULL)
    lost, other = cell.engines
    tasks = await asked(cell, 3)
    info = replace(MODEL.info, model_hash="another")
    other.scheduler_id, other.model = lost.scheduler_id, replace(MODEL, info=info)
    await lost.lose("it is gone")
    await asyncio.sleep(0)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {str(error) for error in ended} == {"the scheduler came back with a different model; retry"}
    assert cell.num_requests == 0


def test_an_engine_whose_address_is_taken_away_gets_nothing_new_and_is_left_once_it_has_nothing_of_ours() -> None:
    ready = replace(FULL, num_waiting=0)
    cell = cell_of(ready, ready)
    taken_away = cell.engines[1]
    taken_away._requests[1] = Mock()
    cell._addresses = ["0"]
    cell._on_change()
    assert (len(cell.engines), cell._used) == (2, [cell.engines[0]])
    del taken_away._requests[1]
    cell._on_change()
    assert len(cell.engines) == 1
