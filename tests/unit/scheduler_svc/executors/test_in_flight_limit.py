"""How many steps are kept in flight: played on a virtual executor and link, in virtual time."""

from collections import deque
from dataclasses import dataclass

import pytest

from scheduler_svc.executors.in_flight_limit import InFlightLimit
from tests.support.each_row import each_row

REACTION_S = 0.0003


@dataclass(frozen=True)
class Link:
    """A virtual executor: what a step and the way there and back take, and how many sequences end in a step."""

    step_ms: float
    round_trip_ms: float
    stops_per_step: float = 0.0
    num_rows: int = 32


class Play:
    """Sends and answers steps as the driver does."""

    def __init__(self, limit: InFlightLimit) -> None:
        self.limit = limit
        self.now_s = 0.0
        self.executor_free_at_s = 0.0
        self.busy_s = 0.0
        self.in_flight: deque[tuple[float, int]] = deque()
        self.num_stops = 0.0

    def run(self, link: Link, num_steps: int) -> float:
        """Answer so many steps; return the idle share of the executor in the last half of them."""
        for number in range(num_steps):
            if number == num_steps // 2:
                begin_s, self.busy_s = self.executor_free_at_s, 0.0
            while len(self.in_flight) < self.limit.limit:
                self.limit.note_sent(self.now_s, is_alone=not self.in_flight)
                begins_at_s = max(self.executor_free_at_s, self.now_s + link.round_trip_ms / 2000)
                self.executor_free_at_s = begins_at_s + link.step_ms / 1000
                self.busy_s += link.step_ms / 1000
                self.in_flight.append((self.executor_free_at_s + link.round_trip_ms / 2000, len(self.in_flight)))
            answered_at_s, num_before = self.in_flight.popleft()
            self.num_stops += link.stops_per_step
            num_stops, self.num_stops = int(self.num_stops), self.num_stops % 1
            void = num_stops * num_before
            self.limit.note_answered(answered_at_s, link.step_ms / 1000, link.num_rows, num_stops, void)
            self.now_s = answered_at_s + REACTION_S
        return 1 - self.busy_s / (self.executor_free_at_s - begin_s)


@each_row(
    (Link(step_ms=10, round_trip_ms=0.5), 2),
    (Link(step_ms=10, round_trip_ms=5), 2),
    (Link(step_ms=3, round_trip_ms=1), 2),
    (Link(step_ms=3, round_trip_ms=5), 4),
    (Link(step_ms=5, round_trip_ms=5), 3),
    (Link(step_ms=1, round_trip_ms=50), 4),  # more would help; it is the most
    (Link(step_ms=500, round_trip_ms=0.5), 1),  # a request that comes waits for one long step, not for two
    (Link(step_ms=10, round_trip_ms=0.5, stops_per_step=16), 1),  # outputs of two tokens
    (Link(step_ms=3, round_trip_ms=5, stops_per_step=3.2), 3),  # outputs of ten tokens: the fourth is not worth it
    (Link(step_ms=3, round_trip_ms=5, stops_per_step=0.16), 4),  # outputs of 200 tokens
)
def test_it_is_the_smallest_number_that_keeps_the_executor_busy(link: Link, expected: int) -> None:
    limit = InFlightLimit(None)
    idle = Play(limit).run(link, 400)
    assert limit.limit == expected
    if expected > 1 and not link.stops_per_step and link.round_trip_ms <= 5:
        assert idle < 0.005


def test_one_that_was_set_stays() -> None:
    limit = InFlightLimit(3)
    Play(limit).run(Link(step_ms=1, round_trip_ms=50), 100)
    assert limit.limit == 3


def test_more_come_at_once_and_fewer_only_when_that_lasts() -> None:
    limit, slow, fast = InFlightLimit(None), Link(step_ms=3, round_trip_ms=5), Link(step_ms=20, round_trip_ms=5)
    play = Play(limit)
    play.run(slow, 8)
    assert limit.limit == 4
    play.run(fast, 24)  # a few long steps, such as prompts
    assert limit.limit == 4
    play.run(fast, 40)
    assert limit.limit == 2


def test_heartbeats_tell_of_a_link_that_became_fast_while_the_executor_is_busy() -> None:
    limit = InFlightLimit(None)
    play = Play(limit)
    play.run(Link(step_ms=3, round_trip_ms=5), 100)
    assert limit.limit == 4
    limit.note_round_trip(0.0005)
    play.run(Link(step_ms=3, round_trip_ms=0.5), 100)
    assert limit.limit == 2
    for _ in range(8):
        limit.note_round_trip(0.005)
    play.run(Link(step_ms=3, round_trip_ms=5), 100)
    assert limit.limit == 4
    assert limit.round_trip_s == pytest.approx(0.005)


def test_it_stays_as_it_is_before_anything_is_known() -> None:
    assert InFlightLimit(None).limit == 2
    assert InFlightLimit(None).round_trip_s is None
