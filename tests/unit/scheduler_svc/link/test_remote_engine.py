"""The front's side of the link: what it writes."""

import asyncio
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.errors import LostTooOftenError, RequestAbortedError
from octavo_shared.grpc.certificates import TlsFileError
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.link import engine_stream
from scheduler_svc.link.messages import UNREACHABLE, encode_failure, encode_losses, encode_state
from scheduler_svc.link.remote_engine import RemoteEngine
from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.engine_client import EngineLoad
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.losses import Losses
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.request.served_model import Reproducibility, ServedModel


class Call:
    """A stream that is written to."""

    def __init__(self) -> None:
        self.messages: list[pb.JoinRequest] = []

    async def write(self, message: pb.JoinRequest) -> None:
        """Keep a message."""
        self.messages.append(message)


async def nothing(*_: object) -> None:
    """Stand for what is of no interest here."""


async def test_no_message_is_larger_than_the_link_takes_and_their_order_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_stream, "MAX_PROMPT_BYTES", 1000)
    model = ServedModel(FakeWorker().info, 99, 8, None, Reproducibility((), "", ""))
    core = RemoteEngine(Mock(), "0", nothing, Mock())
    core.state = replace(UNREACHABLE, why_not_ready="")
    prompt = np.zeros(100, np.int32)
    requests = [EngineRequest(f"r{n}", prompt, SamplingRow(), StopConditions()) for n in range(7)]
    tasks = [asyncio.create_task(core.submit(request, Mock(), model)) for request in requests]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    call: Any = Call()
    tasks.append(asyncio.create_task(core._outbox.write_to(call)))
    while sum(len(message.submissions) for message in call.messages) < 7:
        await asyncio.sleep(0)
    assert [len(message.submissions) for message in call.messages] == [3, 3, 1]
    assert [[abort.number for abort in message.aborts] for message in call.messages] == [[], [], [1]]
    for task in tasks:
        task.cancel()


