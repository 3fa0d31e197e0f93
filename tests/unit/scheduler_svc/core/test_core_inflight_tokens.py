"""Tokens that sent steps deliver for sequences that were preempted meanwhile."""

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.request.parameters import StopConditions
from tests.support.driving import (
    Bench,
    delivered,
    max_tokens,
    only_admission,
    small_limits,
    with_logprobs,
)


def two_that_outgrow_the_pool(conditions_of_b: StopConditions | None = None) -> Bench:
    """`a` and `b` fill the pool of 6 blocks; the next step of both needs one more each."""
    bench = Bench(small_limits(blocks=6, budget=24))
    bench.add(0, 12)
    bench.add(1, 12, conditions_of_b)
    return bench


def test_inflight_token_has_its_logprob() -> None:
    bench = two_that_outgrow_the_pool()
    bench.schedule()
    bench.schedule()
    bench.results[0] = with_logprobs(bench.results[0], [-1.0, -2.0])

    assert bench.process().logprobs == [-1.0, -2.0]


def test_finishing_a_moved_sequence_loses_no_inflight_token_of_another() -> None:
    old = Bench(small_limits())
    old.add(2, 1)
    moved = old.add(3, 1)  # had slot 1, generation 1 there, as `b` has here
    old.step()
    old.planner.evacuate()
    bench = two_that_outgrow_the_pool()
    bench.schedule()
    bench.queue.add(moved)
    bench.schedule()  # preempts b, whose first token is on its way

    bench.planner.finish(moved.sequences[0])

    assert delivered(bench.process()) == {"a": 112, "b": 212}


def test_the_end_of_a_moved_group_loses_no_inflight_token_of_another() -> None:
    """One of its outputs had ended before it moved, in a slot and a generation that are somebody else's here."""
    old = Bench(small_limits())
    old.add(2, 1)
    moved = old.add(3, 1, num_sequences=2)  # the second output had slot 2, generation 1 there
    old.step()
    old.planner.finish(moved.sequences[1])
    old.planner.evacuate()
    bench = Bench(small_limits(blocks=7, budget=32))
    bench.add(0, 1)
    bench.add(1, 12)
    c = bench.add(2, 12)  # slot 2, generation 1
    bench.schedule()
    bench.queue.add(moved)
    bench.schedule()  # preempts c, whose first token is on its way
    assert c.sequences[0].num_inflight_rows == 1

    bench.planner.abort(moved)

    assert delivered(bench.process())["c"] == 312


# With the blocks in the host pool ----------------------------------------------------------------


def two_of_which_one_is_swapped_out(conditions_of_b: StopConditions | None = None) -> Bench:
    """`b` was swapped out while its first token is on its way."""
    bench = Bench(small_limits(blocks=6, budget=24, host_blocks=8, preemption_mode=PreemptionMode.SWAP))
    bench.add(0, 12, max_tokens(4))
    bench.add(1, 12, conditions_of_b)
    bench.schedule()
    bench.schedule()
    return bench


def test_inflight_token_of_a_swapped_sequence_is_delivered_and_computed_when_it_is_back() -> None:
    bench = two_of_which_one_is_swapped_out(max_tokens(3))
    (b,) = bench.planner.swapped

    assert (b.sequences[0].status, b.sequences[0].num_inflight_rows) == (SequenceStatus.SWAPPED, 1)
    steps = bench.run(2)

    (back,) = [step for step in steps if len(step.blocks_to_swap_in)]
    assert only_admission(back).token_ids.tolist() == [*range(200, 212), 212]
    assert only_admission(back).num_computed_tokens == 12
    assert bench.outputs == {"a": [112, 113, 114, 115], "b": [212, 213, 214]}


def test_inflight_token_that_stops_one_of_a_swapped_group_frees_its_host_blocks_only() -> None:
    bench = Bench(small_limits(blocks=7, budget=24, host_blocks=8))
    bench.add(0, 8, max_tokens(6))
    # b0 counts by 1, b1 by 2: the stop token is the sixth of b0 and the third of b1. Five are late.
    b = bench.add(1, 8, StopConditions(stop_token_ids=frozenset({213})), num_sequences=2)
    while not len(bench.planner.swapped):
        bench.schedule()
    num_used = bench.planner.swapped.host.num_used_blocks

    for _ in range(3):
        bench.process()

    assert [sequence.status for sequence in b.sequences] == [SequenceStatus.SWAPPED, SequenceStatus.FINISHED]
    assert (num_used, bench.planner.swapped.host.num_used_blocks) == (4, 3)
    bench.run(2)
    assert (bench.outputs["b0"], bench.outputs["b1"]) == ([208, 209, 210, 211, 212, 213], [209, 211, 213])
