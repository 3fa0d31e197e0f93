"""What the scheduler process says on stdout while it starts."""

import asyncio
import logging

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo_shared.process.stop_request import StopRequest
from scheduler_svc.__main__ import serve
from scheduler_svc.config.scheduler_config import SchedulerConfig
from tests.support.stack import ExecutorProcess


async def test_it_serves_once_an_executor_is_attached_and_says_before_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "scheduler_svc.engine.readiness")
    said: list[str] = []

    async def said_next() -> str:
        while not said:
            await asyncio.sleep(0.01)
            said.extend(capsys.readouterr().out.splitlines())
        return said.pop(0)

    monkeypatch.setattr("octavo_shared.grpc.grpc_server.SILENCE_S", 0.1)
    stop_wanted = asyncio.Event()

    async def wait(_: StopRequest) -> str:
        await stop_wanted.wait()
        return "the test is over"

    monkeypatch.setattr(StopRequest, "wait", wait)
    executor = ExecutorProcess(FakeWorker())
    await executor.start()  # to have a port
    await executor.kill()
    config = SchedulerConfig(listen="127.0.0.1:0", admin_listen="127.0.0.1:0", executor=(executor.address,))
    serving = asyncio.create_task(serve(config))

    assert (await said_next()).startswith("octavo scheduler serving admin on 127.0.0.1:")
    listening = await said_next()
    address = listening.removeprefix("octavo scheduler listening on ").partition(",")[0]
    assert listening.endswith(f"{address}, waiting for an executor at {executor.address}")
    why = f"no executor is attached ({executor.address}: "
    assert (await said_next()).startswith(f"octavo scheduler not serving yet: {why}")
    await executor.start()
    assert await said_next() == f"octavo scheduler serving on {address}"
    told = [record.getMessage() for record in caplog.records if record.name == "scheduler_svc.engine.readiness"]
    assert [message.partition("executor is attached")[0] for message in told] == [
        "event=not_ready cause='no ",
        "event=ready",
    ]
    stop_wanted.set()
    await serving
    await executor.kill()
