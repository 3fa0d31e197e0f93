"""How long requests will take, from the waiting work and the pace of the executors: for deadlines and for `RetryInfo`.

All estimates err towards too little time: steps count as short as the shortest recent ones, all slots count as free
for waiting requests, and an answer that may stop early counts as no longer than earlier answers. Before a step has been
measured there is no estimate.
"""

import math
from collections.abc import Sequence

from octavo_shared.errors import DeadlineTooShortError
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.core.waiting.waiting_work import Work
from scheduler_svc.engine.live_requests import LiveRequests
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.telemetry.meter import Meter

# A request is refused if its estimate is so many times the time that its call has left.
HOPELESS_FACTOR = 2.0

# Bounds of the retry delay that clients are told when the queue is full.
LEAST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0

# In a longer queue no request is told its place, because the cost grows with the queue.
MAX_COUNTED = 1000

# Refused clients are to come back when this part of the queue has gone: there is room, and the queue is not empty.
_RETRY_SHARE = 0.5


class LoadEstimate:
    """Estimates lengths and times of requests."""

    def __init__(self, fleet: Fleet, queue: WaitingQueue, requests: LiveRequests, meter: Meter) -> None:
        self._fleet = fleet
        self._queue = queue
        self._requests = requests
        self._meter = meter

    def expected_len(self, request: EngineRequest, group: SequenceGroup) -> int:
        """Return how many tokens an output of a new request is expected to have."""
        return max(forced_len(request, group), min(_longest_len(group), self._mean_length()))

    def retry_after_s(self) -> float:
        """Return when to try again while the queue is full, in whole seconds."""
        wait_s = self._wait_s(self._queue.work.total)
        if wait_s is None:
            return LEAST_RETRY_S
        return min(LONGEST_RETRY_S, max(LEAST_RETRY_S, math.ceil(_RETRY_SHARE * wait_s)))

    def require_time(self, request: EngineRequest, group: SequenceGroup, time_left_s: float) -> None:
        """Refuse a new request that surely misses its deadline.

        Only tokens that must come count: the first one, and those that it forces by `min_tokens` or `ignore_eos`.

        Raises: DeadlineTooShortError: its estimate is at least HOPELESS_FACTOR times the time that is left.
        """
        begin_s, step_s = self.begin_s(group), self._step_s
        if begin_s is None or step_s is None:
            return
        if begin_s >= HOPELESS_FACTOR * time_left_s:
            raise DeadlineTooShortError("begin in", begin_s, time_left_s)
        total_s = begin_s + step_s * max(0, forced_len(request, group) - 1)
        if total_s >= HOPELESS_FACTOR * time_left_s:
            raise DeadlineTooShortError("take", total_s, time_left_s)

    def begin_s(self, group: SequenceGroup) -> float | None:
        """Return in how many seconds a new group will have its first token; None: no step was measured."""
        wait_s, step_s = self._wait_s(self._queue.work_ahead_of(group)), self._step_s
        if wait_s is None or step_s is None:
            return None
        planners = self._fleet.planners
        if group.num_slots and not any(planner.batch.num_free_slots for planner in planners):
            wait_s += step_s * self._shortest_rest(planners)
        budget = max(planner.limits.max_num_batched_tokens for planner in planners)
        num_tokens = group.num_input_tokens
        if num_tokens <= budget:
            return wait_s + step_s
        num_steps = math.ceil((num_tokens - self._fleet.num_cached_tokens(group)) / budget)
        return wait_s + max(step_s, (num_steps - 1) * self._large_step_s)

    def place_of(self, group: SequenceGroup) -> str:
        """Say where a waiting group stands in line, and when it will have its first token, if that can be known."""
        num_waiting, step_s = len(self._queue), self._step_s
        if num_waiting > MAX_COUNTED:
            return f"among {num_waiting} in line"
        num_ahead = self._queue.num_ahead_of(group)
        place = f"{_ordinal(num_ahead + 1)} in line"
        wait_s = self._wait_s(self._queue.work.total)
        if wait_s is None or step_s is None:
            return place
        wait_s *= num_ahead / num_waiting
        planners = self._fleet.planners
        if not any(planner.batch.num_free_slots for planner in planners):
            wait_s += step_s * self._shortest_rest(planners)
        return f"{place}, about {math.ceil(wait_s + step_s)} s"

    def _wait_s(self, work: Work) -> float | None:
        """Return how long waiting work takes up to its last tokens, in seconds; None: no step was measured."""
        step_s, planners = self._step_s, self._fleet.planners
        if step_s is None:
            return None
        num_steps = work.num_output_tokens / sum(planner.limits.max_num_seqs for planner in planners)
        meter = self._meter
        computed_share = 1.0 - meter.num_hit_tokens / meter.num_prompt_tokens if meter.num_prompt_tokens else 0.0
        num_prompt_tokens = computed_share * work.num_prompt_tokens
        num_large_steps = num_prompt_tokens / sum(planner.limits.max_num_batched_tokens for planner in planners)
        return max(num_steps * step_s, num_large_steps * self._large_step_s)

    @property
    def _step_s(self) -> float | None:
        return min(
            (planner.pace.step_s for planner in self._fleet.planners if planner.pace.step_s is not None), default=None
        )

    @property
    def _large_step_s(self) -> float:
        return min(
            planner.pace.large_step_s for planner in self._fleet.planners if planner.pace.large_step_s is not None
        )

    def _shortest_rest(self, planners: Sequence[ExecutorPlanner]) -> int:
        """Return after how many steps the first running group is expected to end."""
        return min((self._rest(group) for planner in planners for group in planner.batch.with_slots), default=0)

    def _rest(self, group: SequenceGroup) -> int:
        return max(0, group.expected_len - max(end.num_tokens for end in self._requests.of(group).ends))

    def _mean_length(self) -> int:
        """Return the mean length of the last answers; before any has ended, of the running ones so far."""
        lengths = self._requests.latest_lengths or [
            self._requests.of(group).mean_length
            for planner in self._fleet.planners
            for group in planner.batch.with_slots
        ]
        return sum(lengths) // max(1, len(lengths))


def forced_len(request: EngineRequest, group: SequenceGroup) -> int:
    """Return the least tokens of each output of a request."""
    conditions, longest = group.stop_conditions, _longest_len(group)
    may_stop = not conditions.ignore_eos or conditions.stop_token_ids or request.has_stop_strings
    return min(request.sampling.min_tokens, longest) if may_stop else longest


def _longest_len(group: SequenceGroup) -> int:
    assert group.stop_conditions.accepted_len is not None, "it was accepted"
    return group.stop_conditions.accepted_len - group.num_prompt_tokens


def _ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
