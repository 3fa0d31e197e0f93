"""The benchmark of the time between two steps: its arithmetic, its record, and the proxy that adds a round trip."""

import io
import math
import os
import queue
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import octavo
from benchmarks.step_gap import delay_proxy
from benchmarks.step_gap.__main__ import Case, Used, core_and_fronts, gap_table, gaps_of, running_stack
from benchmarks.step_gap.executor import STEP_TIMES, SleepingWorker, open_record
from executor_svc.fake.worker import FakeWorker
from shared.step import Step, TableDelta
from tests.support.patience import PATIENCE_S

CASE = Case(step_ms=3, round_trip_ms=1, num_sequences=32, steps_in_flight="2")

NOTHING = Used(0.0, 0.0, 0.0, {math.inf: 0})


def test_idle_is_the_share_of_the_time_between_steps() -> None:
    steps = np.array([(0, 800, 32), (1000, 1700, 32), (2000, 2900, 32)], STEP_TIMES)
    steps["begin_ns"] *= 1000
    steps["end_ns"] *= 1000

    before = Used(1.0, 0.0, 2.0, {0.001: 10, 0.01: 11, math.inf: 11})
    after = Used(1.003, 0.006, 2.006, {0.001: 19, 0.01: 21, math.inf: 21})

    gaps = gaps_of(CASE, steps, before, after)

    assert gaps.idle_share == pytest.approx((200 + 300) / (2900 - 800))
    assert gaps.gap_us == pytest.approx(250)
    assert (gaps.scheduler_us, gaps.fronts_us, gaps.executor_us) == pytest.approx((1000, 2000, 2000))
    assert gaps.turnaround_p99_ms == 10.0


def test_a_worker_records_each_step_before_the_last_one(tmp_path: Path) -> None:
    record = open_record(tmp_path / "steps", is_new=True)
    worker = SleepingWorker(FakeWorker(), 2.0, record)

    for step_id in (1, 2, 3):
        worker.launch(Step(1, step_id, TableDelta()))

    seen = open_record(tmp_path / "steps", is_new=False)
    assert np.count_nonzero(seen["end_ns"]) == 2
    assert (seen["end_ns"][:2] - seen["begin_ns"][:2] >= 2_000_000).all()
    assert seen["begin_ns"][1] >= seen["end_ns"][0]


class Clock:
    """Stands for `time`: whoever sleeps is woken by the test, when the time has come."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looks = threading.Semaphore(0)
        self.sleeps: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.wake_ups = threading.Semaphore(0)

    def perf_counter(self) -> float:
        self.looks.release()
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        until_s = self.now_s + duration_s
        self.sleeps.put(duration_s)
        self.wake_ups.acquire()
        self.now_s = max(self.now_s, until_s)


def test_the_proxy_delays_each_way_and_holds_nothing_up_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(delay_proxy, "time", clock)
    with socket.create_server(("127.0.0.1", 0)) as target, socket.create_server(("127.0.0.1", 0)) as listener:
        forwarding = (listener, target.getsockname(), 0.02)
        serving = threading.Thread(target=delay_proxy.serve, args=forwarding, daemon=True)
        serving.start()
        with socket.create_connection(listener.getsockname()) as client:
            server, _ = target.accept()
            with server:
                for clock.now_s in (0.0, 0.005, 0.01):
                    client.sendall(b"step")
                    clock.looks.acquire()
                    if not clock.now_s:
                        clock.looks.acquire()  # who sends the first has seen the time, and sleeps
                for sleep_s in (0.02, 0.005, 0.005):  # each is 5 ms younger, and comes 5 ms later
                    assert clock.sleeps.get() == pytest.approx(sleep_s)
                    clock.wake_ups.release()
                    assert server.recv(100) == b"step"
                server.sendall(b"answer")
                assert clock.sleeps.get() == pytest.approx(0.02)
                clock.wake_ups.release()
                assert client.recv(100) == b"answer"
        clock.wake_ups.release(2)  # both ways end
        listener.shutdown(socket.SHUT_RDWR)
        serving.join(PATIENCE_S)
        assert not serving.is_alive()


@pytest.mark.parametrize("num_fronts", [0, 2])
async def test_the_core_is_the_process_that_drives_the_executor(num_fronts: int, tmp_path: Path) -> None:
    case = Case(step_ms=3, round_trip_ms=0, num_sequences=16, steps_in_flight="auto", num_fronts=num_fronts)
    async with running_stack(case, tmp_path / "steps") as (scheduler, executor):
        async with octavo.Client(scheduler.address) as client:
            await client.wait_until_ready()
        core, fronts = core_and_fronts(scheduler)
        assert is_connected(core, executor.address)
        assert [is_connected(front, executor.address) for front in fronts] == [False] * num_fronts
        assert (core == scheduler.process.pid) == (num_fronts == 0)


def is_connected(pid: int, address: str) -> bool:
    """Whether a process has a connection to an address, 127.0.0.1:port (Linux)."""
    port = int(address.rpartition(":")[2])
    tables = (Path("/proc/net", name).read_text(encoding="ascii") for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if int(line[2].rpartition(":")[2], 16) == port}
    opened = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    return bool(sockets & opened)


def test_the_table_shows_each_case() -> None:
    gaps = gaps_of(CASE, np.array([(0, 9, 32), (10, 19, 32)], STEP_TIMES), NOTHING, NOTHING)
    output = io.StringIO()

    Console(file=output, width=200).print(gap_table([gaps, gaps]))

    assert output.getvalue().count("3 ms") == 2
