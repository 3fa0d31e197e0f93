"""The session of one executor where timing decides; what it does over gRPC is in tests/contract."""

import asyncio
import time
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import step_pb2
from octavo_shared.step_wire.step import Step, TableDelta
from octavo_shared.step_wire.wire_agreement import WireAgreement
from scheduler_svc.executors import session as executor_session
from scheduler_svc.executors.client import MAX_SIZES, ExecutorRefusedError, check_sizes
from scheduler_svc.executors.session import ExecutorLostError, ExecutorSession, SessionTimings
from tests.support.each_row import each_row


class StallingStream:
    """A stream that holds up the whole event loop for longer than a resume may take, then breaks."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s

    async def write(self, message: object) -> None:
        """Take everything."""

    async def read(self) -> None:
        """Break late."""
        await asyncio.sleep(0)
        time.sleep(self.stall_s)  # noqa: ASYNC251 a busy machine does this to the loop
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "the connection broke"
        )


class UnfitStream:
    """A stream that starts, and breaks whenever a step was sent."""

    def cancel(self) -> None:
        """It is over anyway."""

    async def write(self, message: object) -> None:
        """Take everything."""

    async def read(self) -> pb.StreamStepsResponse:
        """Start, then break."""
        if hasattr(self, "has_started"):
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "message too large"
            )
        self.has_started = True
        return pb.StreamStepsResponse(started=pb.StreamStarted(instance_id="one"))


class ScriptedStream(UnfitStream):
    """A stream that says what it is told to say."""

    def __init__(self, messages: list[pb.StreamStepsResponse]) -> None:
        self.messages = messages

    async def read(self) -> pb.StreamStepsResponse:
        """Say the next thing."""
        return self.messages.pop(0)


def session_over(stub: object, timings: SessionTimings) -> ExecutorSession:
    """Return a session over what stands for an executor."""
    return ExecutorSession(
        stub,  # type: ignore[arg-type]
        epoch=1,
        info=SimpleNamespace(instance_id="one"),  # type: ignore[arg-type]
        timings=timings,
        address="a:1",
        agreement=WireAgreement(),
    )


async def test_a_step_that_no_stream_carries_ends_the_session() -> None:
    stub = SimpleNamespace(StreamSteps=UnfitStream)
    session = session_over(stub, SessionTimings(resume_interval_s=0.0))
    await session.open()
    await session.send(Step(epoch=1, step_id=7, delta=TableDelta()))
    with pytest.raises(ExecutorLostError, match="the stream broke 6 times at step 7: RESOURCE_EXHAUSTED: message too"):
        await session.receive()
    session.close()


async def test_a_resume_gives_up_in_time_on_a_loop_that_stalls() -> None:
    # asyncio.wait_for of Python 3.11 swallows the cancellation here, and the retries never end.
    stub = SimpleNamespace(StreamSteps=lambda: StallingStream(stall_s=0.05))
    session = session_over(stub, SessionTimings(resume_timeout_s=0.02, resume_interval_s=0.001))
    session._stream = StallingStream(stall_s=0.0)  # type: ignore[assignment]
    started_s = time.monotonic()
    with pytest.raises(ExecutorLostError, match=r"no answer within 0\.02 s"):
        await session.receive()
    assert time.monotonic() - started_s < 30


async def test_the_stamps_are_of_the_moment_when_a_result_was_read_and_a_write_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0

    class SlowStream(UnfitStream):
        """A stream whose reads take 5 s, and its writes 3 s."""

        async def write(self, message: object) -> None:
            nonlocal now_s
            now_s += 3.0

        async def read(self) -> pb.StreamStepsResponse:
            nonlocal now_s
            now_s += 5.0
            return messages.pop(0)

    messages = [
        pb.StreamStepsResponse(started=pb.StreamStarted(instance_id="one")),
        pb.StreamStepsResponse(step=Answer(step_id=1)),
    ]
    monkeypatch.setattr(executor_session, "monotonic_s", lambda: now_s)
    session = session_over(SimpleNamespace(StreamSteps=SlowStream), SessionTimings())
    await session.open()
    assert now_s == 108.0
    await session.send(Step(epoch=1, step_id=1, delta=TableDelta()))
    await session.receive()
    assert (session.write_began_at_s, session.arrived_at_s) == (108.0, 116.0)
    session.close()


async def test_a_session_that_is_given_up_while_a_step_is_written_says_why() -> None:
    class FullStream(UnfitStream):
        """A stream that takes nothing behind its start, until it is cancelled."""

        def __init__(self) -> None:
            self.cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def cancel(self) -> None:
            self.cancelled.cancel()

        async def write(self, message: object) -> None:
            if hasattr(self, "has_started"):
                await self.cancelled

    session = session_over(SimpleNamespace(StreamSteps=FullStream), SessionTimings(step_timeout_s=0.0))
    await session.open()
    with pytest.raises(ExecutorLostError, match="no result within 0 s"):
        await session.send(Step(epoch=1, step_id=1, delta=TableDelta()))
    session.close()


@each_row(*MAX_SIZES)
def test_an_executor_larger_than_any_machine_is_refused(name: str) -> None:
    info = pb.GetExecutorInfoResponse()
    setattr(info, name, MAX_SIZES[name])
    check_sizes(info)
    setattr(info, name, 2**32 - 1)
    with pytest.raises(ExecutorRefusedError, match=f"reports {name} 4294967295; this scheduler accepts at most"):
        check_sizes(info)


Answer = step_pb2.ExecuteModelResponse
HOSTILE = {
    "half a token": Answer(step_id=1, sampled_token_ids=bytes(2**20 + 1)),
    "more log-probabilities than tokens": Answer(step_id=1, sampled_token_ids=bytes(4), logprobs=bytes(2**20)),
    "candidates without log-probabilities": Answer(step_id=1, candidate_token_ids=bytes(4 * 10**6)),
    "half a log-probability of a prompt": Answer(step_id=1, prompt_logprobs=bytes(2**20 + 1)),
}


@each_row(*HOSTILE)
async def test_an_answer_of_absurd_size_is_a_loss_in_words(name: str) -> None:
    started = pb.StreamStarted(instance_id="one")
    messages = [pb.StreamStepsResponse(started=started), pb.StreamStepsResponse(step=HOSTILE[name])]
    stub = SimpleNamespace(StreamSteps=lambda: ScriptedStream(messages))
    session = session_over(stub, SessionTimings())
    await session.open()
    with pytest.raises(ExecutorLostError, match="step 1 cannot be read: ") as caught:
        await session.receive()
    assert len(str(caught.value)) < 200
    session.close()


async def test_a_step_waits_while_the_stream_is_resumed() -> None:
    """The resume sends what was unanswered, and the step goes behind it, once."""
    written: list[int] = []
    is_resending, may_go_on = asyncio.Event(), asyncio.Event()

    class LaterStream(UnfitStream):
        """A stream that starts, takes its first step when it may, and breaks no more."""

        async def write(self, message: pb.StreamStepsRequest) -> None:  # type: ignore[override]
            if message.HasField("step"):
                written.append(message.step.step_id)
                is_resending.set()
                await may_go_on.wait()

        async def read(self) -> pb.StreamStepsResponse:
            if hasattr(self, "has_started"):
                return pb.StreamStepsResponse(step=Answer(step_id=1))
            self.has_started = True
            return pb.StreamStepsResponse(started=pb.StreamStarted(instance_id="one"))

    streams = [UnfitStream(), LaterStream()]
    session = session_over(SimpleNamespace(StreamSteps=lambda: streams.pop(0)), SessionTimings(resume_interval_s=0.0))
    await session.open()
    await session.send(Step(epoch=1, step_id=1, delta=TableDelta()))
    receiving = asyncio.create_task(session.receive())
    await is_resending.wait()
    sending = asyncio.create_task(session.send(Step(epoch=1, step_id=2, delta=TableDelta())))
    await asyncio.sleep(0)
    may_go_on.set()
    assert (await receiving).step_id == 1
    await sending
    assert written == [1, 2]
    session.close()
