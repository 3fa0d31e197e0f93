"""Preemption by RECOMPUTE: who makes room, and what becomes of it."""

from itertools import product

from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.request.parameters import StopConditions
from tests.support.driving import Bench, admitted, chunks, delivered, group, max_tokens, only_admission, small_limits
from tests.support.each_row import each_row


def two_that_outgrow_the_pool(*, prefix_caching: bool = False) -> Bench:
    """`a` and `b` fill the pool of 6 blocks; the next step of both needs one more each."""
    bench = Bench(small_limits(blocks=6, budget=24, prefix_caching=prefix_caching))
    bench.add(0, 12)
    bench.add(1, 12)
    return bench


def test_last_arrival_is_preempted_first() -> None:
    bench = two_that_outgrow_the_pool()
    bench.step()

    step = bench.schedule()

    assert (bench.running, bench.waiting) == ("a", "b")
    assert step.delta.released_slots.tolist() == [1]
    assert step.delta.appended_blocks[:, 0].tolist() == [0]
    assert bench.planner.preemption.num_preemptions[PreemptionMode.RECOMPUTE] == 1


def test_as_many_are_preempted_as_the_first_ones_need() -> None:
    bench = Bench(small_limits(blocks=8, budget=32, max_num_seqs=4))
    for arrival in range(4):
        bench.add(arrival, 8)
    bench.step()

    step = bench.schedule()

    assert bench.running == "ab"
    assert step.delta.released_slots.tolist() == [3, 2]


def test_the_victim_may_be_a_prefill_that_does_not_grow() -> None:
    bench = Bench(small_limits(blocks=6, budget=4, max_num_seqs=3))
    bench.add(0, 4)
    bench.step()
    b = bench.add(1, 16)
    for _ in range(4):
        bench.step()

    step = bench.schedule()

    assert step.delta.released_slots.tolist() == [1]
    assert b.sequences[0].token_ids.tolist() == list(range(200, 216))
    assert b.sequences[0].num_inflight_rows == 0


def test_a_preempted_group_comes_back_before_newcomers() -> None:
    bench = two_that_outgrow_the_pool()
    bench.add(2, 1)
    bench.step()

    bench.schedule()

    assert bench.waiting == "bc"


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    bench = Bench(small_limits(blocks=6, budget=24))
    bench.add(1, 12)
    bench.add(2, 12)
    bench.step()
    bench.queue.add(group(0, 1))  # one of the freed blocks would be enough

    step = bench.schedule()

    assert step.delta.released_slots.tolist() == [1]
    assert admitted(step) == []


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


def test_preempted_sequence_is_recomputed_with_its_output_as_prompt() -> None:
    bench = two_that_outgrow_the_pool()
    bench.step()
    bench.step()
    (a,) = bench.planner.batch.running

    bench.planner.finish(a.sequences[0])
    admission = only_admission(bench.schedule())

    assert admission.token_ids.tolist() == [*range(200, 212), 212]
    assert (admission.num_prompt_tokens, admission.num_computed_tokens) == (12, 0)
    assert delivered(bench.process()) == {"b": 213}


def test_preemptions_are_counted_for_the_group() -> None:
    bench = two_that_outgrow_the_pool()
    a, b = bench.queue
    bench.step()

    bench.schedule()

    assert (a.num_preemptions, b.num_preemptions) == (0, 1)


def test_recomputing_finds_its_own_blocks_where_nobody_took_them() -> None:
    bench = two_that_outgrow_the_pool(prefix_caching=True)
    bench.step()
    bench.step()  # a takes one of the blocks of b: its last one
    (a,) = bench.planner.batch.running

    bench.planner.finish(a.sequences[0])
    step = bench.schedule()

    assert only_admission(step).num_computed_tokens == 8
    assert list(chunks(step).values()) == [5]


# Groups of several -------------------------------------------------------------------------------


def test_a_group_is_preempted_as_a_whole() -> None:
    bench = Bench(small_limits(blocks=6, budget=24))
    bench.add(0, 8)
    b = bench.add(1, 7, num_sequences=2)
    while bench.running != "a":
        bench.step()

    assert [sequence.status for sequence in b.sequences] == [SequenceStatus.WAITING] * 2
    assert b.num_preemptions == 1


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


def test_a_lone_sequence_never_fails() -> None:
    bench = Bench(small_limits(blocks=6, max_model_len=24))
    bench.add(0, 1)

    bench.run()

    assert len(bench.outputs["a"]) == 23


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
