"""Where requests of a cell run: the same place on every front, within the bound, and few move when a place comes."""

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.link.engines_in_use import LOAD_BOUND, choose_place, prefix_of
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.parameters import StopConditions


@dataclass
class Engine:
    """A place."""

    scheduler_id: str
    num_slots: int = 64
    num_taken: int = 0


def engines(number: int) -> list[Engine]:
    """Return so many places without load."""
    return [Engine(f"scheduler-{index}") for index in range(number)]


@given(
    slots=st.lists(st.integers(1, 64), min_size=1, max_size=5),
    num_prefixes=st.integers(1, 50),
    num_requests=st.integers(1, 200),
    data=st.data(),
)
def test_no_place_has_more_than_its_bound_while_all_others_have_less(
    slots: list[int], num_prefixes: int, num_requests: int, data: st.DataObject
) -> None:
    places = [Engine(str(index), number) for index, number in enumerate(slots)]
    for request in range(num_requests):
        chosen = choose_place(b"%d" % (request % num_prefixes), 1, places)
        total, share = 1 + sum(place.num_taken for place in places), chosen.num_slots / sum(slots)
        is_free = chosen.num_taken < chosen.num_slots
        assert is_free or all(place.num_taken >= place.num_slots for place in places)
        within = chosen.num_taken + 1 <= max(1, LOAD_BOUND * total * share)
        others = [place for place in places if place.num_taken < place.num_slots or not is_free]
        least = min((place.num_taken + 1) / place.num_slots for place in others)
        assert within or (chosen.num_taken + 1) / chosen.num_slots == least
        chosen.num_taken += 1
        for place in places if data.draw(st.booleans()) else ():
            place.num_taken -= data.draw(st.integers(0, place.num_taken))


def test_one_prefix_fills_all_places_and_stays_at_one_while_it_is_alone() -> None:
    places = engines(3)
    for _ in range(150):
        choose_place(b"the system prompt", 1, places).num_taken += 1
    assert max(place.num_taken for place in places) <= LOAD_BOUND * 50 + 1
    assert {choose_place(b"a chat", 1, engines(3)).scheduler_id for _ in range(20)} == {
        choose_place(b"a chat", 1, list(reversed(engines(3)))).scheduler_id
    }


@given(order=st.randoms(use_true_random=False))
def test_fronts_that_hear_late_of_each_other_give_no_place_more_than_a_quarter_above_its_share(order: Random) -> None:
    truth = [0, 0]
    fronts = [engines(2) for _ in range(3)]
    for number in range(200):
        chosen = choose_place(b"the system prompt", 1, view := order.choice(fronts))
        chosen.num_taken += 1
        truth[view.index(chosen)] += 1
        for place, true in enumerate(truth):
            for front, engine in enumerate(fronts):
                if (number + 7 * place + 3 * front) % 20 == 0:  # of 400 requests a second, what comes in 0.05 s
                    engine[place].num_taken = true
    assert max(truth) <= 1.25 * 100


def test_a_place_that_comes_takes_its_share_and_nobody_else_moves() -> None:
    prefixes = [b"%d" % number for number in range(1000)]
    before = [choose_place(prefix, 1, engines(3)).scheduler_id for prefix in prefixes]
    after = [choose_place(prefix, 1, engines(4)).scheduler_id for prefix in prefixes]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"scheduler-3"}
    assert 200 < len(moved) < 300
    assert all(280 < number < 390 for number in Counter(before).values())


def test_what_can_share_blocks_has_one_prefix() -> None:
    prompt = np.arange(200, dtype=np.int32)
    request = EngineRequest("r", prompt, SamplingRow(), StopConditions(), tenant="red")
    same = [
        replace(request, request_id="other"),
        replace(request, prompt_token_ids=np.concatenate([prompt[:64], prompt[:7]])),
    ]
    others = [
        replace(request, tenant="blue"),
        replace(request, cache_salt=7),
        replace(request, prompt_token_ids=prompt[1:]),
        replace(request, prompt_token_ids=prompt[:40]),
    ]
    assert {prefix_of(one, 16) for one in same} == {prefix_of(request, 16)}
    assert len({prefix_of(one, 16) for one in (request, *others)}) == 5
    assert prefix_of(replace(request, prompt_token_ids=prompt[:40]), 16) == prefix_of(
        replace(request, prompt_token_ids=prompt[:33]), 16
    )
