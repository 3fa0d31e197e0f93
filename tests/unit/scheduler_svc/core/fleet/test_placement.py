"""One go through the line: what a group costs where, and what is left for those behind it."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from octavo_shared.step_wire.step import Adapter
from scheduler_svc.core.fleet.capacity import EXPECTED_OUTPUT_TOKENS
from scheduler_svc.core.fleet.inbox import Assignment, Inbox
from scheduler_svc.core.fleet.placement import ADAPTER_LOAD_TOKENS, Offer, Placement
from scheduler_svc.core.limits import CoreLimits, PoolLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.core.waiting.waiting_queue import Turn
from tests.support.driving import group, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.fleet_driving import FleetBench
from tests.support.toy_executor import ToyExecutor, content_of, count_up


def turn_of(waiting: SequenceGroup) -> Turn:
    return Turn(0, 0.0, not waiting.has_run, waiting.arrival, waiting)


def placement_of(bench: FleetBench, server: Inbox | None = None) -> Placement:
    dispatcher = bench.fleet.dispatcher
    return Placement(dispatcher.takers(), dispatcher.holders, server, -math.inf)


def offered(placement: Placement, waiting: SequenceGroup) -> Offer:
    offer = placement.choose(turn_of(waiting))
    assert isinstance(offer, Offer)
    return offer


def cost_of(bench: FleetBench, newcomer: SequenceGroup) -> int:
    offer = offered(placement_of(bench, bench.fleet.dispatcher.inboxes[0]), newcomer)
    return offer.placed.cost


@each_row(([1, 2, 3, 4, 5, 6], 2), ([1, 2, 3, 4], 4), ([1, 2, 3, 9, 5], 5))
def test_a_cached_prefix_is_free_of_cost_but_for_the_last_token(prompt: list[int], cost: int) -> None:
    bench = FleetBench(small_limits(prefix_caching=True))
    bench.add(group(0, [1, 2, 3, 4, 5], max_tokens(1)))
    bench.run()

    assert cost_of(bench, group(1, prompt)) == cost


def test_decodes_and_prefills_of_others_are_added() -> None:
    bench = FleetBench(small_limits(budget=8))
    [member] = bench.members
    bench.add(group(0, 2, num_sequences=2))
    bench.step(member)
    bench.process(member)
    bench.add(group(1, 16))
    bench.step(member)  # computes 6 of its tokens: one is that of its slot

    assert cost_of(bench, group(2, 3, max_tokens(1))) == 3 + 10 + 3 + 5 + 3 * 1
    assert cost_of(bench, group(2, 3, max_tokens(16))) == 3 + 10 + 3 + 5 + 3 * 16, "each of the three, with each token"
    assert cost_of(bench, group(2, 3)) == 3 + 10 + 3 + 5 + 3 * EXPECTED_OUTPUT_TOKENS
    member.planner.step_cost.row_tokens = 0.5
    assert cost_of(bench, group(2, 3, max_tokens(16))) == 3 + 10 + 3 + 5 + 3 * 8


def test_what_was_dispatched_counts_for_the_next_one() -> None:
    bench = FleetBench(small_limits(blocks=24), small_limits())
    large, small = (member.planner for member in bench.members)
    placement = placement_of(bench)
    places = []
    for arrival, num_prompt_tokens in enumerate([5, 2, 2, 2]):
        offer = offered(placement, group(arrival, num_prompt_tokens))
        placement.give(offer)
        places.append(offer.capacity.planner)

    assert places == [large, small, small, large], "of equal loads the one with more free blocks"


@pytest.mark.parametrize(
    ("limits", "num_prompt_tokens", "num_taken"),
    [
        pytest.param(small_limits(max_num_seqs=3), 2, 3, id="slots"),
        pytest.param(small_limits(budget=8, blocks=24), 4, 2, id="the budget of a step"),
        pytest.param(small_limits(max_num_seqs=16, budget=64, blocks=9), 8, 4, id="blocks, less the watermark"),
        pytest.param(small_limits(long_prefill_threshold=2), 4, 1, id="long prefills"),
    ],
)
def test_a_core_gets_what_its_next_step_can_admit(limits: CoreLimits, num_prompt_tokens: int, num_taken: int) -> None:
    bench = FleetBench(limits)
    placement = placement_of(bench)
    num_dispatched = 0
    while isinstance(offer := placement.choose(turn_of(group(num_dispatched, num_prompt_tokens))), Offer):
        placement.give(offer)
        num_dispatched += 1

    assert num_dispatched == num_taken
    assert offer is (Wait.SKIPPED if limits.long_prefill_threshold else Wait.IN_LINE)


def test_a_group_may_have_the_whole_pool_once_what_was_dispatched_before_is_taken_back() -> None:
    bench = FleetBench(small_limits(blocks=6, watermark=0.01))
    [inbox] = bench.fleet.dispatcher.inboxes
    whole = group(1, 22)
    placement = placement_of(bench)
    assert isinstance(placement.choose(turn_of(whole)), Offer), (
        "no watermark is kept from whoever has the pool for itself"
    )
    placement.give(offered(placement, group(0, 3)))
    assert placement.choose(turn_of(whole)) is Wait.IN_LINE

    placement.take_back(inbox, 0)

    assert isinstance(placement.choose(turn_of(whole)), Offer)


def test_a_deeper_prefix_beats_a_smaller_load_only_if_less_is_to_be_computed() -> None:
    limits = small_limits(prefix_caching=True, max_num_seqs=8, budget=64, blocks=60)
    bench = FleetBench(limits, limits, limits)
    warm, idle, _ = bench.members
    bench.add(group(0, list(range(12)), max_tokens(1)))
    bench.step(warm)
    bench.run()
    bench.add(group(1, [90] * 5))
    bench.step(warm)
    bench.process(warm)  # one decodes there

    once = max_tokens(1)
    assert offered(placement_of(bench), group(2, [*range(12), 1], once)).capacity.planner is warm.planner
    assert offered(placement_of(bench), group(3, [*range(4), 1], once)).capacity.planner is warm.planner
    assert offered(placement_of(bench), group(4, [5, *range(4)], once)).capacity.planner is not warm.planner
    assert idle.planner.load == 0


@each_row(True, False)
def test_a_cached_block_that_nobody_uses_is_one_of_the_free_ones(is_used: bool) -> None:
    bench = FleetBench(small_limits(prefix_caching=True, blocks=6))
    [member] = bench.members
    bench.add(group(0, list(range(9)), None if is_used else max_tokens(1)))
    bench.step(member)
    bench.process(member)
    if not is_used:
        bench.run()
        bench.add(group(1, [50] * 9))
        bench.step(member)
        bench.process(member)

    # 3 of its 5 blocks are new, and 3 are free: two of these are the ones that it finds, if nobody uses them.
    offer = placement_of(bench).choose(turn_of(group(2, [*range(8), *range(70, 79)])))
    assert isinstance(offer, Offer) if is_used else offer is Wait.IN_LINE


def test_what_a_window_left_in_the_cache_counts_where_the_first_blocks_are_gone() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7]
    bench = FleetBench(
        small_limits(sliding_window=3, block_size=1, blocks=8, budget=4, max_model_len=8, prefix_caching=True)
    )
    [member] = bench.members
    bench.add(group(0, prompt[:6], max_tokens(1)))
    bench.run()
    bench.add(group(1, [9, 8], max_tokens(5)))
    for _ in range(4):  # it takes the blocks of the first tokens
        bench.turn()
    waiting = group(2, prompt, max_tokens(1))

    placement = placement_of(bench, bench.fleet.dispatcher.inboxes[0])
    offer = placement.choose(turn_of(waiting))  # it needs 4 blocks, 5 are free; 7 from the beginning

    assert isinstance(offer, Offer)
    bench.add(waiting)
    bench.step(member)
    assert waiting in member.planner.batch.running


def test_what_a_lost_core_had_cached_is_not_looked_for_on_the_next_one() -> None:
    limits = small_limits(prefix_caching=True)
    bench = FleetBench(limits)
    bench.add(group(0, [1, 2, 3, 4, 5], max_tokens(1)))
    bench.run()
    bench.lose(bench.members[0])
    bench.attach(limits)

    assert cost_of(bench, group(1, [1, 2, 3, 4, 5, 6])) == 6
    assert not bench.fleet.dispatcher.holders.holders_of


def test_a_group_is_not_dispatched_to_the_core_it_was_lost_on_while_another_one_could_take_it() -> None:
    bench = FleetBench()
    for name, limits in (("a", small_limits()), ("b", small_limits(max_num_seqs=1))):
        bench.join(limits, ToyExecutor(limits, count_up), name)
    lost = group(0, 2)
    lost.lost_on = "a"
    placement = placement_of(bench)
    offer = offered(placement, lost)
    assert offer.capacity.planner.name == "b"
    placement.give(offer)
    another = group(1, 2)
    another.lost_on = "a"
    assert placement.choose(turn_of(another)) is Wait.SKIPPED, "it waits for the other core"
    wide = group(2, 2, num_sequences=2)
    wide.lost_on = "a"
    assert offered(placement, wide).capacity.planner.name == "a", "the other one could never take it"


# Several cache groups -------------------------------------------------------------------------------


def with_window(window_blocks: int, window: int = 6, budget: int = 99) -> CoreLimits:
    limits = small_limits(max_num_seqs=8, blocks=24, budget=budget, prefix_caching=True)
    return replace(limits, more_groups=(PoolLimits(window_blocks, window),))


def test_a_cache_group_without_a_free_block_keeps_out_as_the_first_one_does() -> None:
    bench = FleetBench(with_window(6), with_window(8))
    placement, places = placement_of(bench), Counter[int]()
    while isinstance(offer := placement.choose(turn_of(group(places.total(), 8))), Offer):
        placement.give(offer)
        places[offer.capacity.number] += 1

    assert offer is Wait.IN_LINE
    assert places == {0: 3, 1: 4}


def test_what_is_dispatched_and_taken_back_counts_in_each_cache_group() -> None:
    bench = FleetBench(with_window(6))
    placement, [inbox] = placement_of(bench), bench.fleet.dispatcher.inboxes
    for arrival in range(3):
        placement.give(offered(placement, group(arrival, 8)))
    assert inbox.num_blocks == [6, 6]
    assert placement.choose(turn_of(group(3, 8))) is Wait.IN_LINE

    placement.take_back(inbox, 2)

    assert inbox.num_blocks == [4, 4]
    offered(placement, group(3, 8))


def test_a_cached_prefix_saves_in_each_cache_group_what_it_has_of_it() -> None:
    bench = FleetBench(with_window(8, budget=8))
    bench.add(group(0, 20, max_tokens(1)))
    bench.run()

    offer = offered(placement_of(bench), group(0, 20))

    assert offer.placed.num_cached_tokens == 16
    assert offer.assignment.num_blocks == (1, 1), "of 5 blocks, and of the 4 that a window and a chunk take"

    [member] = bench.members
    window = member.planner.blocks.groups[1].allocator
    window.allocate(window.num_free_blocks - 3)
    offered(placement_of(bench), group(0, 20))  # of the last 3 it has 2, and needs one


def test_explanations_name_the_cache_group() -> None:
    bench = FleetBench(with_window(6))
    [member] = bench.members
    window = member.planner.blocks.groups[1].allocator
    window.allocate(5)

    [(_, obstacle)] = bench.fleet.obstacles(group(0, 8), 0.0)

    assert obstacle == Obstacle(Wait.IN_LINE, "needs 2 blocks of cache group 1 (window of 6 tokens), 1 free")


def test_a_group_goes_where_its_adapter_is_loaded_unless_far_more_is_to_be_computed_there() -> None:
    limits = small_limits(max_num_seqs=9, budget=999, blocks=999, max_model_len=999, adapter_slots=1)
    bench = FleetBench(limits)
    one = Adapter("one", content_of(Adapter("one")))
    bench.add(group(0, 2, max_tokens(1), adapter=one))
    bench.run()
    holder, other = bench.members[0], bench.attach(limits)
    inbox = bench.fleet.dispatcher.inboxes[0]
    for num_ahead, chosen in ((ADAPTER_LOAD_TOKENS - 2, holder), (ADAPTER_LOAD_TOKENS + 2, other)):
        inbox.put(Assignment(turn_of(group(1, 2)), 0, (0,), num_ahead, is_long=False))
        assert offered(placement_of(bench), group(2, 2, adapter=one)).capacity.planner is chosen.planner
        inbox.take(0)


def test_who_waited_for_a_load_goes_where_it_ended_whoever_decides_next() -> None:
    bench = FleetBench(*[small_limits(adapter_slots=1)] * 2)
    first, second = bench.members
    bench.add(group(0, 2, max_tokens(1), adapter=Adapter("one", content_of(Adapter("one")))))
    while not first.planner.batch.things.adapters.num_loads or first.planner.batch.things.num_loading:
        bench.step(first)
        bench.process(first)
    bench.step(second)
    bench.run()
    assert not bench.groups[0].live_sequences
    assert not second.planner.batch.things.adapters.num_loads
