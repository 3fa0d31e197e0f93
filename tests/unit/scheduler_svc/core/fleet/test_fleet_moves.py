"""Groups that leave a core: it is lost, they were preempted, or their client left."""

from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import group, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.fleet_driving import FleetBench, two_planners


def test_a_preempted_group_may_go_on_elsewhere() -> None:
    bench = FleetBench(small_limits(blocks=6, budget=24))
    (tight,) = bench.members
    for arrival in range(2):
        bench.add(group(arrival, 12, max_tokens(4)))
    bench.step(tight)
    bench.process(tight)
    roomy = bench.attach(small_limits())

    bench.step(tight)
    preempted = next(bench.fleet.queue.in_order())
    bench.step(roomy)

    assert bench.fleet.planner_of(preempted) is roomy.planner
    bench.run()
    assert bench.tokens["b"] == [212, 213, 214, 215]


def test_the_groups_of_a_lost_core_go_first_and_elsewhere_without_a_token_lost() -> None:
    bench, first, second = two_planners()
    moved = bench.add(group(0, 4, max_tokens(4)))
    place = bench.fleet.place(moved, now_s=0.0)
    lost, kept = (first, second) if place is first.planner else (second, first)
    bench.step(lost)
    bench.process(lost)
    bench.step(lost)  # its answer never comes
    bench.add(group(1, 4, max_tokens(1)))

    groups = bench.lose(lost)

    assert groups == [moved]
    assert [waiting.request_id for waiting in bench.fleet.queue.in_order()] == ["a", "b"]
    assert bench.fleet.planners == [kept.planner]
    bench.run()
    assert bench.tokens == {"a": [104, 105, 106, 107], "b": [204]}


def test_groups_of_a_lost_core_wait_for_another_one_to_join() -> None:
    bench = FleetBench(small_limits())
    (lost,) = bench.members
    bench.add(group(0, 4, max_tokens(3), num_sequences=2))
    bench.step(lost)
    bench.process(lost)

    bench.lose(lost)
    bench.run()
    assert bench.tokens == {"a0": [104], "a1": [105]}

    bench.attach(small_limits(block_size=2, blocks=12))
    bench.run()
    assert bench.tokens == {"a0": [104, 105, 106], "a1": [105, 107, 109]}


# Shorter limits ----------------------------------------------------------------------------------


def bench_with_short_successor(max_model_len: int, *, beam_width: int) -> FleetBench:
    """Move a request without a limit of its own, with three tokens, to a core of this limit; play it to its end."""
    bench = FleetBench(small_limits(max_model_len=24, vocab_size=100, blocks=24))
    (lost,) = bench.members
    bench.add(group(0, [1, 2, 3, 4], beam_search=BeamSearchParams(beam_width) if beam_width else None))
    for _ in range(3):
        bench.step(lost)
        bench.process(lost)
    bench.lose(lost)
    bench.attach(small_limits(max_model_len=max_model_len, vocab_size=100, blocks=24))
    bench.run()
    return bench


@each_row(8, 12, 30)
def test_a_search_on_a_core_with_another_length_limit_ends_where_a_sampled_request_does(max_model_len: int) -> None:
    sampled = bench_with_short_successor(max_model_len, beam_width=0)
    search = bench_with_short_successor(max_model_len, beam_width=2)

    assert [len(output.token_ids) for output in sampled.outputs.values()] == [max_model_len - 4]
    (hypotheses,) = search.searches.values()
    assert [(len(h.token_ids), h.reason) for h in hypotheses] == [(max_model_len - 4, FinishReason.LENGTH)]
    search.check_all_is_free()


def test_a_search_that_is_too_long_for_the_only_core_ends_with_the_numbers() -> None:
    bench = bench_with_short_successor(7, beam_width=2)
    assert bench.failures == {0: "7 tokens plus one output token exceed max_model_len, 7"}


# Abort -------------------------------------------------------------------------------------------


def test_abort_finds_a_group_wherever_it_is() -> None:
    bench, first, _ = two_planners()
    running = bench.add(group(0, 4))
    for member in bench.members:
        bench.step(member)
    waiting = bench.add(group(1, 4))

    bench.fleet.abort(running)
    bench.fleet.abort(waiting)
    bench.fleet.abort(waiting)  # has ended already

    assert running.live_sequences == waiting.live_sequences == []
    assert len(bench.fleet.queue) == 0
    assert len(first.planner.groups) == 0
