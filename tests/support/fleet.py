"""A fleet on a virtual transport: real cores, executors in this process, and all that clients would see.

Steps and results pass through the wire encoding; nothing else lies between. The caller says what is
scheduled, executed and processed when, and who is lost in between; what must hold at each of these
moments is asserted here. Next: `fleet_driving.py`, which drives one by hand; `tests/property/test_loss.py`
and `tests/property/test_fleet.py`, which play workloads on one.
"""

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from executor_svc.worker.interface import Worker, execute
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import Step, StepResult
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import GroupEvent
from scheduler_svc.core.step.step_updates import PromptLogprobs
from scheduler_svc.core.waiting.policy import FcfsPolicy, Policy
from scheduler_svc.core.waiting.tenant_shares import TenantShares
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.outputs import Alternatives, FinishReason, Hypothesis
from scheduler_svc.request.provenance import UNKNOWN, Numerics
from tests.support.counts import check_counts_of_fleet, slots_of_tenants
from tests.support.driving import check_pools_are_free
from tests.support.toy_executor import over_the_wire, result_over_the_wire
from tests.support.waiting import shares_of

MakeFleet: TypeAlias = Callable[[WaitingQueue, Policy, bytes, Callable[[], bool]], Fleet]


class VirtualExecutor(Protocol):
    """What executes steps: the wire encoding is inside."""

    @property
    def table(self) -> BatchTable:
        """The executor's copy of the batch table."""

    def execute(self, step: Step) -> StepResult:
        """Run the step as the other side of the wire reads it."""


class WiredWorker:
    """A worker behind the wire encoding. What its steps took is not told: a core learns from that, and would decide
    otherwise on a busy machine.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def table(self) -> BatchTable:
        """The worker's batch table."""
        return self._worker.table

    def execute(self, step: Step) -> StepResult:
        """Run the step, with both encodings."""
        result = execute(self._worker, over_the_wire(step))
        result.execute_duration_us = result.move_duration_us = 0
        return result_over_the_wire(result)


@dataclass(slots=True, eq=False)
class Member:
    """An attached executor and its core; `results` of its `steps` are not yet processed, oldest first."""

    planner: ExecutorPlanner
    executor: VirtualExecutor
    results: deque[StepResult] = field(default_factory=deque)
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """What a client saw of one output. `logprobs` are those of the tokens that have one; `made_by`: the kind of the
    executor of each token.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    alternatives: list[Alternatives] = field(default_factory=list)
    made_by: list[Numerics] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FoundHypothesis:
    """A hypothesis that can be compared."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    reason: FinishReason

    @classmethod
    def of(cls, hypothesis: Hypothesis) -> "FoundHypothesis":
        """Return the plain values."""
        return cls(
            tuple(hypothesis.token_ids.tolist()),
            tuple(hypothesis.logprobs.tolist()),
            hypothesis.score,
            hypothesis.finish_reason,
        )


