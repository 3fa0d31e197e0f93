"""Groups with a grammar on one planner: who waits, what steps say of grammars, and what a flag ends."""

from dataclasses import replace

import numpy as np
import pytest

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import RowFlag, Step
from scheduler_svc.core.blocks.admission_plan import Scarcest
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.step.demand import Obstacle, Wait
from tests.support.driving import Bench, admitted, delivered, group, max_tokens, small_limits
from tests.support.each_row import each_row

ONE, TWO, THREE = (Grammar(b"grammar %d" % number) for number in range(3))


def grammars_of(step: Step) -> tuple[list[int], list[tuple[int, Grammar]], list[int | None]]:
    """Return what a step drops, what it loads, and which slots its admissions name."""
    delta = step.delta
    loads = [(load.slot, load.grammar) for load in delta.grammar_loads]
    return list(delta.grammar_drops), loads, [admission.resources.grammar_slot for admission in delta.admissions]


def test_equal_grammars_share_a_slot_and_outputs_without_one_have_none() -> None:
    bench = Bench(small_limits(grammar_slots=2))
    for arrival, grammar in enumerate((ONE, None, Grammar(ONE.body), TWO)):
        bench.add(arrival, 2, grammar=grammar)
    assert grammars_of(bench.schedule()) == ([], [(0, ONE), (1, TWO)], [0, None, 0, 1])


def test_who_finds_no_slot_is_passed_and_its_grammar_takes_the_place_of_one_that_nobody_follows_any_more() -> None:
    bench = Bench(small_limits(grammar_slots=1))
    bench.add(0, 2, max_tokens(2), grammar=ONE)
    waiting = bench.add(1, 2, max_tokens(1), grammar=TWO)
    bench.add(2, 2)
    assert admitted(bench.schedule()) == [100, 300]
    verdict = bench.planner.obstacle(waiting, 0.0)
    assert verdict == Obstacle(Wait.SKIPPED, "waits for a grammar slot: requests that run use all 1")
    bench.schedule()
    bench.process()
    bench.process()  # the last token of the first one
    step = bench.schedule()
    assert grammars_of(step) == ([0], [(0, TWO)], [0])
    assert step.delta.released_slots.tolist() == [0]
    bench.process()
    bench.add(3, 2, grammar=TWO)
    assert grammars_of(bench.schedule()) == ([], [], [0]), "it is loaded still"


def test_forks_hold_the_slot_of_their_lead_until_the_last_one_ends() -> None:
    bench = Bench(small_limits(grammar_slots=1))
    forked = bench.add(0, 2, max_tokens(9), num_sequences=3, grammar=ONE)
    bench.step()
    slots = bench.planner.batch.things.grammars
    assert slots.num_followers == [3]
    for sequence in forked.sequences[:2]:
        bench.planner.finish(sequence)
    assert not slots.have_room_for([TWO])
    bench.planner.finish(forked.sequences[2])
    assert slots.have_room_for([TWO])


@each_row(*PreemptionMode)
def test_a_preempted_group_gives_its_slot_up_and_names_it_again(mode: PreemptionMode) -> None:
    bench = Bench(small_limits(blocks=6, host_blocks=8, budget=24, preemption_mode=mode, grammar_slots=1))
    bench.add(0, 11, max_tokens(4))
    bench.add(1, 11, max_tokens(4), grammar=ONE)
    steps = bench.run(num_steps_in_flight=2)
    assert bench.planner.preemption.num_preemptions[mode] == 1
    named = [admission.resources.grammar_slot for step in steps for admission in step.delta.admissions]
    assert named == [None, 0, 0]
    assert sum(len(step.delta.grammar_loads) for step in steps) == 1


