"""The waiting queue: its order, walks over it, and what fair shares mean for requests."""

import pytest

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import PriorityPolicy
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


def test_a_queue_that_emptied_keeps_no_trace_of_its_groups() -> None:
    queue = queue_of(*(waiting_group(n, f"{n}", priority=n, has_run=n % 2 == 0) for n in range(8)))

    taken(queue, 8)

    assert [len(books) for books in (queue._places, queue._levels, queue._level_numbers, queue._num_waiting_of)] == [
        0
    ] * 4


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
