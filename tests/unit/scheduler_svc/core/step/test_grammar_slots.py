"""Grammar slots: shared by equal grammars, kept until they are wanted, and never taken from who follows them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from octavo_shared.grammar.grammar import Grammar
from scheduler_svc.core.step.grammar_slots import GrammarSlots
from scheduler_svc.core.step.step_plan import StepPlan

GRAMMARS = [Grammar(b"grammar %d" % number) for number in range(6)]


def new_plan() -> StepPlan:
    return StepPlan(token_budget=8, now_s=0.0, num_admissible_bytes=10_000, has_steps_in_flight=False)


class Executor:
    """What an executor has in its slots; it refuses what executors refuse."""

    def __init__(self, num_slots: int) -> None:
        self.grammars: list[Grammar | None] = [None] * num_slots

    def take(self, plan: StepPlan, followed: set[Grammar]) -> None:
        for slot in plan.grammar_drops:
            assert self.grammars[slot] is not None, "an empty slot is dropped"
            assert self.grammars[slot] not in followed, "a slot is dropped that somebody follows"
            self.grammars[slot] = None
        for load in plan.grammar_loads:
            assert self.grammars[load.slot] is None, "a slot is loaded that is not empty"
            self.grammars[load.slot] = load.grammar


# Each is a step: groups that end, then those that want a grammar; numbers of grammars.
_STEPS = st.lists(st.tuples(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 5), max_size=4)), max_size=30)


@given(st.integers(1, 4), _STEPS)
def test_who_follows_a_grammar_finds_it_whatever_comes_and_goes(
    num_slots: int, steps: list[tuple[list[int], list[int]]]
) -> None:
    slots, executor = GrammarSlots(num_slots), Executor(num_slots)
    running: list[Grammar] = []
    for ends, wanted in steps:
        for end in ends:
            if running:
                slots.leave(running.pop(end % len(running)))
        plan, remaining = new_plan(), set(running)
        for number in wanted:
            grammar = GRAMMARS[number]
            has_room = slots.have_room_for([grammar])
            assert has_room == (len({grammar, *running}) <= num_slots)
            if has_room:
                slot = slots.load(plan, grammar)
                slots.follow(grammar)
                running.append(grammar)
                assert slots.slot_of(grammar) == slot
        executor.take(plan, remaining)
        assert executor.grammars == slots.grammars
        assert all(grammar in executor.grammars for grammar in running)
        followers = Counter(slots.slot_of(grammar) for grammar in running)
        assert slots.num_followers == [followers[slot] for slot in range(num_slots)]
        assert slots.num_in_use == len(followers)
    for grammar in running:
        slots.leave(grammar)
    assert slots.num_followers == [0] * num_slots
    assert not slots.num_in_use
    assert slots.have_room_for(GRAMMARS[:num_slots])


def test_the_one_that_nobody_has_followed_for_the_longest_time_makes_room() -> None:
    slots, plan = GrammarSlots(2), new_plan()
    for grammar in GRAMMARS[:2]:
        slots.load(plan, grammar)
        slots.follow(grammar)
    slots.leave(GRAMMARS[1])
    slots.leave(GRAMMARS[0])
    plan = new_plan()
    assert slots.load(plan, GRAMMARS[0]) == 0, "it is there still"
    assert (plan.grammar_drops, plan.grammar_loads) == ([], [])
    assert slots.load(plan, GRAMMARS[2]) == 1
    assert plan.grammar_drops == [1]
    assert slots.num_loads == 3
