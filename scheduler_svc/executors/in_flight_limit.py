"""How many steps are kept in flight at one executor: as few as keep it busy.

With `d` steps in flight an executor begins a step every `max(G, (G + C) / d)` seconds. G is the time of a step on the
executor. C is the time from the end of a step until the step that the scheduler sends after its answer arrives: the
round trip, and the scheduler's reaction. So with steps of 10 ms, two in flight hide a round trip of 5 ms; steps of 3 ms
need four.

More steps in flight have a cost. The scheduler learns from the answer that a sequence has stopped, and by then `d - 1`
more rows were computed for it in vain; a new request waits behind the steps in flight. So where outputs are short,
or steps are long beside the link, fewer are better.

`auto` measures all this and takes the smallest number that is within `TOLERANCE` of the best. Pure: time is an
argument.
"""

import statistics
from collections import deque

DEFAULT_LIMIT = 2
MAX_AUTO_LIMIT = 4

# Share of the executor's work that may be lost to have one step less in flight.
TOLERANCE = 0.005
# The link is not always as fast as at best, and a step that arrives late costs more than one that arrives early.
LINK_MARGIN = 1.25

NUM_KEPT_ROUND_TRIPS = 8  # of heartbeats: 8 s with the default lease
NUM_KEPT_STEPS = 15
ANSWERS_BETWEEN_CHOICES = 8
# The limit falls after so many choices in a row for fewer steps; it rises after one.
CHOICES_BEFORE_FEWER = 4
# After each step, the weight that earlier steps keep in the share of rows that end a sequence: about 200 steps count.
DECAY = 0.995
REACTION_WEIGHT = 0.1


class InFlightLimit:
    """Most steps in flight at one executor, from its attachment to its loss. `fixed` None: choose it."""

    def __init__(self, fixed: int | None) -> None:
        self._is_fixed = fixed is not None
        self.limit = fixed or DEFAULT_LIMIT
        self._round_trips_s: deque[float] = deque(maxlen=NUM_KEPT_ROUND_TRIPS)
        self._steps_s: deque[float] = deque(maxlen=NUM_KEPT_STEPS)
        self._reaction_s = 0.0
        self._answered_at_s: float | None = None  # None: a step was sent since
        self._lone_step_sent_at_s: float | None = None  # of the oldest step in flight, if it was sent alone
        self._num_rows = 1.0
        self._num_stops = 0.0
        self._num_answers = 0
        self._num_fewer = 0  # choices in a row that were for fewer steps

    @property
    def round_trip_s(self) -> float | None:
        """The shortest of the last round trips of heartbeats, and of steps that did not wait; None: none yet."""
        return min(self._round_trips_s, default=None)

    def note_round_trip(self, round_trip_s: float) -> None:
        """Note the round trip of a heartbeat."""
        self._round_trips_s.append(round_trip_s)

    def note_sent(self, now_s: float, *, is_alone: bool) -> None:
        """Note that a step is sent; `is_alone`: no other is in flight."""
        if is_alone:
            self._lone_step_sent_at_s = now_s
        if self._answered_at_s is not None:
            if not is_alone:  # after a pause there was nothing to react to
                self._reaction_s += REACTION_WEIGHT * (now_s - self._answered_at_s - self._reaction_s)
            self._answered_at_s = None

    def note_answered(self, now_s: float, execute_s: float, num_rows: int, num_stops: int, num_void_rows: int) -> None:
        """Note that a step was answered.

        Args:
            now_s: The monotonic time.
            execute_s: Its time on the executor.
            num_rows: Its sampled rows.
            num_stops: Sequences that ended by one of these tokens, and not by their length.
            num_void_rows: Rows that were computed for sequences that had ended.
        """
        if self._lone_step_sent_at_s is not None:
            self.note_round_trip(max(0.0, now_s - self._lone_step_sent_at_s - execute_s))
            self._lone_step_sent_at_s = None
        self._answered_at_s = now_s
        self._steps_s.append(execute_s)
        # Stop strings are found in texts: each shows as void rows, one for each step in flight.
        self._num_stops = DECAY * self._num_stops + max(num_stops, num_void_rows / self.limit)
        self._num_rows = DECAY * self._num_rows + num_rows
        self._num_answers += 1
        if not self._is_fixed and self._num_answers % ANSWERS_BETWEEN_CHOICES == 0:
            self._choose()

    def _choose(self) -> None:
        best = self._best()
        self._num_fewer = self._num_fewer + 1 if best < self.limit else 0
        if best > self.limit or self._num_fewer == CHOICES_BEFORE_FEWER:
            self.limit, self._num_fewer = best, 0

    def _best(self) -> int:
        """Return the smallest number that is nearly as good as the best one."""
        round_trip_s = self.round_trip_s
        if round_trip_s is None:
            return self.limit
        step_s = max(1e-6, statistics.median(self._steps_s))
        between_s = LINK_MARGIN * round_trip_s + self._reaction_s
        stop_share = self._num_stops / self._num_rows
        rates = [
            max(0.0, 1 - stop_share * (limit - 1)) / max(step_s, (step_s + between_s) / limit)
            for limit in range(1, MAX_AUTO_LIMIT + 1)
        ]
        return next(limit for limit, rate in enumerate(rates, 1) if rate >= (1 - TOLERANCE) * max(rates))