def test_a_swapped_group_waits_for_a_slot_and_says_so() -> None:
    bench = Bench(
        small_limits(
            blocks=6, host_blocks=8, budget=24, preemption_mode=PreemptionMode.SWAP, grammar_slots=1, max_num_seqs=3
        )
    )
    bench.add(0, 11)
    swapped = bench.add(1, 11, grammar=ONE)
    while not bench.planner.swapped.groups:
        bench.step()
    admissions, grammars = bench.planner.admissions, bench.planner.batch.things.grammars
    demand = admissions.demand_to_swap_in(swapped)._replace(blocks=Scarcest(0, 0))
    grammars.follow(ONE)
    assert admissions.obstacle_to_swap_in(demand) is None, "somebody has its grammar"
    grammars.leave(ONE)
    grammars.take(TWO)
    grammars.follow(TWO)
    verdict = admissions.obstacle_to_swap_in(demand)
    assert verdict == Obstacle(Wait.SKIPPED, "waits for a grammar slot: requests that run use all 1")


def test_a_message_carries_no_more_grammars_than_fit() -> None:
    large = [Grammar(bytes([number]) * 900) for number in range(3)]
    bench = Bench(replace(small_limits(grammar_slots=3), max_admitted_bytes=3_500))
    for arrival, grammar in enumerate((*large, large[0])):
        bench.add(arrival, 2, grammar=grammar)
    first = bench.schedule()
    assert 0 < len(first.delta.grammar_loads) < 3
    assert sum(len(step.delta.grammar_loads) for step in [first, bench.schedule(), bench.schedule()]) == 3


NEVER = {
    "no slots": (small_limits(), ONE, "this executor follows none (the capability GRAMMARS)"),
    "another matcher": (small_limits(grammar_slots=1), ONE, "goes with the matcher 'other'"),
    "too long": (small_limits(grammar_slots=1), Grammar(bytes(1001)), "its grammar has 1001 bytes"),
}


@each_row(*NEVER)
def test_an_executor_that_cannot_follow_a_grammar_takes_no_group_with_it(why: str) -> None:
    limits, grammar, sentence = NEVER[why]
    admissions = Bench(limits).planner.admissions
    asking = group(0, 2, grammar=grammar)
    if why == "another matcher":
        assert admissions.can_ever_admit(asking)
        asking.matcher_id = "other"
    verdict = admissions.judge(asking)
    assert isinstance(verdict, Obstacle)
    assert verdict.wait is Wait.NEVER
    assert sentence in verdict.reason
    assert admissions.must_not_go_on(asking)


# Flags ------------------------------------------------------------------------------------------------


def flag(bench: Bench, row: int, value: int) -> None:
    result = bench.results[0]
    flags = np.zeros(len(result.sampled_token_ids), np.uint8)
    flags[row] = value
    bench.results[0] = replace(result, row_flags=flags)


@each_row(RowFlag.NO_TOKEN_ALLOWED, RowFlag.GRAMMAR_LIMIT, RowFlag.GRAMMAR_FAILED)
def test_a_flag_of_a_grammar_ends_the_whole_group_and_nobody_else(value: RowFlag) -> None:
    bench = Bench(small_limits(grammar_slots=1))
    bench.add(0, 3, num_sequences=2, grammar=ONE)
    bench.add(1, 3)
    bench.step()
    bench.schedule()
    flag(bench, 1, value)

    updates = bench.process()

    assert delivered(updates) == {"a0": 105, "b": 205} or "b" in delivered(updates)
    [failure] = updates.failures
    assert (failure.group.request_id, failure.flag, failure.message) == ("a", value, "output 1 at token 1")
    assert bench.running == "b"
    assert not bench.planner.batch.things.grammars.num_in_use


def test_flags_of_grammars_are_a_fault_of_an_executor_that_agreed_on_none() -> None:
    bench = Bench(replace(small_limits(), flags_rows=True))
    bench.add(0, 3)
    bench.schedule()
    flag(bench, 0, RowFlag.GRAMMAR_LIMIT)
    with pytest.raises(ExecutorFaultError, match="the row flag 2, which was not negotiated"):
        bench.process()
