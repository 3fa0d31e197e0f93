"""Requests, and one way of many to run them: the real core and any worker, joined by the wire encoding.

What a client gets must not depend on the way. Tests play the same requests by different schedules and
compare what came out, bit for bit: `tests/property/test_invariance.py` on the fake executor,
`tests/e2e/test_invariance.py` on real models. `tests/e2e/test_beam_oracle.py` compares with transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from executor_svc.worker.interface import Worker
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import NO_LOGPROBS, Adapter, SamplingRow, Step
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.executors.serving_limits import PlannerSettings, serving_limits
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from tests.support.fleet import FoundHypothesis, Member, Outcome, Output, VirtualFleet, WiredWorker

MAX_ROUNDS = 5000
GREEDY = SamplingRow(num_logprobs=0)


@dataclass(frozen=True)
class Request:
    """What a client asks for. With `stop_string_at` tokens the text of an output holds a stop string; None: never."""

    prompt: Sequence[int]
    conditions: StopConditions
    sampling: SamplingRow = GREEDY
    num_sequences: int = 1
    beam_search: BeamSearchParams | None = None
    cache_salt: int = 0
    token_rules: TokenRules | None = None
    num_prompt_logprobs: int = NO_LOGPROBS
    stop_string_at: int | None = None
    adapter: Adapter | None = None
    encoder_prompt: Sequence[int] | None = None

    def to_group(self, arrival: int) -> SequenceGroup:
        """Return the request as the scheduler takes it."""
        return SequenceGroup(
            f"r{arrival}",
            np.array(self.prompt, np.int32),
            self.sampling,
            self.conditions,
            arrival,
            self.num_sequences,
            self.beam_search,
            cache_salt=self.cache_salt,
            token_rules=self.token_rules,
            num_prompt_logprobs=self.num_prompt_logprobs,
            adapter=self.adapter,
            encoder_token_ids=None if self.encoder_prompt is None else np.array(self.encoder_prompt, np.int32),
        )


@dataclass(frozen=True)
class Schedule:
    """Everything that may differ between two runs of the same requests; times in rounds of the play.

    Request i arrives in round `arrival_rounds[i]`, or at once where there is none; the client of
    request i leaves in round `abort_rounds[i]`. In `loss_round` the executor is lost and another one joins.
    The scheduler is told of so many blocks; the worker may have more. With `uses_groups` its cache groups are used, as
    it tells them; else all its layers share a block table.
    """

    num_blocks: int
    num_host_blocks: int = 0
    settings: PlannerSettings = field(default_factory=PlannerSettings)
    num_steps_in_flight: int = 1
    arrival_rounds: Sequence[int] = ()
    abort_rounds: Mapping[int, int] = field(default_factory=dict)
    loss_round: int | None = None
    uses_groups: bool = False

    def limits(self, info: ExecutorInfo) -> CoreLimits:
        """Return what the scheduler keeps to on such an executor."""
        pools = replace(info, num_device_blocks=self.num_blocks, num_host_blocks=self.num_host_blocks, cache_groups=())
        if self.uses_groups:
            pools = info
        return serving_limits(pools, self.settings)

    def arrives(self, arrival: int, now: int) -> bool:
        """Return whether the request comes in this round."""
        return now == (self.arrival_rounds[arrival] if arrival < len(self.arrival_rounds) else 0)


@dataclass(frozen=True)
class Preempted:
    """A group lost its place after so many tokens of its longest output, prompt excluded."""

    arrival: int
    mode: PreemptionMode
    num_output_tokens: int


class Play:
    """One run of requests by a schedule, from the first arrival until nothing is left.

    Args:
        schedule: The way to run them.
        requests: Their arrival numbers are their places here.
        make_worker: Makes, or empties, the worker of each executor that joins.
    """

    def __init__(self, schedule: Schedule, requests: Sequence[Request], make_worker: Callable[[], Worker]) -> None:
        self.schedule = schedule
        self.fleet = VirtualFleet()
        self.preemptions: list[Preempted] = []
        self.num_rounds = 0
        self._make_worker = make_worker
        self._groups = [request.to_group(arrival) for arrival, request in enumerate(requests)]
        self.fleet.stop_lengths = {
            (arrival, index): request.stop_string_at
            for arrival, request in enumerate(requests)
            for index in range(request.num_sequences)
            if request.stop_string_at is not None
        }
        self._member = self._join()

    @property
    def outputs(self) -> dict[tuple[int, int], Output]:
        """What clients got, by arrival and output index."""
        return self.fleet.outputs

    @property
    def searches(self) -> dict[int, list[FoundHypothesis]]:
        """What the searches found, by arrival."""
        return self.fleet.searches

    def outcome_of(self, arrival: int) -> Outcome:
        """Return what the client of this request got."""
        return self.fleet.outcome_of(arrival)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache, all groups together."""
        return sum(group.num_cached_tokens for group in self._groups)

    def run(self) -> "Play":
        """Play to the end, and check that nothing is left behind."""
        while not self._is_over():
            assert self.num_rounds < MAX_ROUNDS, "the requests do not end"
            self._begin_round(self.num_rounds)
            self._send()
            if self._member.results:
                self.fleet.process(self._member)
            self.num_rounds += 1
        self._send()  # the slots of the last ones are released by one step more
        assert not self.fleet.failures
        self.fleet.check_all_is_free()
        return self

    def _is_over(self) -> bool:
        last_arrival = max(self.schedule.arrival_rounds, default=0)
        return (
            self.num_rounds > last_arrival
            and not self._member.results
            and not any(self.fleet.is_live(group) for group in self._groups)
        )

    def _begin_round(self, now: int) -> None:
        for arrival, group in enumerate(self._groups):
            if self.schedule.arrives(arrival, now):
                assert self._member.planner.admissions.can_ever_admit(group), self._member.planner.admissions.why_never(
                    group
                )
                self.fleet.add(group)
            leaves = self.schedule.abort_rounds.get(arrival) == now
            if leaves and arrival in self.fleet.groups and self.fleet.is_live(group):
                self.fleet.abort(group)
        if now == self.schedule.loss_round:
            self.fleet.lose(self._member)
            self._member = self._join()

    def _join(self) -> Member:
        worker = self._make_worker()
        if self.schedule.uses_groups:
            worker.reset(uses_groups=True)
        return self.fleet.join(self.schedule.limits(worker.info), WiredWorker(worker))

    def _send(self) -> None:
        member = self._member
        while len(member.planner.in_flight) < self.schedule.num_steps_in_flight:
            counts = [group.num_preemptions for group in self._groups]
            step: Step | None = self.fleet.schedule(member, float(self.num_rounds))
            self._note_preemptions(counts)
            if step is None:
                return
            self.fleet.execute(member, step)

    def _note_preemptions(self, counts_before: list[int]) -> None:
        for group, count in zip(self._groups, counts_before, strict=True):
            if group.num_preemptions > count:
                live = group.live_sequences
                is_swapped = live[0].status is SequenceStatus.SWAPPED
                mode = PreemptionMode.SWAP if is_swapped else PreemptionMode.RECOMPUTE
                longest = max(len(sequence.token_ids) for sequence in live)
                self.preemptions.append(Preempted(group.arrival, mode, longest - group.num_prompt_tokens))
