"""Where a group goes that lost its executor, and what an executor in doubt gets."""

from scheduler_svc.core.limits import PrefillMode
from scheduler_svc.core.sequence import SequenceGroup
from tests.support.driving import group, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.fleet_driving import FleetBench


def fleet(*names: str, max_num_seqs: int = 4) -> FleetBench:
    """Return a fleet of members with these names, which are equal."""
    bench = FleetBench(*[small_limits(prefix_caching=False, max_num_seqs=max_num_seqs)] * len(names))
    for member, name in zip(bench.members, names, strict=True):
        member.planner.name = name
    return bench


def runs_on(bench: FleetBench) -> dict[str, list[int]]:
    """Let every member decide once; return the arrivals that each one runs then."""
    for member in bench.members:
        bench.step(member)
    return {member.planner.name: [each.arrival for each in member.planner.batch.running] for member in bench.members}


def lost(arrival: int, name: str) -> SequenceGroup:
    """Return a group that ran on an executor when it was lost."""
    made = group(arrival, 4)
    made.has_run, made.lost_on = True, name
    return made


def test_a_group_does_not_go_where_it_was_lost_while_another_core_could_take_it() -> None:
    bench = fleet("a", "b", "c", max_num_seqs=1)
    for arrival, name in enumerate("aabb"):
        bench.add(lost(arrival, name))
    placed = runs_on(bench)
    assert not {0, 1} & set(placed["a"])
    assert not {2, 3} & set(placed["b"])


def test_a_group_waits_for_the_other_core_and_lets_newcomers_pass() -> None:
    bench = fleet("a", "b", max_num_seqs=1)
    busy = bench.add(group(0, 4))
    assert runs_on(bench) == {"a": [0], "b": []}
    bench.add(lost(1, "b"))
    bench.add(group(2, 4))
    assert runs_on(bench) == {"a": [0], "b": [2]}
    bench.abort(busy)
    assert runs_on(bench)["a"] == [1]


def test_a_group_goes_back_where_it_was_lost_if_nobody_else_could_take_it() -> None:
    bench = fleet("a", "b")
    bench.add(lost(0, "a"))
    bench.lose(bench.members[1])
    assert runs_on(bench) == {"a": [0]}


def test_a_core_in_doubt_has_one_group_until_it_is_not_in_doubt_any_more() -> None:
    for bench in (fleet("a"), fleet("a", "b")):
        doubtful = bench.members[0].planner
        doubtful.is_probing = True
        for arrival in range(8):
            bench.add(group(arrival, 4))
        assert len(runs_on(bench)["a"]) == 1
        assert len(runs_on(bench)["a"]) == 1
        doubtful.is_probing = False
        assert len(runs_on(bench)["a"]) == 4


def test_what_a_core_in_doubt_cannot_have_goes_to_the_others_at_once() -> None:
    bench = fleet("a", "b")
    bench.members[1].planner.is_probing = True
    for arrival in range(5):
        bench.add(group(arrival, 4))
    assert {name: len(arrivals) for name, arrivals in runs_on(bench).items()} == {"a": 4, "b": 1}


def test_a_group_that_was_lost_goes_to_no_core_in_doubt_while_a_sound_one_could_take_it() -> None:
    bench = fleet("a", "b", "c")
    for doubtful in bench.members[:2]:
        doubtful.planner.is_probing = True
    for arrival in range(3):
        bench.add(lost(arrival, "a"))
    assert runs_on(bench) == {"a": [], "b": [], "c": [0, 1, 2]}


@each_row(*PrefillMode)
def test_a_suspect_is_computed_alone_until_its_token_and_those_beside_it_wait(mode: PrefillMode) -> None:
    limits = small_limits(prefix_caching=False, budget=4, prefill_mode=mode)
    bench = FleetBench(limits)
    [member] = bench.members
    bench.add(group(0, 3, max_tokens(9)))
    bench.step(member)
    suspect = group(1, 6, max_tokens(3))
    bench.fleet.set_runs_alone(suspect, True)
    bench.add(suspect)
    bench.add(group(2, 3, max_tokens(9)))
    seen: list[set[int]] = []
    while "b" not in bench.tokens and len(seen) < 30:
        last_step_id = member.planner.last_scheduled_step_id
        bench.step(member)
        seen.append({-1 if each is None else each.arrival for each in member.planner.groups_in_flight})
        if len(member.results) == 2 or (member.results and member.planner.last_scheduled_step_id == last_step_id):
            bench.process(member)
    alone = [arrivals for arrivals in seen if 1 in arrivals]
    assert alone == [{1}] * len(alone) != []
    bench.fleet.forgive_loss(suspect)
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.tokens.items()} == {"a": 9, "b": 3, "c": 9}


@each_row(*PrefillMode)
def test_a_suspect_that_can_only_fail_keeps_nobody_beside_it_waiting(mode: PrefillMode) -> None:
    """Nothing else would let the core look again."""
    bench = FleetBench(small_limits(max_num_seqs=2, prefill_mode=mode))
    suspect = bench.add(group(0, 2, num_sequences=2))
    bench.turn()
    bench.lose(bench.members[0])
    bench.fleet.set_runs_alone(suspect, True)
    small = bench.attach(small_limits(max_num_seqs=1, prefill_mode=mode))
    beside = bench.add(group(1, 2))
    bench.fleet.dispatch(0.0)

    bench.step(small)

    assert list(bench.failures) == [0]
    assert bench.fleet.planner_of(beside) is small.planner
