"""Who goes first: priorities, fair shares among tenants, and the watermark."""

import itertools

import pytest

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.core.waiting.policy import PriorityPolicy
from tests.support.driving import Bench, admitted, chunks, max_tokens, small_limits
from tests.support.each_row import each_row

# Priorities --------------------------------------------------------------------------------------


def test_the_victim_is_of_the_least_urgent_level_though_it_came_first() -> None:
    bench = Bench(small_limits(blocks=6, budget=24), policy=PriorityPolicy())
    a = bench.add(0, 12, priority=1)
    bench.add(1, 12, priority=0)
    bench.step()

    bench.schedule()

    assert bench.running == "b"
    assert a.num_preemptions == 1


def test_an_urgent_group_passes_swapped_ones() -> None:
    bench = Bench(
        small_limits(blocks=6, budget=24, host_blocks=8, preemption_mode=PreemptionMode.SWAP), policy=PriorityPolicy()
    )
    a = bench.add(0, 12, max_tokens(6), priority=1)
    b = bench.add(1, 12, max_tokens(6), priority=1)
    bench.step()
    bench.step()
    assert b.sequences[0].status is SequenceStatus.SWAPPED

    bench.add(2, 2, max_tokens(1), priority=1)
    bench.add(3, 2, max_tokens(1), priority=0)
    urgent = bench.schedule()

    assert admitted(urgent) == [400]
    assert (bench.running, bench.waiting) == ("da", "c")
    bench.run()
    assert a.live_sequences == []
    assert bench.outputs["c"] == [302]


def test_prefills_of_the_urgent_level_get_the_budget_first() -> None:
    limits = small_limits(budget=6, long_prefill_threshold=4, max_long_prefills=2)
    bench = Bench(limits, policy=PriorityPolicy())
    bench.add(0, 16, priority=1)
    bench.step()
    bench.add(1, 12, priority=0)

    assert chunks(bench.schedule()) == {0: 4, 1: 2}
    assert chunks(bench.schedule()) == {1: 4, 0: 2}


# Fair shares -------------------------------------------------------------------------------------


def order_of_admission(bench: Bench) -> str:
    """Run everything; return the names in the order of their admission."""
    return "".join(chr(ord("a") + first // 100 - 1) for step in bench.run() for first in admitted(step))


@pytest.mark.parametrize(
    ("of_x", "of_y", "weights", "order"),  # of each tenant: requests, and the tokens of their prompts and outputs
    [
        pytest.param((3, 4, 2), (3, 4, 2), None, "adbecf", id="the bursts of two tenants alternate"),
        pytest.param((4, 4, 1), (0, 0, 0), None, "abcd", id="the requests of one tenant go by arrival"),
        # A request of x computes 2 tokens of its prompt and feeds 2, one of y computes 8: two of x for one of y.
        pytest.param((3, 2, 3), (3, 8, 1), None, "adbcef", id="tokens of prompts and of outputs count alike"),
        pytest.param((4, 4, 1), (2, 4, 1), {"x": 2.0, "y": 1.0}, "aebcfd", id="twice the weight is twice the tokens"),
    ],
)
def test_tenants_are_admitted_by_their_shares(
    of_x: tuple[int, int, int], of_y: tuple[int, int, int], weights: dict[str, float] | None, order: str
) -> None:
    bench = Bench(small_limits(max_num_seqs=1), tenant_weights=weights)
    arrivals = itertools.count()
    for tenant, (num_requests, num_prompt_tokens, num_output_tokens) in {"x": of_x, "y": of_y}.items():
        for _ in range(num_requests):
            bench.add(next(arrivals), num_prompt_tokens, max_tokens(num_output_tokens), tenant=tenant)

    assert order_of_admission(bench) == order


def test_tokens_are_charged_when_they_are_scheduled() -> None:
    bench = Bench(small_limits(max_num_seqs=3))
    charged: list[tuple[str, int]] = []
    bench.queue.charge = lambda tenant, num_tokens: charged.append((tenant, num_tokens))  # type: ignore[method-assign]
    bench.add(0, 4, tenant="x", num_sequences=2)
    bench.add(1, 3, tenant="y")

    bench.schedule()
    prefills, charged[:] = list(charged), []
    bench.schedule()

    assert prefills == [("x", 4), ("y", 3)]
    assert charged == [("x", 2), ("y", 1)]


# The watermark -----------------------------------------------------------------------------------


@each_row((0.0, "ab"), (0.125, "ab"), (0.126, "a"))
def test_admissions_leave_the_watermark_free(watermark: float, expected: str) -> None:
    """Of 8 blocks a has 3 and b wants 4: one is left."""
    bench = Bench(small_limits(blocks=8, budget=32, watermark=watermark))
    bench.add(0, 12)
    bench.add(1, 16)

    bench.schedule()

    assert bench.running == expected
