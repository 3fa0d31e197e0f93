"""The session of one executor where timing decides; what it does over gRPC is in tests/contract."""

import asyncio
import time
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from scheduler_svc.executor_client import ExecutorLostError, ExecutorSession, SessionTimings


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


async def test_a_resume_gives_up_in_time_on_a_loop_that_stalls() -> None:
    # asyncio.wait_for of Python 3.11 swallows the cancellation here, and the retries never end.
    stub = SimpleNamespace(StreamSteps=lambda: StallingStream(stall_s=0.05))
    info = SimpleNamespace(instance_id="one")
    session = ExecutorSession(stub, 1, info, SessionTimings(resume_timeout_s=0.02, resume_interval_s=0.001))  # type: ignore[arg-type]
    session._stream = StallingStream(stall_s=0.0)  # type: ignore[assignment]
    started_s = time.monotonic()
    with pytest.raises(ExecutorLostError, match=r"no answer within 0\.02 s"):
        await session.receive()
    assert time.monotonic() - started_s < 30
