"""Groups with a grammar in a fleet: which executors may take them, and who waits for whom."""

from dataclasses import replace

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import Adapter
from scheduler_svc.core.step.demand import Obstacle, Wait
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet import Member
from tests.support.fleet_driving import FleetBench

ONE, TWO, THREE = (Grammar(b"grammar %d" % number) for number in range(3))


def running(member: Member) -> str:
    return "".join(group.request_id for group in member.planner.batch.running)


def test_a_group_goes_where_grammars_are_followed_and_else_its_absence_is_named() -> None:
    bench = FleetBench(small_limits())
    asking = group(0, 2, grammar=ONE)
    assert not bench.fleet.can_ever_take(asking)
    assert bench.fleet.must_not_go_on(asking)
    assert "the capability GRAMMARS" in bench.fleet.why_never(asking)
    able = bench.attach(small_limits(grammar_slots=1))
    assert bench.fleet.place(asking, 0.0) is able.planner
    too_long = group(1, 24, grammar=ONE)
    assert "24 tokens plus one output token" in bench.fleet.why_never(too_long), "the reason of the one that follows"


def test_what_has_begun_goes_on_only_at_an_equal_matcher() -> None:
    limits = small_limits(grammar_slots=1)
    bench = FleetBench(limits)
    [first] = bench.members
    moving = group(0, 2, max_tokens(5), grammar=ONE)
    bench.add(moving)
    bench.step(first)
    bench.process(first)
    other = bench.attach(replace(limits, matcher_id="another release"))
    bench.lose(first)
    bench.fleet.note_loss(moving, "first")
    bench.step(other)
    assert running(other) == ""
    assert bench.fleet.must_not_go_on(moving)
    assert "grammar goes with the matcher 'toy'" in bench.fleet.why_never(moving)
    equal = bench.attach(limits)
    bench.run()
    assert len(bench.outputs[0, 0].token_ids) == 5
    assert equal.planner.batch.things.grammars.num_loads == 1


def test_a_group_goes_to_the_executor_that_has_a_slot_for_its_grammar() -> None:
    limits = small_limits(grammar_slots=1, max_num_seqs=8, budget=32, blocks=32)
    bench = FleetBench(limits, limits)
    first, second = bench.members
    for arrival, grammar in enumerate((ONE, TWO, ONE, TWO, ONE)):
        bench.add(group(arrival, 2, grammar=grammar))
        bench.fleet.dispatch(0.0)
    bench.step(first)
    bench.step(second)
    grammars = [{group.grammar for group in member.planner.batch.running} for member in bench.members]
    assert sorted(grammars, key=str) == sorted([{ONE}, {TWO}], key=str)
    assert len(bench.queue) == 0


def test_while_one_waits_for_a_slot_none_is_given_to_those_behind_it_and_others_pass() -> None:
    bench = FleetBench(small_limits(grammar_slots=1, max_num_seqs=6, blocks=20))
    [member] = bench.members
    bench.add(group(0, 2, max_tokens(3), grammar=ONE))
    bench.step(member)
    waiting = group(1, 2, max_tokens(9), grammar=TWO)
    bench.add(waiting)
    for arrival in range(2, 5):  # they share the grammar that runs: with them it would run for ever
        bench.add(group(arrival, 2, max_tokens(3), grammar=ONE))
    bench.add(group(5, 2, max_tokens(9)))
    bench.step(member)
    assert running(member) == "af"
    assert bench.fleet.dispatcher.num_grammar_waits == 4
    obstacle = bench.fleet.place(waiting, 0.0)
    assert isinstance(obstacle, Obstacle)
    assert (obstacle.wait, "grammar slot" in obstacle.reason) == (Wait.SKIPPED, True)
    while member.results:
        bench.process(member)
    bench.step(member)
    bench.process(member)
    bench.step(member)
    assert running(member) == "bf"
    bench.run()
    assert [len(output.token_ids) for _, output in sorted(bench.outputs.items())] == [3, 9, 3, 3, 3, 9]
    assert bench.fleet.dispatcher.num_grammar_waits == 4, "each counts once"


def test_one_that_waits_for_an_adapter_slot_keeps_a_slot_for_its_grammar_and_no_more() -> None:
    bench = FleetBench(small_limits(grammar_slots=2, adapter_slots=1, max_num_seqs=6, blocks=20))
    [member] = bench.members
    bench.add(group(0, 2, max_tokens(9), adapter=Adapter("one")))
    for _ in range(2):  # its load ends
        bench.turn()
    bench.add(group(1, 2, max_tokens(9), adapter=Adapter("two"), grammar=ONE))
    bench.add(group(2, 2, max_tokens(9), grammar=TWO))
    bench.add(group(3, 2, max_tokens(9), grammar=THREE))
    bench.add(group(4, 2, max_tokens(9), adapter=Adapter("three")))

    bench.step(member)

    assert running(member) == "ac"
    assert bench.fleet.dispatcher.num_grammar_waits == 1, "the others wait for the adapter slot"
    bench.run()
    assert len(bench.outputs) == 5
