"""Groups whose grammar is loaded beside the steps: who waits, who passes, and what the end of a load brings."""

from dataclasses import replace

import pytest

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import GrammarLoaded, RowFlag
from scheduler_svc.core.blocks.admission_plan import Scarcest
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.core.step.executor_planner import POLL_INTERVAL_S
from scheduler_svc.core.step.slotted_things import GrammarSlots
from tests.support.driving import Bench, admitted, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.toy_executor import BROKEN
from tests.unit.scheduler_svc.core.test_core_grammars import grammars_of

ONE, TWO, NONSENSE = Grammar(b"one"), Grammar(b"two"), Grammar(b"broken one")


def loading_bench(num_load_steps: int = 2, grammar_slots: int = 2, max_num_seqs: int = 4) -> Bench:
    limits = small_limits(grammar_slots=grammar_slots, tells_loads=True, max_num_seqs=max_num_seqs)
    return Bench(limits, num_load_steps=num_load_steps)


def test_who_waits_for_a_load_is_passed_and_admitted_first_once_it_is_told() -> None:
    bench = loading_bench(max_num_seqs=2)
    waiting = bench.add(0, 2, grammar=ONE)
    bench.add(1, 2, max_tokens(3))
    first = bench.schedule()
    assert (grammars_of(first), admitted(first)) == (([], [(0, ONE)], [None]), [200])
    assert bench.planner.obstacle(waiting, 0.0) == GrammarSlots.waits
    bench.add(2, 2, grammar=Grammar(ONE.body))
    bench.process()
    bench.step()
    assert not grammars_of(bench.schedule())[1], "it is loaded once"
    bench.process()  # the load is told with the last token of the second one
    third = bench.schedule()
    assert (grammars_of(third), admitted(third)) == (([], [], [0, 0]), [100, 300])


@each_row(*range(4))
def test_every_output_is_the_same_however_long_loads_take(num_load_steps: int) -> None:
    bench = loading_bench(num_load_steps, grammar_slots=1)
    for arrival, grammar in enumerate((ONE, None, TWO, ONE, None, TWO)):
        bench.add(arrival, 2, max_tokens(3), grammar=grammar)
    bench.run(num_steps_in_flight=2)
    other = Bench(small_limits(grammar_slots=1))
    for arrival, grammar in enumerate((ONE, None, TWO, ONE, None, TWO)):
        other.add(arrival, 2, max_tokens(3), grammar=grammar)
    other.run(num_steps_in_flight=2)
    assert bench.outputs == other.outputs
    assert {*bench.outputs} == {*"abcdef"}


def test_a_plain_stream_loses_no_step_to_a_load() -> None:
    bench = loading_bench(num_load_steps=5)
    bench.add(0, 2, max_tokens(9))
    bench.step()
    bench.add(1, 2, grammar=ONE)
    for _ in range(6):
        bench.step()
    assert len(bench.outputs["a"]) == 7


def test_a_slot_that_is_being_loaded_is_nobody_elses() -> None:
    bench = loading_bench(grammar_slots=1)
    gone, other = bench.add(0, 2, grammar=ONE), bench.add(1, 2, max_tokens(1), grammar=TWO)
    bench.step()
    verdict = bench.planner.obstacle(other, 0.0)
    assert verdict == Obstacle(Wait.SKIPPED, "waits for a grammar slot: requests that run use all 1")
    bench.queue.remove(gone)
    steps = bench.run()
    assert [grammars_of(step)[:2] for step in steps if step.delta.grammar_loads] == [([0], [(0, TWO)])]
    assert len(bench.outputs["b"]) == 1


def test_an_executor_without_work_is_asked_every_20_ms_and_never_without_a_load() -> None:
    bench = loading_bench(num_load_steps=2)
    bench.add(0, 2, max_tokens(1), grammar=ONE)
    bench.step()
    polls = []
    for tick in range(100):
        bench.now_s = tick * 0.005
        if (step := bench.try_schedule()) is not None:
            polls.append((tick, len(step.delta.admissions)))
            bench.process()
    assert polls == [(4, 0), (9, 0), (10, 1), (11, 0)], "the last one releases its slot"
    assert bench.planner.poll_due_s is None
    assert POLL_INTERVAL_S == 0.02


def test_a_grammar_that_cannot_be_loaded_ends_who_asks_for_it_with_the_executors_words_and_nobody_else() -> None:
    bench = loading_bench(num_load_steps=1)
    bench.add(0, 2, grammar=NONSENSE)
    bench.add(1, 2, max_tokens(9), grammar=ONE)
    bench.add(2, 2, max_tokens(9))
    for _ in range(3):
        bench.step()
    later = bench.add(3, 2, grammar=NONSENSE)
    bench.step()
    told = [(failure.group.request_id, failure.message, failure.flag) for failure in bench.failures]
    assert told == [(name, BROKEN, RowFlag.GRAMMAR_FAILED) for name in "ad"]
    assert later not in bench.queue
    assert {*bench.running} == {*"bc"}


def test_a_swapped_group_whose_grammar_is_gone_has_it_loaded_again_and_holds_up_nobody() -> None:
    limits = small_limits(blocks=6, host_blocks=8, budget=24, preemption_mode=PreemptionMode.SWAP, grammar_slots=2)
    bench = Bench(replace(limits, tells_loads=True))
    bench.add(0, 11, max_tokens(12))
    swapped = bench.add(1, 11, max_tokens(8), grammar=ONE)
    while not bench.planner.swapped.groups:
        bench.step()
    slots, planner = bench.planner.batch.things.grammars, bench.planner
    assert planner.groups.returning == [swapped]
    for grammar in (TWO, Grammar(b"three")):
        taken = slots.take(grammar)
    assert taken.is_dropped
    assert planner.batch.things.waits_for_load(swapped)
    assert planner.groups.first_return is None
    slots.end_load(taken.slot)
    slots.end_load(slots.take(ONE).slot, "the executor fails its rows")
    demand = planner.admissions.demand_to_swap_in(swapped)._replace(blocks=Scarcest(0, 0))
    assert planner.admissions.obstacle_to_swap_in(demand) is None, "it would wait for ever"


@each_row([0, 0], [1], [2])
def test_the_end_of_a_load_that_is_not_due_is_a_fault(slots: list[int]) -> None:
    bench = loading_bench(num_load_steps=9)
    bench.add(0, 2, grammar=ONE)
    bench.schedule()
    bench.results[0] = replace(bench.results[0], grammars_loaded=tuple(map(GrammarLoaded, slots)))
    with pytest.raises(ExecutorFaultError, match=f"tells of a load into grammar slot {slots[-1]} that is not due"):
        bench.process()
