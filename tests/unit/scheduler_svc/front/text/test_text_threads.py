import asyncio
import threading
from collections.abc import Iterator

import pytest

from octavo_shared.errors import TokenizerFailedError, UnavailableError
from scheduler_svc.front.text import text_threads
from scheduler_svc.front.text.text_threads import TextThreads
from tests.support.stack import until

NUM_THREADS = 4


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What hanging calls wait for."""
    monkeypatch.setattr(text_threads, "LIMIT_S", 0.05)
    event = threading.Event()
    yield event
    event.set()


async def test_a_call_that_hangs_ends_and_half_of_them_refuse_all(hold: threading.Event) -> None:
    threads = TextThreads(NUM_THREADS)
    with pytest.raises(TokenizerFailedError, match="did not finish"):
        await threads.run(hold.wait)
    assert threads.num_lost == 1
    assert await threads.run(int, "7") == 7
    leaving = asyncio.create_task(threads.run(hold.wait))
    await until(lambda: len(threads._begun_at_s) == 2)
    leaving.cancel()  # its caller does not wait for the end; its thread hangs all the same
    await until(lambda: threads.num_lost == 2)
    with pytest.raises(UnavailableError, match=r"hangs in 2 calls.* send token ids"):
        await threads.run(int, "7")
    hold.set()
    await until(lambda: threads.num_lost == 0)
    assert await threads.run(int, "7") == 7


async def test_what_waits_for_a_thread_has_all_of_its_time(hold: threading.Event) -> None:
    threads = TextThreads(1)
    first = asyncio.create_task(threads.run(hold.wait))
    await until(lambda: threads._begun_at_s)
    waiting = asyncio.create_task(threads.run(int, "7"))
    with pytest.raises(TokenizerFailedError):
        await first
    with pytest.raises(UnavailableError):  # the only thread is lost
        await waiting


async def test_what_a_call_raises_is_raised_and_threads_are_used_again() -> None:
    threads, names = TextThreads(2), set()
    with pytest.raises(ValueError, match="invalid literal"):
        await threads.run(int, "x")
    for _ in range(5):
        names.add(await threads.run(threading.get_ident))
    assert len(names) <= 2
    assert threads.num_lost == 0
