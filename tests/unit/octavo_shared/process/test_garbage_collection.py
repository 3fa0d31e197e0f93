"""When a service looks for cycles."""

from octavo_shared.process.garbage_collection import LONGEST_WAIT_S, SHORTEST_WAIT_S, IdleCollection


class Played:
    """A process whose clock and work the test plays."""

    def __init__(self) -> None:
        self.now_s, self.is_idle, self.num_dropped, self.collected_at_s = 100.0, True, 0, list[float]()
        self.collection = IdleCollection(
            lambda: self.is_idle,
            lambda: self.num_dropped,
            collect=lambda: self.collected_at_s.append(self.now_s),
            clock=lambda: self.now_s,
        )

    def check_at(self, now_s: float) -> None:
        self.now_s = now_s
        self.collection.check()


def test_an_idle_process_collects_and_then_not_for_a_while() -> None:
    played = Played()
    for second in range(101, 131):
        played.check_at(second)
    assert played.collected_at_s == [100 + SHORTEST_WAIT_S * turn for turn in (1, 2, 3)]


def test_a_busy_process_waits_until_it_is_idle() -> None:
    played = Played()
    played.is_idle = False
    played.check_at(100 + LONGEST_WAIT_S - 1)
    assert played.collected_at_s == []
    played.is_idle = True
    played.check_at(100 + LONGEST_WAIT_S - 0.5)
    assert played.collected_at_s == [100 + LONGEST_WAIT_S - 0.5]


def test_a_process_that_is_never_idle_collects_all_the_same() -> None:
    played = Played()
    played.is_idle = False
    for second in range(101, 102 + 2 * round(LONGEST_WAIT_S)):
        played.check_at(second)
    assert played.collected_at_s == [100 + LONGEST_WAIT_S, 100 + 2 * LONGEST_WAIT_S]


def test_a_busy_process_collects_soon_after_something_large_was_dropped() -> None:
    played = Played()
    played.is_idle = False
    for second in range(101, 160):
        if second in (115, 117, 141):
            played.num_dropped += 1
        played.check_at(second)
    assert played.collected_at_s == [115, 125, 141]
