"""What the scheduler decides in each step."""

import numpy as np
import pytest

from scheduler_svc.core.block_manager import AllocStatus
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason, SequenceStatus, StopConditions
from tests.support.driving import Bench, delivered, group, small_limits


def test_decodes_come_before_prefill_chunks() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 3)
    bench.step()
    bench.add(1, 8)

    bench.schedule()

    layout = bench.scheduler.in_flight[-1].layout
    assert list(zip(layout.slots.tolist(), layout.lengths.tolist(), strict=True)) == [(0, 1), (1, 3)]


def test_prompt_longer_than_the_budget_is_chunked() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 10)

    chunks, tokens = [], []
    for _ in range(3):
        chunks.append(bench.schedule().delta.prefill_chunks.tolist())
        tokens.append(delivered(bench.process()))

    assert chunks == [[[0, 4]], [[0, 4]], [[0, 2]]]
    assert tokens == [{}, {}, {"a": 110}]


def test_running_prefills_come_before_admissions() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 6)
    bench.add(1, 6)
    bench.step()

    step = bench.schedule()

    assert step.delta.prefill_chunks.tolist() == [[0, 2], [1, 2]]
    assert [admission.slot for admission in step.delta.admissions] == [1]


def test_requests_are_admitted_by_arrival_whatever_the_order_of_add() -> None:
    bench = Bench(small_limits(max_num_seqs=1))
    later, earlier = bench.add(1, 2), bench.add(0, 2)

    bench.schedule()

    assert bench.scheduler.running == [earlier.sequence]
    assert list(bench.scheduler.waiting) == [later.sequence]


def test_a_small_request_does_not_pass_a_large_head() -> None:
    bench = Bench(small_limits(blocks=6))
    bench.add(0, 12)
    bench.add(1, 16)
    bench.add(2, 1)

    bench.schedule()

    assert [sequence.arrival for sequence in bench.scheduler.waiting] == [1, 2]


def test_no_more_than_max_num_seqs_run() -> None:
    bench = Bench(small_limits(max_num_seqs=2))
    for arrival in range(3):
        bench.add(arrival, 1)

    bench.schedule()

    assert len(bench.scheduler.running) == 2
    assert bench.scheduler.num_unfinished == 3


def test_nothing_is_scheduled_without_work() -> None:
    scheduler = Scheduler(small_limits())

    assert scheduler.schedule() is None
    assert scheduler.last_scheduled_step_id == 0


def test_step_ids_count_from_one_without_gaps_and_carry_the_epoch() -> None:
    bench = Bench(small_limits(), epoch=7)
    bench.add(0, 2)

    steps = [bench.schedule() for _ in range(3)]

    assert [(step.epoch, step.step_id) for step in steps] == [(7, 1), (7, 2), (7, 3)]


@pytest.mark.parametrize(("num_tokens", "expected"), [(23, AllocStatus.OK), (24, AllocStatus.NEVER)])
def test_a_prompt_needs_room_for_one_token_more(num_tokens: int, expected: AllocStatus) -> None:
    scheduler = Scheduler(small_limits(max_model_len=24))

    assert scheduler.add(group(0, num_tokens)) is expected
    assert scheduler.num_unfinished == (expected is AllocStatus.OK)


def test_a_request_of_many_tokens_counts_computed_ones_when_they_are_acknowledged() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 6)
    bench.schedule()
    bench.schedule()
    seen = [int(bench.scheduler.num_computed_tokens[0])]
    for _ in range(2):
        bench.process()
        seen.append(int(bench.scheduler.num_computed_tokens[0]))

    assert seen == [0, 4, 6]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_blocks_at_admission", "output_tokens_before_the_next_block"),
    [(1, 1, 4), (3, 1, 2), (4, 1, 1), (5, 2, 4)],
)
def test_block_boundary(
    num_prompt_tokens: int, num_blocks_at_admission: int, output_tokens_before_the_next_block: int
) -> None:
    bench = Bench(small_limits(block_size=4))
    bench.add(0, num_prompt_tokens)

    first = bench.schedule()
    num_output_tokens = len(bench.process().token_ids)
    while not len(bench.schedule().delta.appended_blocks):
        num_output_tokens += len(bench.process().token_ids)

    assert len(first.delta.admissions[0].block_ids) == num_blocks_at_admission
    assert num_output_tokens == output_tokens_before_the_next_block


def two_that_outgrow_the_pool() -> Bench:
    """`a` and `b` fill the pool of 6 blocks; the next step of both needs one more each."""
    bench = Bench(small_limits(blocks=6, budget=24))
    bench.add(0, 12)
    bench.add(1, 12)
    return bench


