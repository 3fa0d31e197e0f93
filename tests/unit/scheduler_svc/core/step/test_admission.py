"""Groups that lost their place: what waits for them, and what they wait for."""

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.waiting.policy import PriorityPolicy
from tests.support.driving import Bench, admitted, max_tokens, small_limits


def test_an_urgent_group_does_not_wait_for_the_inflight_tokens_of_others() -> None:
    bench = Bench(small_limits(blocks=6, budget=24), policy=PriorityPolicy())
    for arrival in range(2):
        bench.add(arrival, 8, max_tokens(12), priority=1)
    while not bench.planner.preempted.groups:
        bench.schedule()
        if len(bench.results) > 2:
            bench.process()
    bench.add(2, 2, max_tokens(1), priority=1)
    bench.add(3, 2, max_tokens(1), priority=0)

    urgent = bench.schedule()

    assert admitted(urgent) == [400]
    assert (bench.running, bench.waiting) == ("da", "c")


def test_a_swapped_group_that_is_alone_comes_back_into_what_the_watermark_reserves() -> None:
    limits = small_limits(
        blocks=10,
        budget=40,
        max_model_len=40,
        watermark=0.3,
        host_blocks=10,
        preemption_mode=PreemptionMode.SWAP,
    )
    bench = Bench(limits)
    bench.add(0, 4, max_tokens(10))
    bench.add(1, 23, max_tokens(16))

    steps = bench.run()

    assert [len(step.blocks_to_swap_in) for step in steps if len(step.blocks_to_swap_in)] == [7]
    assert bench.outputs["b"] == list(range(223, 239))
