"""The waiting queue: its order, walks over it, and what fair shares mean for requests."""

import pytest

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import FcfsPolicy, PriorityPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from tests.support.waiting import shares_of, take, waiting_group


def queue_of(*groups: SequenceGroup, weights: dict[str, float] | None = None) -> WaitingQueue:
    queue = WaitingQueue(PriorityPolicy(), shares_of(weights))
    for group in groups:
        queue.add(group)
    return queue


def order(queue: WaitingQueue) -> list[str]:
    return [group.request_id for group in queue.in_order()]


def taken(queue: WaitingQueue, num_groups: int) -> list[str]:
    return [take(queue).request_id for _ in range(num_groups)]


# The order ----------------------------------------------------------------------------------------


def test_one_tenant_is_served_by_arrival_whatever_the_order_of_adding() -> None:
    queue = WaitingQueue(FcfsPolicy())
    for arrival in (4, 1, 3, 0, 2):
        queue.add(waiting_group(arrival, priority=-arrival))

    assert order(queue) == ["0", "1", "2", "3", "4"]


def test_a_smaller_priority_goes_first_and_arrival_decides_between_equal_ones() -> None:
    queue = queue_of(*(waiting_group(arrival, priority=priority) for arrival, priority in enumerate([7, 0, -1, 0])))

    assert order(queue) == ["2", "1", "3", "0"]


def test_groups_that_ran_go_before_newcomers_of_their_level_by_arrival() -> None:
    queue = queue_of(
        waiting_group(0, "a"),
        waiting_group(9, "b", has_run=True),
        waiting_group(5, "a", has_run=True),
        waiting_group(3, priority=-1),
        waiting_group(1, priority=1, has_run=True),
    )

    assert order(queue) == ["3", "a5", "b9", "a0", "1"]


def test_the_tenant_with_fewer_tokens_per_weight_goes_first() -> None:
    queue = queue_of(
        waiting_group(0, "a"), waiting_group(1, "b"), waiting_group(2, "c"), weights={"a": 1.0, "b": 10.0, "c": 2.0}
    )
    for tenant, num_tokens in {"a": 40, "b": 50, "c": 60}.items():
        queue.charge(tenant, num_tokens)

    assert order(queue) == ["b1", "c2", "a0"]


def test_tenants_with_equal_counters_are_served_by_arrival() -> None:
    queue = queue_of(waiting_group(2, "a"), waiting_group(1, "b"), waiting_group(3, "c"))

    assert order(queue) == ["b1", "a2", "c3"]


def test_a_walk_that_only_looks_sees_the_order_of_one_that_takes_all() -> None:
    def filled() -> WaitingQueue:
        prompts = [("a", 5), ("a", 1), ("a", 7), ("b", 2), ("b", 2), ("b", 9), ("c", 30), ("c", 1)]
        groups = [waiting_group(number, tenant, num_prompt_tokens=n) for number, (tenant, n) in enumerate(prompts)]
        return queue_of(*groups, weights={"c": 3.0})

    assert order(filled()) == taken(filled(), 8) == ["a0", "b3", "c6", "b4", "b5", "a1", "a2", "c7"]


def test_the_number_ahead_is_the_position_in_the_order() -> None:
    queue = queue_of(
        waiting_group(0, "a", num_prompt_tokens=5),
        waiting_group(1, "a"),
        waiting_group(2, "b", num_prompt_tokens=2),
        waiting_group(3, "b"),
        waiting_group(4, "b", has_run=True),
        waiting_group(5, "a", priority=-2),
        waiting_group(6, "c", priority=3),
    )

    ahead = [queue.num_ahead_of(group) for group in queue.in_order()]

    assert ahead == [0, 1, 2, 3, 4, 5, 6]


# Walks --------------------------------------------------------------------------------------------


