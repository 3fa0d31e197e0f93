"""One executor of a fleet is killed once in a run, at a step of its own and at one of three points.

What clients get must be what each request gets when it runs alone and nobody is killed:
`tests/property/test_loss.py` on fake workers, `tests/e2e/test_loss.py` on real models.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from executor_svc.worker.interface import Worker
from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.executors.serving_limits import PlannerSettings, serving_limits
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from tests.support.fleet import Member, Outcome, VirtualFleet, WiredWorker, assert_same_outcomes

NUM_TOKENS = 64
MAX_ROUNDS = 2000


class Point(enum.Enum):
    """When the executor is killed."""

    BEFORE_SEND = "the step is decided and never executed"
    AFTER_SEND = "the step is executed and its result is lost"
    AFTER_REPLY = "the result is processed"


@dataclass(frozen=True)
class Kill:
    """Kills the executor of the step with this index, counted over all executors, at a point."""

    step_index: int
    point: Point


@dataclass(frozen=True)
class Pools:
    """Blocks on the device of a lone executor, of the first and the second of two, and of the first one's host pool."""

    alone: int
    first: int
    second: int
    host: int


@dataclass(frozen=True)
class Scene:
    """How many executors, and how many steps in flight on each.

    One executor alone is so small that it swaps and recomputes all the time. Of two, one that is left
    alone can still run everything.

    Attributes:
        make_worker: Makes, or empties, the worker of the executor with an index, for a number of device blocks. It may
            have more of them.
        pools: Its sizes.
    """

    num_executors: int
    num_steps_in_flight: int
    make_worker: Callable[[int, int], Worker]
    pools: Pools

    def __str__(self) -> str:
        return f"{self.num_executors} executors, {self.num_steps_in_flight} in flight"

    def join(self, fleet: VirtualFleet, index: int) -> Member:
        """Attach the executor with this index; they differ in pools and budget."""
        num_blocks = self.pools.alone if self.num_executors == 1 else (self.pools.first, self.pools.second)[index]
        worker = self.make_worker(index, num_blocks)
        info = replace(
            worker.info,
            num_device_blocks=num_blocks,
            cache_groups=(),
            num_host_blocks=(self.pools.host, 0)[index],
            max_num_seqs=(16, 12)[index],
            max_num_batched_tokens=(40, 24)[index],
        )
        return fleet.join(serving_limits(info, PlannerSettings(watermark=0.0)), WiredWorker(worker))


def _sampled(seed: int, *, num_logprobs: int = 0) -> SamplingRow:
    return SamplingRow(temperature=1.0, seed=seed, num_logprobs=num_logprobs)


