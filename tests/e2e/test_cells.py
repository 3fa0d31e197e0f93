"""Cells as processes: what a scheduler's death does, the replacement of everything under load, another model."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from octavo import Client
from tests.chaos.asking import Ask, Send, answer_to, answers_to, by_grpc, compare
from tests.chaos.cell import CellAsk, dealt_to_fronts, largest_load
from tests.chaos.endless import ask_until
from tests.chaos.result import Result
from tests.support.cells import EXECUTOR, FRONT, RESOLVE_INTERVAL_S, SCHEDULER, TIERS, Cell, running_cell
from tests.support.patience import PATIENCE_S

NUM_STREAMS = 64
OTHER_MODEL = ("--eos-probability", "0.001")


@pytest.mark.slow
async def test_streams_outlive_a_scheduler_that_is_killed_and_it_gets_its_share_when_it_is_back() -> None:
    asks = [Ask(stream, 0, 80) for stream in range(24)]
    async with running_cell(2, 2, 2, "--step-ms", "10", max_executors=1) as cell:
        begun = set[int]()
        async with dealt_to_fronts(cell, begun) as send:
            undisturbed = await answers_to(asks, send, len(asks))
            begun.clear()
            running = [asyncio.create_task(answer_to(ask, send)) for ask in asks]
            while len(begun) < len(asks):
                await asyncio.sleep(0.01)
            killed = cell.running(SCHEDULER)[0]
            await killed.kill()
            result = Result("cell", "kill")
            for ask, answer in zip(asks, await asyncio.gather(*running), strict=True):
                compare(result, ask, answer, undisturbed[ask])
            assert (result.num_equal, result.wrong) == (len(asks), [])
        await cell.start(killed)
        await until_even(cell)


async def until_even(cell: Cell) -> None:
    """Return once new requests spread over all schedulers and executors."""
    async with asyncio.timeout(PATIENCE_S):
        for attempt in range(1000):
            asks = [CellAsk(stream, attempt, 40, f"even-{attempt}") for stream in range(60)]
            async with dealt_to_fronts(cell) as send:
                await answers_to(asks, send, len(asks))
            if await largest_load(cell, asks) < 1.5:
                return


@pytest.mark.parametrize(
    ("stale_s", "num_fronts", "num_executors", "at_once"),
    [
        pytest.param(3.0, 2, 2, True, id="3 s"),
        pytest.param(30.0, 3, 4, False, id="30 s", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
async def test_everything_is_replaced_under_streams_and_nobody_notices(
    stale_s: float, num_fronts: int, num_executors: int, at_once: bool, record_property: Callable[[str, object], None]
) -> None:
    """`stale_s`: how long names give former addresses; `at_once`: all new processes are started together."""
    result = Result("rolling", f"{stale_s:g} s")
    num_tokens = 20
    asks = [[Ask(stream, turn, num_tokens) for turn in range(2)] for stream in range(NUM_STREAMS)]
    async with running_cell(2, num_executors, num_fronts, "--step-ms", "20", stale_s=stale_s) as cell:
        addresses = [cell.address_of(FRONT, 1 + number) for number in range(2 * num_fronts)]
        clients = [Client(addresses[first:] + addresses[:first], resume_timeout_s=0) for first in range(num_fronts)]
        for client in clients:
            await client.__aenter__()
        sends = [by_grpc(client) for client in clients]
        former = [member for tier in TIERS for member in cell.running(tier)]
        starting = asyncio.gather(*(cell.add(member.tier) for member in former if at_once))
        undisturbed = await answers_to([ask for own in asks for ask in own], dealt(sends), NUM_STREAMS)
        await starting
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for own in asks:
                tasks.create_task(ask_until(is_over, own, dealt(sends), undisturbed, result))
            if at_once:
                await asyncio.sleep(stale_s + RESOLVE_INTERVAL_S)
                for member in former:
                    await cell.remove(member)
            else:
                await asyncio.gather(*(replace_one_by_one(cell, tier, stale_s) for tier in TIERS))
            is_over.set()
        for client in clients:
            await client.close()
    assert (result.wrong[:3], result.refusals) == ([], {})
    assert result.num_equal == result.num_asked
    assert result.num_asked > NUM_STREAMS, "streams begin all the time"
    record_property("longest_pause_s", result.longest_gap_s)
    print(f"{result.num_asked} requests; the longest pause was {result.longest_gap_s:.2f} s")


def dealt(sends: Sequence[Send]) -> Send:
    """Return what deals requests to clients."""
    return lambda ask, answer: sends[ask.stream % len(sends)](ask, answer)


async def replace_one_by_one(cell: Cell, tier: str, stale_s: float) -> None:
    """Replace the processes of a tier as a cluster does: a scheduler is ended before the next one of its id starts."""
    for member in cell.running(tier):
        if tier == SCHEDULER:
            await cell.remove(member)
            await cell.add(tier, scheduler_id=member.scheduler_id)
        else:
            await cell.add(tier)
        await asyncio.sleep(stale_s + RESOLVE_INTERVAL_S)
        if tier != SCHEDULER:
            await cell.remove(member)


@pytest.mark.slow
async def test_another_model_comes_behind_the_same_fronts_and_no_answer_is_of_both() -> None:
    async with running_cell(1, 1, 2, "--step-ms", "10") as cell:
        addresses = [front.address for front in cell.running(FRONT)]
        async with Client(addresses, resume_timeout_s=0) as client:
            number = 0

            async def weights(num_tokens: int = 4) -> str:
                """Return the weights that made an answer."""
                nonlocal number
                number += 1
                prompt = [33 + number % 94, 33 + number // 94, 40, 41]
                answer = await client.generate(
                    prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, include_provenance=True
                )
                [output] = answer.outputs
                assert len(output.token_ids) == num_tokens
                [span] = output.provenance
                return span.weights_digest

            old = await weights()
            [scheduler] = cell.running(SCHEDULER)
            await cell.add(EXECUTOR, *OTHER_MODEL, fleet="-large")
            await cell.add(SCHEDULER, fleet="-large")
            await cell.until_whole()
            await asyncio.sleep(2 * RESOLVE_INTERVAL_S)
            assert {await weights() for _ in range(4)} == {old}, "the old model serves until its scheduler is drained"
            running = [asyncio.create_task(weights(100)) for _ in range(16)]
            await asyncio.sleep(0.3)
            ending = asyncio.create_task(cell.remove(scheduler))
            seen = [await weights()]
            while not ending.done() or seen[-1] == old:
                seen.append(await weights())
            await ending
            assert {await task for task in running} == {old}
            assert len(set(seen) - {old}) == 1, "the new one"
            assert old not in seen[seen.index(seen[-1]) :], "there is no way back"
