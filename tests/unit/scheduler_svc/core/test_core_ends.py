"""How groups end: by their tokens, by a stop string, by their client, and with their executor."""

from scheduler_svc.request.parameters import StopConditions
from tests.support.driving import Bench, chunks, delivered, max_tokens, small_limits, with_logprobs


def stop_at(token_id: int) -> StopConditions:
    return StopConditions(stop_token_ids=frozenset({token_id}))


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


def test_finish_of_a_finished_output_leaves_the_last_other_one_alone() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 3, max_tokens(3), num_sequences=2)
    bench.step()
    bench.planner.finish(a.sequences[1])

    bench.planner.finish(a.sequences[1])
    bench.run()

    assert bench.outputs["a0"] == [103, 104, 105]


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