def make_groups(shortened: int = 1, first_id: int = 33) -> list[SequenceGroup]:
    """Return the requests; no two prompts begin alike, since the fake cannot tell equal histories apart.

    Args:
        shortened: How many times shorter the outputs are.
        first_id: Of the 94 tokens of the prompts.
    """

    def group(
        num_prompt_tokens: int,
        sampling: SamplingRow,
        max_tokens: int = NUM_TOKENS,
        num_sequences: int = 1,
        beam_search: BeamSearchParams | None = None,
        *,
        ignore_eos: bool = True,
        num_prompt_logprobs: int = -1,
    ) -> SequenceGroup:
        arrival = len(groups)
        prompt = (33 + arrival + np.arange(num_prompt_tokens)) % 94 + first_id
        conditions = StopConditions(-(-max_tokens // shortened), ignore_eos=ignore_eos)
        made = SequenceGroup(
            f"r{arrival}", prompt.astype(np.int32), sampling, conditions, arrival, num_sequences, beam_search
        )
        made.num_prompt_logprobs = num_prompt_logprobs
        groups.append(made)
        return made

    groups: list[SequenceGroup] = []
    group(30, SamplingRow(num_logprobs=0))
    group(17, _sampled(11), num_prompt_logprobs=0)
    group(9, _sampled(12), num_sequences=3)
    group(21, SamplingRow(), 24, beam_search=BeamSearchParams(3, 3), ignore_eos=False)
    group(70, _sampled(13, num_logprobs=4), 30, num_prompt_logprobs=2)
    group(
        12, _sampled(14), 20, num_sequences=4, ignore_eos=False, num_prompt_logprobs=1
    )  # best_of: the likeliest are picked at the end
    group(5, SamplingRow(), 12, beam_search=BeamSearchParams(2, 1, early_stopping=EarlyStopping.TRUE))
    group(8, _sampled(15, num_logprobs=-1), 6, ignore_eos=False)
    return groups


class Run:
    """One run of groups on a scene; `num_steps` counts the steps that were decided."""

    def __init__(self, scene: Scene, groups: list[SequenceGroup], kill: Kill | None = None) -> None:
        self.scene = scene
        self.groups = groups
        self.kill = kill
        self.was_killed = False
        self.num_steps = 0
        # Up to the kill, a run is the same as the one without.
        self.fleet = VirtualFleet(checks_integrity=kill is None)
        self._indices: dict[Member, list[int]] = {}
        for index in range(scene.num_executors):
            self._join(index)

    def play(self) -> list[Outcome]:
        """Let half of the groups arrive at once and the others one by one; run until all have ended.

        Returns: what the client of each got.
        """
        arriving = list(self.groups)
        for now in range(MAX_ROUNDS):
            for _ in range(len(self.groups) // 2 if now == 0 else 1):
                if arriving:
                    self.fleet.add(arriving.pop(0))
            for member in list(self.fleet.members):
                self._send(member, float(now))
            for member in list(self.fleet.members):
                self._receive(member)
            is_live = any(self.fleet.is_live(group) for group in self.groups)
            if not arriving and not is_live and not any(member.results for member in self.fleet.members):
                break
        else:
            raise AssertionError("the groups do not end")
        for member in self.fleet.members:  # the slots of the last ones are released by one step more
            if (step := self.fleet.schedule(member, float(now))) is not None:
                self.fleet.execute(member, step)
        assert self.was_killed == (self.kill is not None)
        assert not self.fleet.failures
        self.fleet.check_all_is_free()
        return [self.fleet.outcome_of(group.arrival) for group in self.groups]

    def _join(self, index: int) -> None:
        member = self.scene.join(self.fleet, index)
        self._indices[member] = []

    def _send(self, member: Member, now_s: float) -> None:
        while len(member.planner.in_flight) < self.scene.num_steps_in_flight:
            step = self.fleet.schedule(member, now_s)
            if step is None:
                return
            index, self.num_steps = self.num_steps, self.num_steps + 1
            self._indices[member].append(index)
            if self._kills(member, index, Point.BEFORE_SEND):
                return
            self.fleet.execute(member, step)
            if self._kills(member, index, Point.AFTER_SEND):
                return

    def _receive(self, member: Member) -> None:
        if member.results:
            self.fleet.process(member)
            self._kills(member, self._indices[member].pop(0), Point.AFTER_REPLY)

    def _kills(self, member: Member, step_index: int, point: Point) -> bool:
        """Kill the member if this is the moment; the only executor of a fleet is replaced at once."""
        if self.kill != Kill(step_index, point):
            return False
        self.was_killed = self.fleet.checks_integrity = True
        self.fleet.lose(member)
        if not self.fleet.members:
            self._join(0)
        return True


def outcomes_alone(scene: Scene, groups: Sequence[SequenceGroup]) -> list[Outcome]:
    """Return what each request gets from an executor of its own, in lock-step, and nobody is killed."""
    lone = replace(scene, num_executors=1, num_steps_in_flight=1)
    return [Run(lone, [group]).play()[0] for group in groups]


def check_kill(scene: Scene, groups: list[SequenceGroup], kill: Kill, alone: list[Outcome]) -> None:
    """Fail unless every client gets the same, to the bit, when an executor is killed."""
    assert_same_outcomes(Run(scene, groups, kill).play(), alone, str(kill))


def num_steps_of(scene: Scene, groups: list[SequenceGroup], alone: list[Outcome]) -> int:
    """Return the number of steps of a run in which nobody is killed, after the same check."""
    run = Run(scene, groups)
    assert_same_outcomes(run.play(), alone, "nobody is killed")
    assert scene.num_executors == 2 or run.fleet.num_preemptions >= 3
    return run.num_steps
