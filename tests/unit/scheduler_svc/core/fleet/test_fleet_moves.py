"""Groups that leave a core: it is lost, they were preempted, or their client left."""

from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import group, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.fleet_driving import FleetBench


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
