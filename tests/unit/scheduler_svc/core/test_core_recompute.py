"""Preemption by RECOMPUTE: who makes room, and what becomes of it."""

from itertools import product

from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.request.parameters import StopConditions
from tests.support.driving import Bench, admitted, chunks, group, max_tokens, small_limits
from tests.support.each_row import each_row


def test_nobody_of_the_same_level_is_admitted_while_a_preempted_group_waits_for_inflight_tokens() -> None:
    bench = Bench(small_limits(blocks=6, budget=24))
    bench.add(1, 12)
    bench.add(2, 12)
    bench.schedule()
    bench.schedule()  # preempts c, whose first token is on its way
    bench.queue.add(group(3, 1))

    waiting = bench.schedule()
    bench.process()

    assert admitted(waiting) == []
    assert bench.waiting == "cd"


# Groups of several -------------------------------------------------------------------------------


def test_a_group_is_recomputed_with_the_blocks_that_its_sequences_share() -> None:
    bench = Bench(small_limits(blocks=7, budget=24))
    bench.add(0, 8, max_tokens(9))
    bench.add(1, 9, max_tokens(6), num_sequences=2)

    steps = bench.run()

    (recomputing,) = [step for step in steps if admitted(step) == [200, 200]]
    lead, sibling = recomputing.delta.admissions
    assert lead.block_ids[:2].tolist() == sibling.block_ids[:2].tolist()
    assert (lead.num_computed_tokens, sibling.num_computed_tokens) == (0, 8)
    assert bench.outputs["b0"] == [209, 210, 211, 212, 213, 214]
    assert bench.outputs["b1"] == [210, 212, 214, 216, 218, 220]


def test_a_sibling_starts_when_the_blocks_that_it_shares_are_sent() -> None:
    bench = Bench(small_limits(blocks=7, budget=4))
    bench.add(0, 8, max_tokens(9))
    bench.add(1, 9, max_tokens(6), num_sequences=2)

    steps = bench.run()

    (first,) = [index for index, step in enumerate(steps) if admitted(step) == [200, 200]]
    lead, sibling = (admission.slot for admission in steps[first].delta.admissions)
    order = [slot for step in steps[first:] for slot in chunks(step)]
    assert order.index(sibling) > order.index(lead)
    assert bench.outputs["b0"] == [209, 210, 211, 212, 213, 214]
    assert bench.outputs["b1"] == [210, 212, 214, 216, 218, 220]


@each_row(1, 2, 3)
def test_a_group_of_which_some_have_ended_is_recomputed_without_them(depth: int) -> None:
    bench = Bench(small_limits(blocks=7, budget=24))
    bench.add(0, 8, max_tokens(9))
    # b1 counts in steps of 2 and meets the stop token; b0 and b2 (in steps of 3) never do.
    b = bench.add(1, 6, StopConditions(5, stop_token_ids=frozenset({209})), num_sequences=3)

    bench.run(depth)

    assert b.num_preemptions > 0
    assert bench.outputs["b0"] == [206, 207, 208, 209]
    assert bench.outputs["b1"] == [207, 209]
    assert bench.outputs["b2"] == [208, 211, 214, 217, 220]


@each_row(*product((0, 1), (4, 24), (False, True), (False, True)))
def test_an_output_that_ends_while_its_group_is_computed_again_holds_up_no_other(
    index: int, budget: int, prefix_caching: bool, is_in_flight: bool
) -> None:
    """As by a stop string that its front finds late: of chunks that are left to send, or are on their way."""
    bench = Bench(small_limits(blocks=7, budget=budget, prefix_caching=prefix_caching))
    bench.add(0, 8, max_tokens(9))
    b = bench.add(1, 9, max_tokens(6), num_sequences=2)
    bench.step()
    while not b.num_preemptions:
        bench.step()
    while b not in bench.planner.batch:
        bench.schedule()
        if not is_in_flight or b not in bench.planner.batch:
            bench.process()

    bench.planner.finish(b.sequences[index])
    check_integrity(bench.planner)
    bench.run()

    assert len(bench.outputs[f"b{1 - index}"]) == 6


# Nobody else to preempt --------------------------------------------------------------------------


def test_a_lone_group_that_cannot_grow_fails_with_numbers() -> None:
    bench = Bench(small_limits(blocks=4, max_model_len=16))
    a = bench.add(0, 8, num_sequences=2)
    for _ in range(5):
        bench.step()

    assert bench.try_schedule() is not None  # the release of its slots

    (failure,) = bench.failures
    assert failure.group is a
    assert failure.message == (
        "2 sequences need more than the 4 blocks of 4 tokens in the KV cache; 4 are in use, all by this request"
    )
    assert a.live_sequences == []
    assert bench.num_free_blocks == 4


@each_row(1, 2)
def test_a_lone_group_does_not_fail_while_a_step_in_flight_may_end_a_sequence(depth: int) -> None:
    bench = Bench(small_limits(blocks=4, max_model_len=16))
    # At 12 tokens each needs a block more, and none is free. The token that makes it 13 ends a1.
    bench.add(0, 8, StopConditions(8, stop_token_ids=frozenset({117})), num_sequences=2)

    bench.run(depth)

    assert bench.outputs["a0"] == [108, 109, 110, 111, 112, 113, 114, 115]
    assert bench.outputs["a1"] == [109, 111, 113, 115, 117]
