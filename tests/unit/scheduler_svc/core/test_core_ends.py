"""How groups end: by their tokens, by a stop string, by their client, and with their executor."""

from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.parameters import StopConditions
from tests.support.driving import Bench, chunks, delivered, max_tokens, only_admission, small_limits, with_logprobs


def stop_at(token_id: int) -> StopConditions:
    return StopConditions(stop_token_ids=frozenset({token_id}))


def test_a_sequence_ends_by_its_token_and_its_blocks_are_free_at_once() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 3, max_tokens(1))

    updates = bench.step()

    assert updates.finished == {0: FinishReason.LENGTH}
    assert updates.sequences == a.sequences
    assert a.sequences[0].status is SequenceStatus.FINISHED
    assert bench.num_free_blocks == 8
    assert len(bench.planner.groups) == 0


def test_blocks_are_free_as_soon_as_a_sequence_is_finished() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 9)
    bench.step()

    bench.planner.finish(a.sequences[0])

    assert bench.num_free_blocks == 8
    assert a.sequences[0].status is SequenceStatus.FINISHED


def test_tokens_after_finish_are_dropped_even_before_the_next_step() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 3)
    bench.schedule()

    bench.planner.finish(a.sequences[0])

    assert delivered(bench.process()) == {}


def test_tokens_after_a_stop_are_dropped_even_before_the_next_step() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, stop_at(103))
    bench.schedule()
    bench.schedule()

    assert bench.process().finished == {0: FinishReason.STOP}
    assert delivered(bench.process()) == {}


def test_a_slot_that_was_given_away_takes_no_token_of_its_former_sequence() -> None:
    bench = Bench(small_limits(max_num_seqs=1))
    bench.add(0, 3, stop_at(103))
    bench.add(1, 3)
    bench.schedule()
    bench.schedule()  # one token too many for a
    bench.process()
    bench.schedule()  # b has a's slot now

    assert delivered(bench.process()) == {}
    assert delivered(bench.process()) == {"b": 203}


def test_last_release_is_sent_even_when_nothing_runs() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, max_tokens(1))
    bench.step()

    step = bench.schedule()

    assert step.delta.released_slots.tolist() == [0]
    assert not bench.executor.table.live.any()
    assert delivered(bench.process()) == {}
    assert bench.try_schedule() is None


def test_a_freed_slot_and_its_blocks_are_given_out_in_the_step_that_releases_them() -> None:
    bench = Bench(small_limits(max_num_seqs=1))
    bench.add(0, 3, max_tokens(1))
    bench.add(1, 3)
    bench.step()

    step = bench.schedule()

    admission = only_admission(step)
    assert step.delta.released_slots.tolist() == [0]
    assert (admission.slot, admission.generation, admission.block_ids.tolist()) == (0, 2, [0])


def test_the_updates_carry_the_logprobs_of_their_tokens_only() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, stop_at(103))
    bench.add(1, 3)
    bench.schedule()
    bench.schedule()
    bench.process()
    bench.results[0] = with_logprobs(bench.results[0], [-1.0, -2.0])

    updates = bench.process()

    assert (delivered(updates), updates.logprobs) == ({"b": 204}, [-2.0])


def test_abort_of_a_waiting_group_takes_it_out_of_the_queue() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 3)

    bench.planner.abort(a)

    assert a.live_sequences == []
    assert bench.waiting == ""
    assert bench.try_schedule() is None


def test_abort_of_a_prefill_frees_all_of_it() -> None:
    bench = Bench(small_limits(budget=4))
    a = bench.add(0, 12)
    bench.schedule()

    bench.planner.abort(a)

    assert bench.num_free_blocks == 8
    assert delivered(bench.process()) == {}
    assert bench.run()[0].delta.released_slots.tolist() == [0]


def test_one_output_of_a_group_ends_and_the_others_go_on() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 3, max_tokens(4), num_sequences=2)
    bench.step()

    bench.planner.finish(a.sequences[0])
    bench.run()

    assert bench.outputs == {"a0": [103], "a1": [104, 106, 108, 110]}


def test_finish_of_a_finished_sequence_changes_nothing() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 3)
    bench.planner.finish(a.sequences[0])

    bench.planner.finish(a.sequences[0])

    assert bench.try_schedule() is None


def test_finish_of_a_finished_output_leaves_the_last_other_one_alone() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 3, max_tokens(3), num_sequences=2)
    bench.step()
    bench.planner.finish(a.sequences[1])

    bench.planner.finish(a.sequences[1])
    bench.run()

    assert bench.outputs["a0"] == [103, 104, 105]


def test_evacuate_returns_groups_in_order_with_all_known_tokens() -> None:
    bench = Bench(small_limits())
    groups = [bench.add(arrival, 3) for arrival in range(2)]
    bench.step()
    bench.schedule()  # its tokens are never seen

    assert bench.planner.evacuate() == groups
    assert [group.sequences[0].token_ids.tolist() for group in groups] == [[100, 101, 102, 103], [200, 201, 202, 203]]
    assert all(group.sequences[0].status is SequenceStatus.WAITING for group in groups)


def test_evacuate_leaves_what_was_never_admitted_in_the_queue() -> None:
    bench = Bench(small_limits(max_num_seqs=1))
    a, b = bench.add(0, 3), bench.add(1, 3)
    bench.step()

    assert bench.planner.evacuate() == [a]
    assert list(bench.queue) == [b]


def test_evacuate_forgets_the_steps_in_flight() -> None:
    bench = Bench(small_limits())
    bench.add(0, 9)
    bench.schedule()

    bench.planner.evacuate()

    assert not bench.planner.in_flight
    assert bench.running == ""


def test_an_evacuated_group_goes_on_elsewhere_where_it_was() -> None:
    bench, elsewhere = Bench(small_limits()), Bench(small_limits(block_size=2, blocks=12), epoch=2)
    bench.add(0, 3, max_tokens(4), num_sequences=2)
    bench.step()
    bench.schedule()

    for moved in bench.planner.evacuate():
        elsewhere.queue.add(moved)
    elsewhere.run()

    assert bench.outputs == {"a0": [103], "a1": [104]}
    assert elsewhere.outputs == {"a0": [104, 105, 106], "a1": [106, 108, 110]}


def test_evacuated_outputs_that_share_no_full_block_are_computed_as_the_budget_goes() -> None:
    bench, elsewhere = Bench(small_limits()), Bench(small_limits(budget=4), epoch=2)
    bench.add(0, 3, max_tokens(4), num_sequences=2)
    bench.step()
    bench.step()

    for moved in bench.planner.evacuate():
        elsewhere.queue.add(moved)
    sent = [chunks(step) for step in elsewhere.run()[:3]]

    assert sent == [{0: 4}, {0: 1, 1: 3}, {1: 2}]
    assert elsewhere.outputs == {"a0": [105, 106], "a1": [108, 110]}


def test_nothing_is_kept_of_a_preempted_group_that_ends_with_its_last_inflight_token() -> None:
    bench = Bench(small_limits(blocks=6))
    for first in range(0, 20, 2):
        bench.add(first, [1 + first] * 8, max_tokens(8))
        bench.add(first + 1, [51 + first] * 6, max_tokens(5))
        bench.run(2)
        assert not any(
            bench.planner.preempted.sequence_of(slot, generation) for slot in range(4) for generation in range(200)
        )
    assert any(bench.planner.preemption.num_preemptions.values())
