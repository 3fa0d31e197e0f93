"""When the writer of a stream may write."""

import asyncio

import pytest

from octavo_shared.errors import SlowCallerError, UnavailableError
from scheduler_svc.link.credit_gate import CreditGate
from tests.support.patience import PATIENCE_S


async def test_a_message_takes_a_credit_and_all_that_is_new() -> None:
    gate = CreditGate(1, limit_s=60)
    gate.note_news()
    gate.note_news()
    assert await gate.wait()
    waiting = asyncio.create_task(gate.wait())
    gate.note_news()
    await asyncio.sleep(0)
    assert not waiting.done(), "the only credit is gone"
    gate.grant(1)
    assert await waiting
    gate.end()
    assert not await gate.wait()


async def test_without_credits_nothing_is_counted() -> None:
    gate = CreditGate(None, limit_s=60)
    for _ in range(3):
        gate.note_news()
        assert await gate.wait()


async def test_what_is_new_goes_out_before_the_end_but_not_before_an_error() -> None:
    gate = CreditGate(2, limit_s=60)
    gate.note_news()
    gate.end()
    assert await gate.wait()
    assert not await gate.wait()
    gate.note_news()
    gate.end(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        await gate.wait()


async def test_a_reader_that_wants_nothing_is_cut_however_much_more_is_new() -> None:
    gate = CreditGate(0, limit_s=0.05)
    waiting = asyncio.create_task(gate.wait())
    for _ in range(100):
        gate.note_news()
        await asyncio.sleep(0.01)
        if waiting.done():
            break
    assert waiting.done(), "each piece of news gave it more time"
    with pytest.raises(SlowCallerError):
        await waiting


async def test_nothing_new_is_waited_for_without_a_limit() -> None:
    gate = CreditGate(0, limit_s=0.01)
    waiting = asyncio.create_task(gate.wait())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    gate.end()
    assert not await waiting


async def test_an_error_ends_a_write_that_the_reader_does_not_take() -> None:
    gate = CreditGate(1, limit_s=60)

    async def write() -> None:
        async with gate.limit():
            await asyncio.Event().wait()

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    gate.end(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        async with asyncio.timeout(PATIENCE_S):
            await writing
