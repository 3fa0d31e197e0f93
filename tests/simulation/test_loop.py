"""The seeded event loop: what asyncio promises holds, what it does not promise differs, and nothing real gets in."""

import asyncio
import gc
import random
import secrets
import signal
import socket
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pytest

from octavo_shared.process import clock
from tests.simulation.loop import (
    LONGEST_THREAD_CALL_S,
    DeadlockError,
    LivelockError,
    RealWorldError,
    SimulationLoop,
    UnhandledError,
)
from tests.simulation.processes import SimulatedProcess
from tests.simulation.real_world import fence
from tests.simulation.services import CLOCKS_DRIFT, wall_clock

T = TypeVar("T")

SEEDS = range(12)


@contextmanager
def simulation(seed: int = 0, *, is_fair: bool = False) -> Iterator[SimulationLoop]:
    loop = SimulationLoop(str(seed), is_fair=is_fair)  # type: ignore[abstract]
    try:
        yield loop
    finally:
        loop.close()


def played(coroutine: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Return what a coroutine returns."""
    with simulation(seed) as loop:
        return loop.run_until_complete(coroutine)


def seen_by_seeds(play: Callable[[], Coroutine[Any, Any, T]]) -> list[T]:
    """Return what is seen with each seed, each only once."""
    found: list[T] = []
    for seed in SEEDS:
        if (result := played(play(), seed)) not in found:
            found.append(result)
    return found


# Order and time ----------------------------------------------------------------------------------------


def test_plain_callbacks_of_a_process_keep_their_order() -> None:
    async def play() -> list[int]:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        for number in range(20):
            loop.call_soon(seen.append, number)
        await asyncio.sleep(1)
        return seen

    assert seen_by_seeds(play) == [list(range(20))]


def test_tasks_meet_in_an_order_that_the_seed_draws() -> None:
    async def play() -> list[int]:
        seen: list[int] = []

        async def note(number: int) -> None:
            seen.append(number)

        await asyncio.gather(*(note(number) for number in range(5)))
        return seen

    orders = seen_by_seeds(play)
    assert len(orders) > len(SEEDS) // 2
    assert all(sorted(order) == list(range(5)) for order in orders)
    assert played(play(), 7) == played(play(), 7)


def test_a_fair_loop_runs_first_what_was_ready_first() -> None:
    async def play() -> list[int]:
        seen: list[int] = []

        async def note(number: int) -> None:
            seen.append(number)

        await asyncio.gather(*(note(number) for number in range(20)))
        return seen

    with simulation(is_fair=True) as loop:
        assert loop.run_until_complete(play()) == list(range(20))


def test_time_passes_only_when_nothing_is_ready() -> None:
    async def play() -> list[float]:
        begin_s, seen = asyncio.get_running_loop().time(), []
        for duration_s in (0.0, 1e-3, 86_400.0):
            await asyncio.sleep(duration_s)
            seen.append(asyncio.get_running_loop().time() - begin_s)
        for _ in range(1000):
            await asyncio.sleep(0)
        return [*seen, asyncio.get_running_loop().time() - begin_s]

    begin_s = time.monotonic()
    assert played(play()) == pytest.approx([0.0, 1e-3, 86_400.001, 86_400.001])
    assert time.monotonic() - begin_s < 30


def test_timers_run_by_their_deadlines_and_equal_ones_in_the_order_in_which_they_were_set() -> None:
    async def play() -> list[str]:
        loop = asyncio.get_running_loop()
        seen: list[str] = []
        deadline_s = loop.time() + 1
        for name, when_s in (("c", deadline_s), ("d", deadline_s), ("z", deadline_s + 1), ("a", deadline_s - 0.5)):
            loop.call_at(when_s, seen.append, name)
        loop.call_at(deadline_s - 10, seen.append, "past")
        await asyncio.sleep(3)
        return seen

    assert seen_by_seeds(play) == [["past", "a", "c", "d", "z"]]


def test_what_was_cancelled_never_runs() -> None:
    async def play() -> list[str]:
        loop = asyncio.get_running_loop()
        seen: list[str] = []
        handles = [loop.call_soon(seen.append, "soon"), loop.call_later(1, seen.append, "later")]
        for handle in handles:
            handle.cancel()
        due = loop.call_later(2, seen.append, "due with what cancels it")
        loop.call_at(due.when() - 0.5, due.cancel)
        await asyncio.sleep(5)
        return seen + [str(handle.cancelled()) for handle in (*handles, due)]

    assert seen_by_seeds(play) == [["True"] * 3]


# How a run ends ------------------------------------------------------------------------------------------


def test_a_deadlock_is_an_error() -> None:
    async def play() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"nothing can happen any more at 1000\.000000 s"):
        played(play())


def test_a_livelock_is_an_error() -> None:
    async def play() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(LivelockError, match="callbacks ran at"):
        played(play())


def test_what_a_callback_raises_ends_the_run() -> None:
    async def play() -> None:
        asyncio.get_running_loop().call_soon(int, "x")
        await asyncio.sleep(1)

    with pytest.raises(UnhandledError, match="nobody took ValueError"):
        played(play())


def test_what_the_first_coroutine_raises_is_raised() -> None:
    async def play() -> None:
        await asyncio.sleep(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        played(play())


# Nothing real ----------------------------------------------------------------------------------------------


async def _open_connection() -> object:
    return await asyncio.open_connection("127.0.0.1", 1)


async def _serve() -> object:
    return await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)


async def _look_up() -> object:
    return await asyncio.get_running_loop().getaddrinfo("localhost", 1)


async def _own_pool() -> object:
    return await asyncio.get_running_loop().run_in_executor(object(), int)  # type: ignore[arg-type]


async def _signal() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, int)


async def _read_a_file_descriptor() -> None:
    asyncio.get_running_loop().add_reader(0, int)


async def _process() -> object:
    return await asyncio.create_subprocess_exec("true")


def _soon(function: Callable[..., object], *args: Any) -> Callable[[], Awaitable[object]]:
    async def call() -> object:
        return function(*args)

    call.__name__ = f"{function.__module__}.{function.__name__}"
    return call


_REAL = [
    _open_connection,
    _serve,
    _look_up,
    _own_pool,
    _signal,
    _read_a_file_descriptor,
    _process,
    _soon(socket.create_connection, ("127.0.0.1", 1)),
    _soon(urllib.request.urlopen, "http://127.0.0.1:1"),
    _soon(lambda: threading.Thread(target=int).start()),
    _soon(lambda: time.sleep(0)),
    _soon(lambda: time.time()),
    _soon(lambda: time.monotonic()),
    _soon(lambda: time.perf_counter()),
    _soon(lambda: uuid.uuid4()),
    _soon(lambda: random.shuffle([])),
    _soon(lambda: subprocess.run(["true"], check=True)),
    lambda: asyncio.to_thread(lambda: time.sleep(0)),
    lambda: asyncio.to_thread(lambda: time.time()),
]


@pytest.mark.parametrize("ask", [pytest.param(ask, id=f"{number}") for number, ask in enumerate(_REAL)])
def test_what_is_real_is_refused(ask: Callable[[], Awaitable[object]]) -> None:
    async def play() -> None:
        await ask()

    with simulation() as loop, fence(loop, "0"), pytest.raises(RealWorldError):
        loop.run_until_complete(play())


def test_the_fence_is_gone_after_the_run() -> None:
    with simulation() as loop, fence(loop, "0"):
        pass

    time.sleep(0)
    assert time.time() > 1e9
    assert uuid.uuid4() != uuid.uuid4()
    threading.Thread(target=int).start()


def test_our_clock_is_that_of_the_loop() -> None:
    async def play() -> tuple[float, float]:
        begin_s = clock.monotonic_s()
        await asyncio.sleep(7.0)
        return begin_s, clock.monotonic_s()

    assert played(play()) == (1000.0, 1007.0)


def test_chance_is_drawn_from_the_seed() -> None:
    def drawn(seed: str) -> tuple[object, ...]:
        with simulation() as loop, fence(loop, seed):
            return random.random(), secrets.token_bytes(8), secrets.randbits(64), random.choice(range(2**30))

    assert drawn("1") == drawn("1")
    assert not set(drawn("1")) & set(drawn("2"))


def test_what_runs_in_a_thread_runs_here_and_takes_its_time() -> None:
    async def play() -> tuple[str, float]:
        begin_s, own = asyncio.get_running_loop().time(), threading.current_thread()
        name = await asyncio.to_thread(lambda: "here" if threading.current_thread() is own else "elsewhere")
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return name, asyncio.get_running_loop().time() - begin_s

    durations = seen_by_seeds(play)
    assert {name for name, _ in durations} == {"here"}
    assert len(durations) == len(SEEDS)
    assert all(0 < duration_s < 2 * LONGEST_THREAD_CALL_S for _, duration_s in durations)


# Processes -------------------------------------------------------------------------------------------------


def test_nothing_of_a_killed_process_runs() -> None:
    with simulation() as loop:
        process = SimulatedProcess("process", loop)
        seen: list[str] = []

        async def live() -> None:
            asyncio.get_running_loop().call_later(5, seen.append, "a timer")
            asyncio.get_running_loop().create_task(work())
            try:
                await asyncio.sleep(5)
                seen.append("a task")
            finally:
                seen.append("finally")

        async def work() -> None:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3)
            seen.append("a task of it")

        async def play() -> None:
            process.start(live())
            await asyncio.sleep(1)
            asyncio.get_running_loop().call_soon(process.kill)
            await asyncio.sleep(100)
            process.start(live())
            await asyncio.sleep(100)

        loop.run_until_complete(play())
        assert process.is_dead
        gc.collect()
        assert seen == []


def test_a_process_may_kill_itself_or_another_one_in_the_middle() -> None:
    with simulation() as loop:
        process, seen = SimulatedProcess("process", loop), []

        async def live() -> None:
            process.kill()
            await asyncio.sleep(0)
            seen.append("later")

        async def play() -> None:
            process.start(live())
            await asyncio.sleep(1)

        loop.run_until_complete(play())
    assert seen == []


def test_a_stalled_process_does_nothing_and_loses_nothing() -> None:
    with simulation() as loop:
        process, seen = SimulatedProcess("process", loop), []

        async def live() -> None:
            loop.call_later(2, lambda: seen.append(("timer", loop.time() - 1000)))
            for number in range(3):
                seen.append((f"{number}", loop.time() - 1000))
                await asyncio.sleep(2)

        async def play() -> None:
            process.start(live())
            await asyncio.sleep(1)
            process.stall()
            for number in range(3):  # what others send it meanwhile
                loop.call_soon(seen.append, (f"sent {number}", 10.0), context=process.context())
            await asyncio.sleep(9)
            assert seen == [("0", 0.0)]
            process.resume()
            await asyncio.sleep(20)

        loop.run_until_complete(play())
    assert sorted(seen, key=str) == sorted(
        [("0", 0.0), ("timer", 10.0), ("1", 10.0), ("2", 12.0), *((f"sent {n}", 10.0) for n in range(3))], key=str
    )
    assert [name for name, _ in seen if name.startswith("sent")] == ["sent 0", "sent 1", "sent 2"]


def test_a_process_that_dies_while_it_is_stalled_stays_silent() -> None:
    with simulation() as loop:
        process, seen = SimulatedProcess("process", loop), []

        async def live() -> None:
            await asyncio.sleep(1)
            seen.append("awake")

        async def play() -> None:
            process.start(live())
            await asyncio.sleep(0.5)
            process.stall()
            await asyncio.sleep(1)
            process.kill()
            await asyncio.sleep(10)

        loop.run_until_complete(play())
    assert seen == []


def test_the_end_of_a_simulation_runs_nothing() -> None:
    seen: list[str] = []

    async def leave_behind() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("finally")
            await asyncio.sleep(0)
            seen.append("more")

    async def play() -> None:
        asyncio.get_running_loop().create_task(leave_behind())
        await asyncio.sleep(1)

    with simulation() as loop:
        loop.run_until_complete(play())
        assert seen == []
    assert "more" not in seen


# What asyncio builds on a loop -----------------------------------------------------------------------------


async def task_groups() -> object:
    seen: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def fail() -> None:
        await asyncio.sleep(1)
        raise ValueError("x")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait())
            group.create_task(fail())
    except* ValueError as errors:
        seen.append(str(errors.exceptions))
    return seen


async def timeouts() -> object:
    begin_s, seen = asyncio.get_running_loop().time(), []
    for limit_s, work_s in ((1.0, 20.0), (60.0, 2.0)):
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.sleep(work_s)
            seen.append("done")
        except TimeoutError:
            seen.append("late")
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 1.0)
    return [*seen, asyncio.get_running_loop().time() - begin_s]


async def queues() -> object:
    queue, seen = asyncio.Queue[int](maxsize=2), []

    async def produce() -> None:
        for number in range(20):
            await queue.put(number)

    async def consume() -> None:
        for _ in range(20):
            seen.append(await queue.get())
            queue.task_done()

    await asyncio.gather(produce(), consume())
    await queue.join()
    return seen


async def locks() -> object:
    lock, condition, inside, most = asyncio.Lock(), asyncio.Condition(), 0, 0
    is_open = False

    async def enter() -> None:
        nonlocal inside, most
        async with condition:
            await condition.wait_for(lambda: is_open)
        async with lock:
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(1)
            inside -= 1

    entering = [asyncio.create_task(enter()) for _ in range(5)]
    await asyncio.sleep(1)
    async with condition:
        is_open = True
        condition.notify_all()
    await asyncio.gather(*entering)
    return most, asyncio.get_running_loop().time()


async def shields() -> object:
    seen: list[str] = []

    async def work() -> str:
        await asyncio.sleep(1)
        seen.append("worked")
        return "answer"

    working = asyncio.create_task(work())

    async def wait() -> None:
        await asyncio.shield(working)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.5)
    waiting.cancel()
    await asyncio.wait([waiting])
    return seen, waiting.cancelled(), await working, seen


async def generators() -> object:
    seen: list[object] = []

    async def count() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            await asyncio.sleep(1)
            seen.append("closed")

    async def use(*, closes: bool) -> None:
        numbers = count()
        async for number in numbers:
            seen.append(number)
            if number == 1:
                break
        if closes:
            await numbers.aclose()  # type: ignore[attr-defined]

    await use(closes=True)
    await use(closes=False)  # left to whoever collects it
    await asyncio.sleep(5)
    return seen


async def gathers() -> object:
    async def work(number: int) -> int:
        await asyncio.sleep(10 - number)
        if number == 3:
            raise ValueError("x")
        return number

    results = await asyncio.gather(*map(work, range(5)), return_exceptions=True)
    done, pending = await asyncio.wait(
        [asyncio.create_task(work(number)) for number in (0, 8)], return_when=asyncio.FIRST_COMPLETED
    )
    first = [await task for task in done]
    for task in pending:
        task.cancel()
    return list(map(str, results)), first, len(pending)


@pytest.mark.parametrize("play", [task_groups, timeouts, queues, locks, shields, generators, gathers])
def test_asyncio_works_as_on_its_own_loop(play: Callable[[], Coroutine[Any, Any, object]]) -> None:
    [result] = seen_by_seeds(play)

    with asyncio.Runner(loop_factory=_FastLoop) as runner:
        begin_s = runner.get_loop().time()
        real = runner.run(play())
    assert _rounded(real, begin_s) == _rounded(result, 1000.0)


class _FastLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, whose seconds are shorter."""

    _SPEED = 50.0

    def time(self) -> float:
        return super().time() * self._SPEED

    def _run_once(self) -> None:
        select = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = lambda timeout=None: select(timeout and timeout / self._SPEED)  # type: ignore[attr-defined]
        try:
            super()._run_once()  # type: ignore[misc]
        finally:
            self._selector.select = select  # type: ignore[attr-defined]


def _rounded(result: object, begin_s: float) -> object:
    """Return a result without its times: a real clock says other ones."""
    if isinstance(result, list | tuple):
        return [_rounded(part, begin_s) for part in result]
    return None if isinstance(result, float) else result


def test_wall_clocks_differ_by_hours_and_drift() -> None:
    loop = SimulationLoop("clocks")  # type: ignore[abstract]
    clocks = [wall_clock(loop, f"core{number}") for number in range(20)]
    before = [clock() for clock in clocks]
    loop.run_until_complete(asyncio.sleep(1000.0))
    drifts_s = [clock() - date - 1000.0 for clock, date in zip(clocks, before, strict=True)]
    loop.close()
    assert max(before) - min(before) > 6 * 3600
    assert 0.5 < max(map(abs, drifts_s)) <= 1000.0 * CLOCKS_DRIFT + 1e-3
