"""Groups that lost their place: what waits for them, and what they wait for."""

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