def test_a_walk_goes_on_after_each_group_was_removed() -> None:
    queue = queue_of(*(waiting_group(arrival, "ab"[arrival % 2], priority=arrival // 4) for arrival in range(8)))

    walked = []
    for group in queue.in_order():
        queue.remove(group)
        walked.append(group.arrival)

    assert walked == list(range(8))
    assert len(queue) == 0


def test_a_walk_that_removes_and_charges_alternates_between_tenants() -> None:
    queue = queue_of(
        *(waiting_group(n, "a", num_prompt_tokens=3) for n in range(3)), *(waiting_group(n, "b") for n in (3, 4, 5))
    )

    walked = []
    for group in queue.in_order():
        queue.remove(group)
        queue.charge(group.tenant, 10)
        walked.append(group.request_id)

    assert walked == ["a0", "b3", "a1", "b4", "a2", "b5"]


def test_a_group_that_is_removed_before_its_turn_is_not_yielded() -> None:
    groups = [waiting_group(arrival, priority=arrival // 2) for arrival in range(4)]
    queue = queue_of(*groups)

    walk = queue.in_order()
    first = next(walk)
    queue.remove(groups[1])
    queue.remove(groups[2])

    assert [first, *walk] == [groups[0], groups[3]]


def test_a_walk_that_leaves_groups_behind_changes_nothing() -> None:
    queue = queue_of(*(waiting_group(arrival, "ab"[arrival % 2]) for arrival in range(6)))
    before = order(queue)

    list(queue.in_order())

    assert order(queue) == before


def test_a_level_that_empties_during_a_walk_and_fills_again_is_served() -> None:
    queue = queue_of(waiting_group(0), waiting_group(1, priority=1))
    walk = queue.in_order()
    queue.remove(next(walk))
    queue.add(waiting_group(2))

    assert [group.arrival for group in walk] == [2, 1]


def test_a_preempted_group_may_come_back_during_a_walk() -> None:
    queue = queue_of(waiting_group(0), waiting_group(1))
    walk = queue.in_order()
    first = next(walk)
    queue.remove(first)
    first.has_run = True
    queue.add(first)

    assert [group.arrival for group in walk] == [1]
    assert order(queue) == ["0", "1"]


def test_an_empty_queue_has_nobody_to_admit() -> None:
    assert list(WaitingQueue(FcfsPolicy()).in_order()) == []


def test_a_held_group_uses_up_its_tenants_turn_until_it_is_taken_out() -> None:
    queue = queue_of(
        waiting_group(0, "a", num_prompt_tokens=10), waiting_group(1, "a"), waiting_group(2, "b", num_prompt_tokens=5)
    )
    first = queue.first_turn()
    assert first is not None
    queue.hold(first.group)
    following = queue.first_turn()
    assert following is not None
    assert following.group.request_id == "b2", "as if the prompt of a0 had been computed"

    queue.remove(first.group)  # found in the prefix cache: nothing is charged

    following = queue.first_turn()
    assert following is not None
    assert following.group.request_id == "a1"


# Books --------------------------------------------------------------------------------------------


def test_the_queue_counts_and_knows_its_groups() -> None:
    groups = [waiting_group(1, "a"), waiting_group(0, "a", has_run=True), waiting_group(2, "b")]
    queue = queue_of(*groups)

    queue.remove(groups[2])

    assert list(queue) == groups[:2]
    assert len(queue) == 2
    assert [group in queue for group in groups] == [True, True, False]
    assert [queue.num_waiting_of(tenant) for tenant in ("a", "b", "nobody")] == [2, 0, 0]


def test_a_queue_that_emptied_keeps_no_trace_of_its_groups() -> None:
    queue = queue_of(*(waiting_group(n, f"{n}", priority=n, has_run=n % 2 == 0) for n in range(8)))

    taken(queue, 8)

    assert [len(books) for books in (queue._places, queue._levels, queue._level_numbers, queue._num_waiting_of)] == [
        0
    ] * 4


def test_another_group_of_the_same_arrival_is_not_in_the_queue() -> None:
    queue = queue_of(waiting_group(0))

    assert waiting_group(0) not in queue
    assert "0" not in queue


def test_has_run_may_be_set_before_the_group_is_removed() -> None:
    group, other = waiting_group(0, "a"), waiting_group(1, "a")
    queue = queue_of(group, other)

    group.has_run = True
    queue.remove(group)

    assert order(queue) == ["a1"]


def test_a_group_cannot_be_queued_twice() -> None:
    group = waiting_group(0)
    queue = queue_of(group)

    with pytest.raises(AssertionError, match="arrival 0 waits already"):
        queue.add(group)


@pytest.mark.parametrize("question", [WaitingQueue.remove, WaitingQueue.num_ahead_of])
def test_a_group_that_does_not_wait_is_a_broken_invariant(question: object) -> None:
    assert callable(question)
    with pytest.raises(AssertionError, match="arrival 1 does not wait"):
        question(queue_of(waiting_group(0)), waiting_group(1))


# Fair shares --------------------------------------------------------------------------------------


def test_weights_are_shares_of_the_tokens() -> None:
    queue = queue_of(
        *(waiting_group(n, "a", num_prompt_tokens=10) for n in range(20)),
        *(waiting_group(n, "b", num_prompt_tokens=10) for n in range(20, 40)),
        weights={"a": 1.0, "b": 3.0},
    )

    served = [request_id[0] for request_id in taken(queue, 20)]

    assert (served.count("a"), served.count("b")) == (5, 15)


def test_a_burst_delays_the_next_request_of_another_tenant_by_one_request() -> None:
    queue = queue_of(*(waiting_group(n, "burst", num_prompt_tokens=50) for n in range(1000)))
    taken(queue, 100)

    queue.add(waiting_group(1000, "late", num_prompt_tokens=50))

    assert taken(queue, 3) == ["burst100", "late1000", "burst101"]


def test_an_idle_tenant_gathers_no_credit() -> None:
    queue = queue_of(waiting_group(0, "idle"), *(waiting_group(n, "busy") for n in range(1, 1000)))
    taken(queue, 500)

    for arrival in range(1000, 1100):
        queue.add(waiting_group(arrival, "idle"))

    served = [request_id[:4] for request_id in taken(queue, 100)]
    assert (served.count("idle"), served.count("busy")) == (50, 50)


def test_a_tenant_that_runs_slowly_and_waits_for_nothing_gathers_no_credit() -> None:
    queue = queue_of(*(waiting_group(n, "busy") for n in range(100)), waiting_group(100, "slow"))
    taken(queue, 2)
    for _ in range(1000):
        queue.charge("busy", 255)
        queue.charge("slow", 1)

    for arrival in range(101, 150):
        queue.add(waiting_group(arrival, "slow"))

    served = [request_id[:4] for request_id in taken(queue, 40)]
    assert (served.count("slow"), served.count("busy")) == (20, 20)


def test_a_tenant_cannot_reset_its_counter_by_leaving() -> None:
    queue = queue_of(waiting_group(0, "greedy"), waiting_group(1, "a", num_prompt_tokens=100), waiting_group(2, "a"))
    assert take(queue, num_tokens=150).request_id == "greedy0"

    queue.add(waiting_group(3, "greedy"))

    assert taken(queue, 3) == ["a1", "a2", "greedy3"]
