"""Swapped groups beside more urgent ones: slots, and steps in which nobody comes back."""

from scheduler_svc.core.waiting.policy import PriorityPolicy
from tests.support.driving import Bench, max_tokens, small_limits


def test_a_swapped_group_waits_for_the_slots_that_more_urgent_ones_took() -> None:
    """There are blocks enough for both outputs of `b` as soon as `a` has ended, and one slot."""
    limits = small_limits(max_num_seqs=4, blocks=8, budget=24, host_blocks=8)
    bench = Bench(limits, policy=PriorityPolicy())
    bench.add(0, 12, max_tokens(3))
    b = bench.add(1, 12, max_tokens(3), num_sequences=2, priority=1)
    while not len(bench.core.swapped):
        bench.step()
    for arrival in range(2, 5):
        bench.add(arrival, 1, max_tokens(4))
    while bench.running != "cde":
        bench.step()

    needs = bench.core.admissions.needs_to_swap_in(b)
    assert (needs.has_blocks, needs.num_needed_slots, needs.num_free_slots) == (True, 2, 1)
    bench.step()

    assert (bench.running, list(bench.core.swapped)) == ("cde", [b])
    bench.run()
    assert (bench.outputs["b0"], bench.outputs["b1"]) == ([212, 213, 214], [213, 215, 217])


def test_a_swapped_group_does_not_take_the_room_that_a_preemption_made() -> None:
    """`b` was swapped out for `c`; then `c` needs one block more, and `a` is preempted for it."""
    bench = Bench(small_limits(blocks=9, budget=24, host_blocks=8), policy=PriorityPolicy())
    bench.add(0, 11, max_tokens(13), priority=1)
    b = bench.add(1, 4, max_tokens(5), num_sequences=2, priority=1)
    bench.step()
    bench.add(2, 11, max_tokens(13))
    while bench.running != "c":
        step = bench.schedule()
        bench.process()

    assert (bench.waiting, list(bench.core.swapped)) == ("a", [b])
    assert bench.core.admissions.needs_to_swap_in(b).has_blocks
    assert len(step.delta.admissions) == 0
