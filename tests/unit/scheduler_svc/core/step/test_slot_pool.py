"""Slots of things: shared by equal ones, kept until they are wanted, and never taken from who uses them."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.step.slot_pool import SlotPool, SlotState, Taken


@dataclass(frozen=True)
class Thing:
    digest: bytes


THINGS = [Thing(b"%d" % number) for number in range(6)]


class Executor:
    """What an executor has in its slots; it refuses what executors refuse."""

    def __init__(self, num_slots: int) -> None:
        self.things: list[Thing | None] = [None] * num_slots
        self.loading: set[int] = set()

    def take(self, taken: Taken, thing: Thing, used: set[Thing]) -> None:
        if not taken.is_new:
            return
        former = self.things[taken.slot]
        assert (former is not None) == taken.is_dropped, "an empty slot is dropped, or one is loaded that is not empty"
        assert former not in used, "a slot is dropped that somebody uses"
        assert taken.slot not in self.loading, "a slot is dropped whose load has not ended"
        self.things[taken.slot] = thing


# Each is a step: users that end, then things that are wanted, by number, then loads that end.
_STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9)), st.lists(st.integers(0, 5), max_size=4), st.lists(st.integers(0, 3), max_size=2)
    ),
    max_size=30,
)


@given(st.integers(1, 4), st.booleans(), _STEPS)
def test_who_uses_a_thing_finds_it_ready_whatever_comes_and_goes(
    num_slots: int, tells_loads: bool, steps: list[tuple[list[int], list[int], list[int]]]
) -> None:
    slots, executor = SlotPool[Thing](num_slots, tells_loads=tells_loads), Executor(num_slots)
    running: list[Thing] = []
    for ends, wanted, ended_loads in steps:
        for end in ends:
            if running:
                slots.leave(running.pop(end % len(running)))
        for thing in map(THINGS.__getitem__, wanted):
            loading = {slots.keys[slot] for slot in executor.loading}
            has_room = slots.have_room_for([thing])
            assert has_room == (thing in loading or len({thing, *running, *loading}) <= num_slots)
            if not has_room or thing in loading:
                continue
            taken = slots.take(thing)
            executor.take(taken, thing, set(running))
            assert slots.slot_of(thing) == taken.slot
            if tells_loads and taken.is_new:
                executor.loading.add(taken.slot)
            assert slots.waits_for(thing) == (taken.slot in executor.loading)
            if not slots.waits_for(thing):
                slots.follow(thing)
                running.append(thing)
        for number in ended_loads:
            if number in executor.loading:
                executor.loading.remove(number)
                slots.end_load(number)
        assert executor.things == slots.keys
        assert all(slots.state_of(thing) is SlotState.READY for thing in running)
        followers = Counter(slots.slot_of(thing) for thing in running)
        assert slots.num_followers == [followers[slot] for slot in range(num_slots)]
        assert (slots.num_in_use, slots.num_loading) == (len(followers) + len(executor.loading), len(executor.loading))
    for thing in running:
        slots.leave(thing)
    assert slots.num_followers == [0] * num_slots
    assert slots.num_in_use == len(executor.loading)
    assert slots.have_room_for(THINGS[: num_slots - len(executor.loading)]) or executor.loading


def test_the_one_that_nobody_has_used_for_the_longest_time_makes_room() -> None:
    slots = SlotPool[Thing](2)
    for thing in THINGS[:2]:
        slots.take(thing)
        slots.follow(thing)
    slots.leave(THINGS[1])
    slots.leave(THINGS[0])
    assert slots.take(Thing(THINGS[0].digest)) == Taken(0), "it is there still"
    assert slots.take(THINGS[2]) == Taken(1, is_new=True, is_dropped=True)
    assert slots.num_loads == 3


def test_an_error_of_a_load_stays_with_the_thing_until_its_slot_is_another_ones() -> None:
    slots = SlotPool[Thing](1, tells_loads=True)
    slots.take(THINGS[0])
    assert (slots.state_of(THINGS[0]), slots.error_of(THINGS[0])) == (SlotState.LOADING, "")
    slots.end_load(0, "it is broken")
    assert (slots.state_of(THINGS[0]), slots.error_of(THINGS[0])) == (SlotState.READY, "it is broken")
    slots.take(THINGS[1])
    assert [slots.state_of(thing) for thing in THINGS[:2]] == [SlotState.EMPTY, SlotState.LOADING]
    assert (slots.error_of(THINGS[0]), slots.error_of(THINGS[1])) == ("", "")
