"""A group that has output goes on at an executor of the kind that made it, if there is a choice."""

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.demand import Obstacle
from scheduler_svc.request.parameters import BeamSearchParams
from scheduler_svc.request.provenance import Numerics
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet import Member
from tests.support.fleet_driving import FleetBench

ONE, OTHER = Numerics("1"), Numerics("2")
LONG = small_limits(max_model_len=64, blocks=32)


def bench_with(*arrivals: SequenceGroup, budget: int = 16, max_num_seqs: int = 4) -> tuple[FleetBench, Member]:
    """Return a fleet with one executor, of the kind ONE, at which these groups have two tokens of five."""
    bench = FleetBench()
    first = bench.attach(small_limits(budget=budget, max_num_seqs=max_num_seqs), ONE)
    for arrival in arrivals:
        bench.add(arrival)
    for _ in range(2):
        bench.step(first)
        bench.process(first)
    return bench, first


def spans(moved: SequenceGroup, num_tokens: int = 5) -> list[tuple[int, Numerics]]:
    return moved.provenance.of_output(0, num_tokens)


def test_a_moved_group_prefers_its_kind_to_a_core_with_less_to_do() -> None:
    moved = group(0, 4, max_tokens(5))
    bench, first = bench_with(moved)
    busy, idle = (bench.attach(small_limits(), numerics) for numerics in (ONE, OTHER))
    bench.add(group(1, 8, max_tokens(5)))
    bench.step(busy)

    bench.lose(first)
    assert bench.fleet.place(moved, 0.0) is busy.planner
    bench.run()

    assert spans(moved) == [(0, ONE)]
    assert bench.tokens["a"] == [104, 105, 106, 107, 108]
    assert not idle.planner.last_scheduled_step_id


def test_it_waits_for_the_budget_of_its_kind_and_others_pass_it() -> None:
    moved, newcomer = group(0, 12, max_tokens(5)), group(2, 4, max_tokens(1))
    bench, first = bench_with(moved)
    busy = bench.attach(LONG, ONE)
    bench.add(group(1, 48, max_tokens(1)))
    bench.step(busy)  # two more steps like this one
    idle = bench.attach(small_limits(), OTHER)
    bench.lose(first)
    bench.add(newcomer)
    obstacle = bench.fleet.place(moved, 0.0)
    assert isinstance(obstacle, Obstacle)
    assert obstacle.reason == "another executor with the same numerics id will take it soon"

    bench.step(idle)

    assert bench.fleet.planner_of(newcomer) is idle.planner
    bench.run()
    assert spans(moved) == [(0, ONE)]


def test_it_goes_on_elsewhere_where_its_kind_has_no_room() -> None:
    moved = group(0, 4, max_tokens(5))
    bench, first = bench_with(moved)
    full = bench.attach(small_limits(max_num_seqs=1), ONE)
    bench.add(group(1, 4, max_tokens(9)))
    bench.step(full)
    other = bench.attach(small_limits(), OTHER)

    bench.lose(first)
    bench.step(other)

    assert bench.fleet.planner_of(moved) is other.planner
    bench.run()
    assert spans(moved) == [(0, ONE), (2, OTHER)]


def test_a_core_takes_over_nothing_from_another_kind() -> None:
    """A moved group is in the inbox of a core that computes a prompt, when another core asks for work."""
    moved = group(0, 4, max_tokens(5))
    bench, first = bench_with(moved)
    alike = bench.attach(LONG, ONE)
    bench.add(group(1, 24, max_tokens(1)))
    bench.step(alike)
    bench.lose(first)
    assert bench.fleet.dispatcher.dispatch(0.0) == {alike.planner}
    other = bench.attach(small_limits(), OTHER)

    bench.step(other)

    assert moved not in other.planner.groups
    bench.run()
    assert spans(moved) == [(0, ONE)]


def test_a_group_without_output_goes_anywhere() -> None:
    fresh = group(0, 4, max_tokens(5))
    bench = FleetBench()
    first = bench.attach(small_limits(), ONE)
    bench.add(fresh)
    bench.step(first)
    busy, idle = (bench.attach(small_limits(), numerics) for numerics in (ONE, OTHER))
    bench.add(group(1, 8, max_tokens(5)))
    bench.step(busy)

    bench.lose(first)

    assert bench.fleet.place(fresh, 0.0) is idle.planner
    bench.run()
    assert spans(fresh) == [(0, OTHER)]


def test_the_lost_executor_itself_is_no_better_for_being_of_its_kind() -> None:
    """Whoever was lost somewhere goes elsewhere first: the request may be why."""
    moved = group(0, 4, max_tokens(5))
    bench, first = bench_with(moved)
    first.planner.name = "here"
    bench.lose(first)
    moved.lost_on = "here"
    back, other = bench.attach(small_limits(), ONE), bench.attach(small_limits(), OTHER)
    back.planner.name = "here"

    assert bench.fleet.place(moved, 0.0) is other.planner


def test_several_outputs_and_beams_have_their_spans() -> None:
    several = group(0, 4, max_tokens(5), num_sequences=2)
    search = group(1, [1, 2, 3, 4], max_tokens(5), beam_search=BeamSearchParams(2))
    bench, first = bench_with(several, search)
    bench.attach(small_limits(), OTHER)

    bench.lose(first)
    bench.run()

    assert [several.provenance.of_output(index, 5) for index in range(2)] == [[(0, ONE), (2, OTHER)]] * 2
    [(begin, _), (moved_at, numerics)] = spans(search)
    assert (begin, numerics) == (0, OTHER)
    assert 0 < moved_at <= 2