async def test_a_front_asks_for_its_core_ever_less_often_until_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificate cannot be used, but once: then the core welcomes it, and goes."""
    pauses: list[float] = []

    async def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 8:
            raise asyncio.CancelledError

    def open_channel() -> Any:
        if len(pauses) != 6:
            raise TlsFileError("the file is broken")
        return Welcoming()

    core = RemoteEngine(open_channel, "0", nothing, Mock())
    monkeypatch.setattr(
        core._stream, "_run_session", lambda _: core.take(pb.JoinResponse(welcome=pb.CoreWelcome()), Mock())
    )
    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        await core.run()
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5, 0.05, 0.1]
    assert core.engine_trouble == "the file is broken"


class Welcoming:
    """A channel to a core."""

    async def __aenter__(self) -> Any:
        return Mock()

    async def __aexit__(self, *_: object) -> None:
        """Close it."""


async def test_what_was_aborted_ends_with_its_core_and_no_other_core_goes_on_with_it() -> None:
    """Its core may have gone before the abort came, or before it said that the request ended."""
    model = ServedModel(FakeWorker().info, 99, 8, None, Reproducibility((), "", ""))
    core = RemoteEngine(Mock(), "0", nothing, Mock())
    core.state = replace(UNREACHABLE, why_not_ready="")
    requests = [EngineRequest(f"r{n}", np.zeros(3, np.int32), SamplingRow(), StopConditions()) for n in range(3)]
    sinks = [Mock(), Mock(), Mock()]
    tasks = [
        asyncio.create_task(core.submit(request, sink, model)) for request, sink in zip(requests, sinks, strict=True)
    ]
    await asyncio.sleep(0)
    await core.take(pb.JoinResponse(accepted=[1]), Mock())
    [handle] = sinks[0].begin.call_args.args
    handle.abort(RequestAbortedError("its client left"))
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert core.num_requests == 3  # the core says when they end
    await core.lose("it is gone")
    assert core.num_requests == 1
    assert [str(sink.end.call_args.args[1]) for sink in sinks if sink.end.called] == [
        "its client left",
        "the client cancelled the call or disconnected",
    ]
    tasks[2].cancel()


async def test_what_is_aborted_while_the_core_is_away_ends_at_once() -> None:
    model = ServedModel(FakeWorker().info, 99, 8, None, Reproducibility((), "", ""))
    core, sink = RemoteEngine(Mock(), "0", nothing, Mock()), Mock()
    core.state = replace(UNREACHABLE, why_not_ready="")
    request = EngineRequest("r1", np.zeros(3, np.int32), SamplingRow(), StopConditions())
    submitted = asyncio.create_task(core.submit(request, sink, model))
    await asyncio.sleep(0)
    await core.take(pb.JoinResponse(accepted=[1]), Mock())
    await submitted
    await core.lose("it is gone")
    [handle] = sink.begin.call_args.args
    handle.abort(RequestAbortedError("its client left"))
    assert (core.num_requests, str(sink.end.call_args.args[1])) == (0, "its client left")
    assert not core._outbox.message.aborts


async def test_what_the_engine_told_while_a_tokenizer_was_loading_is_served_then() -> None:
    """Another executor joined meanwhile; or all were replaced, by some with another tokenizer."""
    info = FakeWorker().info
    first = ServedModel(info, 99, 8, None, Reproducibility(("a",), "", ""))
    last = replace(first, info=replace(info, instance_id="other"))
    for later in (replace(first, reproducibility=Reproducibility(("a", "b"), "", "")), last):
        may_end, loaded = asyncio.Event(), list[str]()

        async def read(info: ExecutorInfo, _: object, may_end: asyncio.Event = may_end, loaded: Any = loaded) -> None:
            await may_end.wait()
            loaded.append(info.instance_id)

        core = RemoteEngine(Mock(), "0", read, Mock())
        for model in (first, later):
            await core.take(pb.JoinResponse(state=encode_state(replace(UNREACHABLE, model=model))), Mock())
            await asyncio.sleep(0)
        assert core.model is None
        may_end.set()
        assert core._loading is not None
        await core._loading
        assert core.model == core.state.model
        assert loaded == [info.instance_id, "other"][: 1 + (later is last)]


async def test_what_came_with_the_state_is_taken_before_the_state_moves_requests_to_another_engine() -> None:
    """An executor is lost: its engine tells the loss, an end, and that it has no executor, in one message."""
    model = ServedModel(FakeWorker().info, 99, 8, None, Reproducibility((), "", ""))
    other = RemoteEngine(Mock(), "0", nothing, Mock())
    other.model = model

    def move() -> None:
        for number, _ in core.waiting_requests:
            other.take_over(core, number)

    core = RemoteEngine(Mock(), "0", nothing, move)
    core.state = serving = replace(UNREACHABLE, why_not_ready="", has_executor=True, load=EngineLoad(*[0] * 7))
    sinks = [Mock(), Mock()]
    for number, sink in enumerate(sinks, 1):
        sink.so_far.return_value = Continuation((ContinuedOutput(np.zeros(0, np.int32)),))
        request = EngineRequest(f"r{number}", np.zeros(3, np.int32), SamplingRow(), StopConditions())
        submitted = asyncio.create_task(core.submit(request, sink, model))
        await asyncio.sleep(0)
        await core.take(pb.JoinResponse(accepted=[number]), Mock())
        await submitted
    message = pb.JoinResponse(state=encode_state(replace(serving, has_executor=False)))
    message.losses.add(number=1, losses=encode_losses(Losses(2, 1, "a:1")))
    message.ended.add(number=2, failure=encode_failure(LostTooOftenError(4)), ended=pb.EndedRequest())
    await core.take(message, Mock())
    [moved] = other._outbox.message.submissions
    assert (moved.request_id, moved.losses) == ("r1", encode_losses(Losses(2, 1, "a:1")))
    assert isinstance(sinks[1].end.call_args.args[1], LostTooOftenError)
    assert core.num_requests == 0
