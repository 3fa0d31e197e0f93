"""A lost executor changes nothing that a client sees, whichever step it is lost at.

The real fleet runs on fake workers, on a virtual transport. One executor is killed once in a run, at a
step of its own and at one of three points; tokens, log-probabilities and hypotheses must be those
that each request gets when it runs alone and nobody is killed.
"""

import enum
from dataclasses import dataclass

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from scheduler_svc.core.beams.beam_search import BeamSearchParams, EarlyStopping
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.stopping import StopConditions
from scheduler_svc.executors.served_model import CoreSettings, serving_limits
from shared.step import SamplingRow
from tests.support.fleet import FoundHypothesis, Member, Output, VirtualFleet, WiredWorker

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
class Scene:
    """How many executors, and how many steps in flight on each.

    One executor alone is so small that it swaps and recomputes all the time. Of two, one that is left
    alone can still run everything.
    """

    num_executors: int
    num_steps_in_flight: int

    def join(self, fleet: VirtualFleet, index: int) -> Member:
        """Attach the executor with this index; they differ in block size, pools and budget."""
        worker = FakeWorker(
            block_size_tokens=(4, 8)[index],
            num_device_blocks=80 if self.num_executors == 1 else (130, 50)[index],
            num_host_blocks=(60, 0)[index],
            max_model_len=112,
            max_num_seqs=(16, 12)[index],
            max_num_batched_tokens=(40, 24)[index],
            eos_probability=0.02,
            sleep=lambda seconds: None,
        )
        limits = serving_limits(worker.info, CoreSettings(watermark=0.0))
        return fleet.join(limits, WiredWorker(worker))


ALL_SCENES = [Scene(num_executors, depth) for num_executors in (1, 2) for depth in (1, 2, 3)]


def sampled(seed: int, *, num_logprobs: int = 0) -> SamplingRow:
    return SamplingRow(temperature=1.0, seed=seed, num_logprobs=num_logprobs)


def make_groups() -> list[SequenceGroup]:
    """Return the requests; no two prompts begin alike, since the fake cannot tell equal histories apart."""

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
        prompt = (33 + arrival + np.arange(num_prompt_tokens)) % 94 + 33
        conditions = StopConditions(max_tokens, ignore_eos=ignore_eos)
        made = SequenceGroup(
            f"r{arrival}", prompt.astype(np.int32), sampling, conditions, arrival, num_sequences, beam_search
        )
        made.num_prompt_logprobs = num_prompt_logprobs
        groups.append(made)
        return made

    groups: list[SequenceGroup] = []
    group(30, SamplingRow(num_logprobs=0))
    group(17, sampled(11), num_prompt_logprobs=0)
    group(9, sampled(12), num_sequences=3)
    group(21, SamplingRow(), 24, beam_search=BeamSearchParams(3, 3), ignore_eos=False)
    group(70, sampled(13, num_logprobs=4), 30, num_prompt_logprobs=2)
    group(
        12, sampled(14), 20, num_sequences=4, ignore_eos=False, num_prompt_logprobs=1
    )  # best_of: the likeliest are picked at the end
    group(5, SamplingRow(), 12, beam_search=BeamSearchParams(2, 1, early_stopping=EarlyStopping.TRUE))
    group(8, sampled(15, num_logprobs=-1), 6, ignore_eos=False)
    return groups


PromptLogprobs = tuple[list[float], list[int], list[float]]
Outcome = tuple[dict[tuple[int, int], Output], dict[int, list[FoundHypothesis]], list[PromptLogprobs]]


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
        self._num_processed: dict[Member, int] = {}
        self._indices: dict[Member, list[int]] = {}
        for index in range(scene.num_executors):
            self._join(index)

    def play(self) -> Outcome:
        """Let half of the groups arrive at once and the others one by one; run until all have ended."""
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
        prompts = [self.fleet.prompt_logprobs_of(group.arrival) for group in self.groups]
        return dict(self.fleet.outputs), self.fleet.searches, prompts

    def _join(self, index: int) -> None:
        member = self.scene.join(self.fleet, index)
        self._indices[member] = []

    def _send(self, member: Member, now_s: float) -> None:
        while len(member.core.in_flight) < self.scene.num_steps_in_flight:
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


def outcome_alone() -> Outcome:
    """What each request gets from an executor of its own, in lock-step, and nobody is killed."""
    outputs: dict[tuple[int, int], Output] = {}
    searches: dict[int, list[FoundHypothesis]] = {}
    prompts: list[PromptLogprobs] = []
    for group in make_groups():
        own_outputs, own_searches, own_prompts = Run(Scene(1, 1), [group]).play()
        outputs |= own_outputs
        searches |= own_searches
        prompts += own_prompts
    return outputs, searches, prompts


@pytest.fixture(scope="module")
def alone() -> Outcome:
    outputs, searches, prompts = outcome_alone()
    assert [len(output.token_ids) for output in outputs.values()].count(NUM_TOKENS) == 5
    assert {len(output.logprobs) for output in outputs.values()} >= {0, NUM_TOKENS}
    assert len(searches) == 2
    assert [tuple(len(part) for part in values) for values in prompts if values[0]] == [
        (16, 0, 0),
        (69, 138, 138),
        (11, 11, 11),
    ]
    assert {len(output.alternatives) for output in outputs.values()} >= {0, 30}
    return outputs, searches, prompts


def num_steps_of(scene: Scene, alone: Outcome) -> int:
    """Return the number of steps of a run in which nobody is killed."""
    run = Run(scene, make_groups())
    assert run.play() == alone
    assert scene.num_executors == 2 or run.fleet.num_preemptions > 3
    return run.num_steps


def check_kill(scene: Scene, kill: Kill, alone: Outcome) -> None:
    run = Run(scene, make_groups(), kill)
    assert run.play() == alone, f"{kill} changes what clients get"


@pytest.mark.parametrize("scene", ALL_SCENES, ids=str)
def test_an_executor_killed_now_and_then_costs_no_token(scene: Scene, alone: Outcome) -> None:
    num_steps = num_steps_of(scene, alone)
    for number, point in enumerate(Point, start=1):
        check_kill(scene, Kill(number * num_steps // 4, point), alone)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", Point, ids=lambda point: point.name)
@pytest.mark.parametrize("scene", ALL_SCENES, ids=str)
def test_an_executor_killed_at_any_step_costs_no_token(scene: Scene, point: Point, alone: Outcome) -> None:
    for step_index in range(num_steps_of(scene, alone)):
        check_kill(scene, Kill(step_index, point), alone)