def test_last_arrival_is_preempted_first() -> None:
    bench = two_that_outgrow_the_pool()
    bench.step()

    step = bench.schedule()

    assert [sequence.arrival for sequence in bench.scheduler.running] == [0]
    assert [sequence.arrival for sequence in bench.scheduler.waiting] == [1]
    assert step.delta.released_slots.tolist() == [1]
    assert step.delta.appended_blocks[:, 0].tolist() == [0]
    assert bench.scheduler.num_preemptions == 1


def test_the_victim_may_be_a_prefill_that_does_not_grow() -> None:
    bench = Bench(small_limits(blocks=6, budget=4, max_num_seqs=3))
    bench.add(0, 4)
    bench.step()
    bench.add(1, 16)
    for _ in range(4):
        bench.step()

    step = bench.schedule()

    assert step.delta.released_slots.tolist() == [1]
    assert bench.scheduler.waiting[0].token_ids.tolist() == list(range(200, 216))
    assert bench.scheduler.waiting[0].num_late_tokens == 0


def test_preempted_sequence_keeps_its_place_in_line() -> None:
    bench = two_that_outgrow_the_pool()
    bench.add(2, 1)
    bench.step()

    bench.schedule()

    assert [sequence.arrival for sequence in bench.scheduler.waiting] == [1, 2]


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    bench = Bench(small_limits(blocks=6, budget=24))
    bench.add(1, 12)
    bench.add(2, 12)
    bench.step()
    bench.add(0, 1)  # came first, to an executor that was lost; one of the freed blocks would be enough

    step = bench.schedule()
    bench.process()
    next_step = bench.schedule()

    assert step.delta.released_slots.tolist() == [1]
    assert step.delta.admissions == ()
    assert [admission.block_ids.size for admission in next_step.delta.admissions] == [1]


def test_preempted_sequence_is_recomputed_with_its_output_as_prompt() -> None:
    bench = two_that_outgrow_the_pool()
    b = bench.scheduler.waiting[1]
    bench.step()
    bench.schedule()
    bench.process()
    bench.scheduler.finish(bench.scheduler.running[0])

    step = bench.schedule()

    (admission,) = step.delta.admissions
    assert admission.token_ids.tolist() == [*range(200, 212), 212]
    assert admission.num_prompt_tokens == 12
    assert delivered(bench.process()) == {"b": 213}
    assert b.num_preemptions == 1


def test_late_token_of_a_preempted_sequence_is_delivered_once() -> None:
    bench = two_that_outgrow_the_pool()
    b = bench.scheduler.waiting[1]
    bench.schedule()
    bench.schedule()  # preempts b, whose first token is on its way

    assert b.num_late_tokens == 1
    assert delivered(bench.process()) == {"a": 112, "b": 212}
    assert b.num_late_tokens == 0
    assert b.token_ids.tolist() == list(range(200, 213))
    assert delivered(bench.process()) == {"a": 113}


def test_a_sequence_with_late_tokens_is_not_admitted_before_the_last_of_them() -> None:
    bench = two_that_outgrow_the_pool()
    bench.schedule()
    bench.schedule()
    bench.scheduler.finish(bench.scheduler.running[0])  # now the pool is empty

    released_only = bench.schedule()
    bench.process()
    admitting = bench.schedule()

    assert released_only.delta.admissions == ()
    assert [admission.slot for admission in admitting.delta.admissions]


def test_late_token_that_stops_its_sequence_ends_it() -> None:
    bench = Bench(small_limits(blocks=6, budget=24))
    bench.add(0, 12)
    b = bench.add(1, 12, StopConditions(stop_token_ids=frozenset({212})))
    bench.schedule()
    bench.schedule()

    updates = bench.process()

    assert updates.finished == {1: FinishReason.STOP}
    assert updates.sequences[1] is b.sequence
    assert b.sequence.status is SequenceStatus.FINISHED
    assert not bench.scheduler.waiting


def test_late_token_has_its_logprob() -> None:
    bench = two_that_outgrow_the_pool()
    bench.schedule()
    bench.schedule()
    result = bench.results[0]
    bench.results[0] = type(result)(
        result.epoch, result.step_id, result.sampled_token_ids, np.array([-1.0, -2.0], np.float32)
    )

    assert bench.process().logprobs == [-1.0, -2.0]


def test_late_token_of_a_sequence_that_was_finished_is_dropped() -> None:
    bench = two_that_outgrow_the_pool()
    b = bench.scheduler.waiting[1]
    bench.schedule()
    bench.schedule()

    bench.scheduler.finish(b)

    assert delivered(bench.process()) == {"a": 112}