PromptValues = tuple[list[float], list[int], list[float]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that the client of one request gets.

    Attributes:
        outputs: By output index.
        search: What a beam search found, best first; empty: it is none.
        prompt_logprobs: Those of the prompt, and the ids and log-probabilities of their alternatives.
    """

    outputs: list[Output]
    search: list[FoundHypothesis]
    prompt_logprobs: PromptValues

    def values(self) -> Iterator[tuple[str, object]]:
        """Return every single value with its name, in the order in which a client gets them."""
        logprobs, alternatives, their_logprobs = self.prompt_logprobs
        yield from ((f"prompt, log-probability {index}", value) for index, value in enumerate(logprobs))
        pairs = zip(alternatives, their_logprobs, strict=True)
        yield from ((f"prompt, alternative {index}", pair) for index, pair in enumerate(pairs))
        for number, output in enumerate(self.outputs):
            yield from ((f"output {number}, token {index}", value) for index, value in enumerate(output.token_ids))
            yield from ((f"output {number}, log-probability {index}", v) for index, v in enumerate(output.logprobs))
            yield from ((f"output {number}, alternatives {index}", v) for index, v in enumerate(output.alternatives))
            yield f"output {number}, end", output.reason
        yield from ((f"hypothesis {index}", hypothesis) for index, hypothesis in enumerate(self.search))


def assert_same_outcomes(found: Iterable[Outcome], expected: Iterable[Outcome], what: str) -> None:
    """Fail unless the clients got the same, to the bit; say what differs first. `what` names the run."""
    for request, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for (name, value), (other, wanted) in itertools.zip_longest(
            ours.values(), theirs.values(), fillvalue=("nothing", None)
        ):
            assert (name, value) == (other, wanted), (
                f"{what}: request {request}: {name} is {value}; expected is {other}, {wanted}"
            )


class VirtualFleet:
    """The fleet, its members, and what came of every group, by (arrival, output index).

    `stop_lengths` holds the number of tokens with which the text of an output holds a stop string.

    Args:
        policy: Of the queue and of the cores.
        tenant_weights: Of the queue.
        max_num_seqs_per_tenant: Of the queue.
        checks_integrity: Whether the invariants are checked after every call; may be set later.
        make_fleet: The class of the fleet, or what makes one.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        *,
        max_num_seqs_per_tenant: int | None = None,
        checks_integrity: bool = True,
        make_fleet: MakeFleet = Fleet,
    ) -> None:
        policy = policy or FcfsPolicy()
        self.queue = WaitingQueue(policy, shares_of(tenant_weights, max_num_seqs_per_tenant))
        self._slots_of: dict[str, list[int]] = {}
        self.fleet = make_fleet(self.queue, policy, b"key", lambda: True)
        self.members: list[Member] = []
        self.checks_integrity = checks_integrity
        self.groups: dict[int, SequenceGroup] = {}
        self.outputs: dict[tuple[int, int], Output] = defaultdict(Output)
        self.searches: dict[int, list[FoundHypothesis]] = {}
        self.prompts: dict[int, list[PromptLogprobs]] = defaultdict(list)
        self.values: dict[int, list[float]] = {}
        self.failures: dict[int, str] = {}
        self.cut_short: set[tuple[int, int]] = set()
        self.stop_lengths: dict[tuple[int, int], int] = {}
        self.events: list[GroupEvent] = []
        self.num_recomputed_groups = 0
        self.num_preemptions = 0
        self._epochs = itertools.count(1)

    # Groups --------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> SequenceGroup:
        """Let a new group wait; return it."""
        self.groups[group.arrival] = group
        self.fleet.add(group)
        return group

    def is_live(self, group: SequenceGroup) -> bool:
        """Return whether the group is still to end."""
        return group.arrival not in self.failures and bool(group.live_sequences)

    def outcome_of(self, arrival: int) -> Outcome:
        """Return what the client of this request got."""
        parts = self.prompts.get(arrival, [])
        outputs = [output for (other, _), output in sorted(self.outputs.items()) if other == arrival]
        prompt_logprobs = (
            [logprob for part in parts for logprob in part.logprobs],
            [token_id for part in parts for token_id in part.alternatives.token_ids],
            [logprob for part in parts for logprob in part.alternatives.logprobs],
        )
        return Outcome(outputs, self.searches.get(arrival, []), prompt_logprobs)

    def abort(self, group: SequenceGroup) -> None:
        """The client leaves."""
        self.cut_short |= {(group.arrival, sequence.index) for sequence in group.live_sequences}
        self.fleet.abort(group)
        self.check_integrity(*self.members)

    # Executors -----------------------------------------------------------------------------------

    def join(
        self, limits: CoreLimits, executor: VirtualExecutor, name: str = "", numerics: Numerics = UNKNOWN
    ) -> Member:
        """Attach an empty executor."""
        member = Member(self.fleet.join(limits, next(self._epochs), name, numerics), executor)
        self.members.append(member)
        return member

    def lose(self, member: Member) -> list[SequenceGroup]:
        """The executor is gone, and with it all results that were not processed; return the groups that wait again."""
        self.members.remove(member)
        groups = self.fleet.leave(member.planner)
        self._count_preemptions(member)
        lost = {group.arrival for group in groups}
        elsewhere = {g.arrival for other in self.members for g in self.groups.values() if g in other.planner.groups}
        assert not lost & elsewhere
        waiting = {group.arrival for group in self.queue}
        live = {arrival for arrival, group in self.groups.items() if self.is_live(group)}
        assert lost | elsewhere | waiting == live, "a group got lost with the executor"
        for group in groups:
            for sequence in group.live_sequences:
                assert sequence.status is SequenceStatus.WAITING
                if group.beam_search is None:
                    known = group.prompt_token_ids.tolist() + self.outputs[_name_of(sequence)].token_ids
                    assert sequence.token_ids.tolist() == known, "a group carries other tokens than its client has"
            self.fleet.add(group)
        self.num_recomputed_groups += len(groups)
        return groups

    # Steps ---------------------------------------------------------------------------------------

    def dispatch(self, now_s: float) -> set[ExecutorPlanner]:
        """Dispatch the line, as the engine does after each change; return the cores that are to look.

        Drivers that are told to look ask again. So it must be settled soon: rarely the second call still finds what
        the first one left, as who was passed there for a long prefill takes a place in the next one.
        """
        planners = self.fleet.dispatch(now_s)
        planners |= self.fleet.dispatch(now_s)
        assert not self.fleet.dispatch(now_s), "a core is told to look again, and nothing has happened"
        return planners

    def schedule(self, member: Member, now_s: float) -> Step | None:
        """Decide the next step of a member; it is not executed yet."""
        decision, _ = self.fleet.schedule(member.planner, now_s)
        self.events += decision.events
        for failure in decision.failures:
            group = failure.group
            assert len(group.sequences) > 1 or group.beam_search is not None, f"a lone sequence failed: {failure}"
            assert group.arrival not in self.failures, "a group failed twice"
            self.failures[group.arrival] = failure.message
        self.check_integrity(member)
        return decision.step

    def execute(self, member: Member, step: Step) -> None:
        """Execute the step that was scheduled last; its result waits to be processed."""
        digest = member.planner.table.digest()
        member.steps.append(step)
        member.results.append(member.executor.execute(step))
        assert member.executor.table.digest() == digest, "the two batch tables differ"

    def process(self, member: Member) -> None:
        """Take the oldest result, and give its tokens to the clients."""
        updates = self.fleet.process(member.planner, member.results.popleft())
        self.check_integrity(member)
        logprobs = updates.logprobs or [math.nan] * len(updates.token_ids)
        for prompt in updates.prompt_logprobs:
            assert self.is_live(prompt.group) or not prompt.group.live_sequences
            assert not any(self.outputs[_name_of(s)].token_ids for s in prompt.group.sequences), (
                "the prompt comes first"
            )
            self.prompts[prompt.group.arrival].append(prompt)
        cut_rows: set[int] = set()
        last_places = updates.last_places()
        for place, (row, token_id) in enumerate(zip(updates.row_of_each_token(), updates.token_ids, strict=False)):
            if row in cut_rows:  # what lies behind a stop string
                continue
            sequence = updates.sequences[row]
            name = _name_of(sequence)
            output = self.outputs[name]
            assert name not in self.cut_short, "a token came after the client left"
            assert output.reason is None, "a token came after the end"
            output.token_ids.append(token_id)
            output.made_by.append(member.planner.numerics)
            if not math.isnan(logprobs[place]):
                output.logprobs.append(logprobs[place])
            if place in updates.alternatives:
                output.alternatives.append(updates.alternatives[place])
            if place in last_places:
                assert sequence.status is SequenceStatus.FINISHED
                output.reason = updates.finished[row]
            elif len(output.token_ids) == self.stop_lengths.get(name):
                cut_rows.add(row)
                self.cut_short.add(name)
                self.fleet.finish(member.planner, sequence)
                self.check_integrity(member)
        for group, values in updates.pooled:
            assert group.arrival not in self.values, "a text was answered twice"
            assert (group.arrival, 0) not in self.cut_short, "an answer came after the client left"
            self.values[group.arrival] = values.tolist()
        for group in updates.finished_searches:
            assert group.arrival not in self.searches, "a search ended twice"
            assert group.beams is not None
            self.searches[group.arrival] = [FoundHypothesis.of(h) for h in group.beams.finished_hypotheses()]

    # What must hold ------------------------------------------------------------------------------

    def check_integrity(self, *touched: Member) -> None:
        """Assert the invariants of these cores, and that each live group is in exactly one place."""
        if not self.checks_integrity:
            return
        for member in touched:
            check_integrity(member.planner)
        for group in self.groups.values():
            places = [member for member in self.members if group in member.planner.groups]
            assert len(places) + (group in self.queue) == self.is_live(group), f"{group.request_id} is in {places}"
        live = [group for group in self.groups.values() if self.is_live(group)]
        check_counts_of_fleet(self.fleet, live)
        self._check_cap_of_tenants(live)

    def set_shares(self, shares: TenantShares) -> None:
        """Let tenants have other shares; what was dispatched before, they have got by the former ones."""
        self.check_integrity()
        self.fleet.set_tenant_shares(shares)

    def _check_cap_of_tenants(self, live: Iterable[SequenceGroup]) -> None:
        """Assert that no tenant has got more slots than it may have now, unless they are those of one group."""
        former, self._slots_of = self._slots_of, slots_of_tenants(self.fleet, live)
        for tenant, nums in self._slots_of.items():
            most = self.queue.shares.of(tenant).max_num_seqs
            is_within = most is None or len(nums) == 1 or sum(nums) <= max(most, sum(former.get(tenant, ())))
            assert is_within, f"tenant {tenant!r} has got more than {most} slots: {nums}"

    def check_all_is_free(self) -> None:
        """Assert that nothing is left of the groups that have ended, on either side."""
        assert not len(self.queue)
        for member in self.members:
            self._count_preemptions(member)
            check_pools_are_free(member.planner)
            assert not member.executor.table.live.any()

    def _count_preemptions(self, member: Member) -> None:
        self.num_preemptions += sum(member.planner.preemption.num_preemptions.values())


def _name_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.group.arrival, sequence.index