def test_finishing_a_moved_sequence_loses_no_late_token_of_another() -> None:
    old = Bench(small_limits())
    old.add(2, 1)
    moved = old.add(3, 1)  # had slot 1, generation 1 there, as `b` has here
    old.step()
    old.scheduler.evacuate()
    bench = two_that_outgrow_the_pool()
    bench.schedule()
    bench.scheduler.add(moved)
    bench.schedule()  # preempts b, whose first token is on its way

    bench.scheduler.finish(moved.sequence)

    assert delivered(bench.process()) == {"a": 112, "b": 212}


def test_blocks_are_free_as_soon_as_a_sequence_is_finished() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 9)
    bench.step()

    bench.scheduler.finish(a.sequence)

    assert bench.scheduler.block_manager.allocator.num_used_blocks == 0
    assert a.sequence.status is SequenceStatus.FINISHED


def test_tokens_after_finish_are_dropped_even_before_the_next_step() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 3)
    bench.schedule()
    bench.scheduler.finish(a.sequence)

    assert delivered(bench.process()) == {}


def test_tokens_after_a_stop_are_dropped_even_before_the_next_step() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, StopConditions(stop_token_ids=frozenset({103})))
    bench.schedule()
    bench.schedule()

    assert bench.process().finished == {0: FinishReason.STOP}
    assert delivered(bench.process()) == {}


def test_finish_of_a_finished_sequence_changes_nothing() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 3)
    bench.scheduler.finish(a.sequence)

    bench.scheduler.finish(a.sequence)

    assert bench.scheduler.schedule() is None


def test_last_release_is_sent_even_when_nothing_runs() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, StopConditions(max_tokens=1))
    bench.step()

    step = bench.schedule()

    assert step.delta.released_slots.tolist() == [0]
    assert not bench.executor.table.live.any()
    assert delivered(bench.process()) == {}
    assert bench.scheduler.schedule() is None


def test_a_freed_slot_and_its_blocks_are_given_out_in_the_step_that_releases_them() -> None:
    bench = Bench(small_limits(max_num_seqs=1))
    bench.add(0, 3, StopConditions(max_tokens=1))
    bench.add(1, 3)
    bench.step()

    step = bench.schedule()

    assert step.delta.released_slots.tolist() == [0]
    assert [(a.slot, a.generation, a.block_ids.tolist()) for a in step.delta.admissions] == [(0, 2, [0])]


def test_no_step_runs_ahead_of_max_tokens() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, StopConditions(max_tokens=2))
    bench.schedule()
    bench.schedule()

    assert bench.scheduler.schedule() is None
    bench.process()
    assert bench.process().finished == {0: FinishReason.LENGTH}


def test_a_sequence_at_its_limit_is_held_back_while_others_go_on() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, StopConditions(max_tokens=1))
    bench.add(1, 3)
    bench.schedule()

    step = bench.schedule()

    assert step.delta.deactivated_slots.tolist() == [0]
    assert delivered(bench.process()) == {"a": 103, "b": 203}
    assert delivered(bench.process()) == {"b": 204}


def test_evacuate_returns_groups_by_arrival_with_all_known_tokens() -> None:
    bench = Bench(small_limits(max_num_seqs=2))
    groups = [bench.add(arrival, 3) for arrival in range(3)]
    bench.step()
    bench.schedule()  # its tokens are never seen

    assert bench.scheduler.evacuate() == groups
    assert groups[0].sequence.token_ids.tolist() == [100, 101, 102, 103]
    assert groups[1].sequence.token_ids.tolist() == [200, 201, 202, 203]
    assert groups[2].sequence.token_ids.tolist() == [300, 301, 302]
    assert all(group.sequence.status is SequenceStatus.WAITING for group in groups)


def test_evacuate_leaves_an_empty_scheduler() -> None:
    bench = Bench(small_limits())
    bench.add(0, 9)
    bench.schedule()

    bench.scheduler.evacuate()

    assert bench.scheduler.num_unfinished == 0
    assert not bench.scheduler.in_flight
    assert bench.scheduler.block_manager.allocator.num_used_blocks == 0


def test_evacuate_forgets_late_tokens_which_are_made_again_elsewhere() -> None:
    bench = two_that_outgrow_the_pool()
    bench.schedule()
    bench.schedule()
    groups = bench.scheduler.evacuate()
    elsewhere = Bench(small_limits())
    for moved in groups:
        elsewhere.scheduler.add(moved)

    tokens = delivered(elsewhere.step()) | delivered(elsewhere.step())

    assert tokens["b"] == 212
    assert groups[1].sequence.num_late_tokens == 0
