"""A fleet whose executors come, go and stall: every output is still the one computed alone.

Each example plays one random workload three times, with 1, 2 and 4 steps in flight on every core. Its
cores differ in most of their limits and are too small for all of its requests, which are those of
`tests/support/workloads.py`; after each decision `tests/support/placement.py` sees that nobody waits in vain.
"""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.demand import Obstacle
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import FcfsPolicy, Policy, PriorityPolicy
from scheduler_svc.core.waiting.tenant_shares import TenantShares
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.request.provenance import Numerics
from tests.support.fleet import FoundHypothesis, MakeFleet, Member, Output, VirtualFleet
from tests.support.placement import PlacementCheck, fits_when_empty
from tests.support.toy_executor import (
    ToyExecutor,
    ToyNetwork,
    generate_alone,
    hashed_next_token,
    search_alone,
    values_of,
)
from tests.support.waiting import shares_of
from tests.support.workloads import (
    ADAPTERS,
    MORE_ENCODER_BLOCKS,
    VOCAB_SIZE,
    Request,
    attended_by,
    inputs_up_to,
    limits,
    requests_within,
    with_encoder,
)

LAST_CHANGE_ROUND = 15
MAX_ROUNDS = 1500
POLICIES: tuple[Policy, ...] = (FcfsPolicy(), PriorityPolicy())
OTHER_SHARES = (shares_of({"x": 0.2}), shares_of({"x": 5.0}, 2), shares_of({}, 1))


@dataclass(frozen=True)
class Stall:
    """The results of a member do not come for so many rounds."""

    member: int
    first_round: int
    num_rounds: int

    def holds(self, index: int, now: int) -> bool:
        return self.member == index and self.first_round <= now < self.first_round + self.num_rounds


@dataclass(frozen=True)
class FleetWorkload:
    """Everything that happens in one example; times in rounds."""

    kinds: list[CoreLimits]
    """The executors that there are; all attach in round 0."""
    requests: list[Request]
    losses: dict[int, int]
    """Round: the position of the member that is lost then, modulo their number."""
    joins: dict[int, int]
    """Round: the kind of the executor that joins then."""
    retirements: dict[int, int]
    """Round: the position of the member that takes no new groups from then on."""
    emptied: dict[int, int]
    """Round: the position of the member that gives its groups away from then on, or, if it does, takes some again."""
    solos: dict[int, int]
    """Round: the number of the request that is computed alone from then on."""
    stalls: list[Stall]
    drains: list[bool]
    policy: Policy
    tenant_weights: dict[str, float] = field(default_factory=dict)
    max_num_seqs_per_tenant: int | None = None
    share_changes: dict[int, TenantShares] = field(default_factory=dict)
    """Round: what tenants may have from then on."""
    dispatches: bool = False
    """Whether the line is dispatched after every change, as the engine does."""
    num_numerics: int = 1
    """Executors are of so many kinds of arithmetic, by turns; all give the same tokens."""
    failing: frozenset[int] = frozenset()
    """The transfers that fail, by number modulo 5."""

    def fails(self, number: int) -> bool:
        return number % 5 in self.failing


@st.composite
def fleet_workloads(draw: st.DrawFn) -> FleetWorkload:
    """Draw a workload; some executors may be unable to hold some of its requests."""
    first = draw(tight_limits(draw(st.integers(8, 16))))
    num_others = draw(st.sampled_from([2, 1, 1, 0]))
    others = [first if draw(st.booleans()) else draw(tight_limits(first.max_model_len)) for _ in range(num_others)]
    kinds = [first, *(of_the_same_model(other, first) for other in others)]
    longest = draw(st.sampled_from([0, 0, min(7, *(kind.max_num_batched_tokens for kind in kinds))]))
    kinds = [with_encoder(kind, longest, draw(MORE_ENCODER_BLOCKS)) for kind in kinds]
    common = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=first.max_model_len))
    most_seqs = max(kind.max_num_seqs for kind in kinds)
    roomiest = replace(first, max_num_seqs=most_seqs, max_num_batched_tokens=99, max_sample_rows=99)
    requests = [draw(eager_requests(roomiest, common)) for _ in range(draw(st.integers(6, 9)))]
    requests = [one if one.pooling else replace(one, encoder=draw(inputs_up_to(longest))) for one in requests]
    rounds, position = st.integers(0, LAST_CHANGE_ROUND - 1), st.integers(0, 2)
    return FleetWorkload(
        kinds=kinds,
        requests=sorted(requests, key=lambda request: request.arrival_round),
        losses=draw(st.dictionaries(rounds, position, max_size=3)),
        joins=draw(st.dictionaries(rounds, st.integers(0, len(kinds) - 1), max_size=3)),
        retirements=draw(st.dictionaries(rounds, position, max_size=2)),
        emptied=draw(st.dictionaries(rounds, position, max_size=4)),
        solos=draw(st.dictionaries(rounds, st.integers(0, len(requests) - 1), max_size=2)),
        stalls=draw(st.lists(st.builds(Stall, position, rounds, st.integers(1, 15)), max_size=2)),
        drains=draw(st.lists(st.booleans(), min_size=1, max_size=6)),
        policy=draw(st.sampled_from(POLICIES)),
        tenant_weights=draw(st.sampled_from([{}, {"x": 3.0}])),
        max_num_seqs_per_tenant=draw(st.sampled_from([None, None, 1, 2, 3])),
        share_changes=draw(st.dictionaries(rounds, st.sampled_from(OTHER_SHARES), max_size=2)),
        dispatches=draw(st.booleans()),
        num_numerics=draw(st.sampled_from([2, 1])),
        failing=draw(st.sampled_from([frozenset(), frozenset({1}), frozenset({0, 2, 3})])),
    )


@st.composite
def tight_limits(draw: st.DrawFn, max_model_len: int) -> CoreLimits:
    """Draw the limits of an executor whose pool holds little more than one sequence."""
    drawn = draw(limits())
    return replace(
        drawn,
        max_model_len=max_model_len,
        num_blocks=-(-max_model_len // drawn.block_size) + draw(st.integers(0, 4)),
        more_groups=tuple(
            replace(pool, num_blocks=max(pool.num_blocks, -(-max_model_len // drawn.block_size)))
            for pool in drawn.more_groups
        ),
        watermark=min(drawn.watermark, 0.1),
        stall_after_s=draw(st.sampled_from([0.5, 3.0, 100.0])),
        max_transfers=draw(st.sampled_from([0, 1, 3, 16])) * drawn.prefix_caching,  # as `serving_limits` makes them
    )


def of_the_same_model(other: CoreLimits, first: CoreLimits) -> CoreLimits:
    """Return the limits of an executor that may serve beside the first one."""
    return replace(
        other,
        eos_token_ids=first.eos_token_ids,
        sliding_window=first.sliding_window,
        long_prefill_threshold=first.long_prefill_threshold,
    )


@st.composite
def eager_requests(draw: st.DrawFn, bounds: CoreLimits, common: list[int]) -> Request:
    """Draw a request that comes early; half of them do not end before their length."""
    request = draw(requests_within(bounds, common, ADAPTERS[:3]))
    conditions = request.conditions
    if draw(st.booleans()):
        conditions = StopConditions(ignore_eos=True)
    return replace(request, conditions=conditions, arrival_round=request.arrival_round // 2)


class Run:
    """Plays a workload, so many steps in flight on each core."""

    def __init__(self, workload: FleetWorkload, num_steps_in_flight: int, make_fleet: MakeFleet = Fleet) -> None:
        self.workload = workload
        self.num_steps_in_flight = num_steps_in_flight
        self.fleet = VirtualFleet(
            workload.policy,
            workload.tenant_weights,
            max_num_seqs_per_tenant=workload.max_num_seqs_per_tenant,
            make_fleet=make_fleet,
        )
        self.refused: set[int] = set()
        self.num_joins = 0
        self.retired: set[ExecutorPlanner] = set()
        self.network = ToyNetwork(workload.fails)
        transfers = self.fleet.fleet.dispatcher.transfers
        transfers.least_tokens = transfers.fixed_tokens = 1
        for kind in workload.kinds:
            self.join(kind)

    def join(self, kind: CoreLimits) -> None:
        numerics = Numerics(str(self.num_joins % self.workload.num_numerics), "digest")
        executor = ToyExecutor(kind, hashed_next_token(VOCAB_SIZE), network=self.network)
        self.fleet.join(kind, executor, f"executor {self.num_joins}", numerics)
        self.num_joins += 1

    def play(self) -> None:
        """Play the workload to its end."""
        for now in range(MAX_ROUNDS):
            self.let_executors_come_and_go(now)
            self.let_requests_arrive(now)
            if now in self.workload.share_changes:
                self.fleet.set_shares(self.workload.share_changes[now])
            self.let_clients_leave(now)
            self.let_a_request_run_alone(now)
            self.dispatch(now)
            progressed = [self.advance(index, member, now) for index, member in enumerate(self.fleet.members)]
            if any(progressed) or any(member.results or member.planner.transfers for member in self.fleet.members):
                continue
            self.check_nobody_waits_in_vain(now)
            if now > LAST_CHANGE_ROUND:
                assert not any(self.fleet.is_live(group) for group in self.fleet.groups.values())
                self.fleet.check_all_is_free()
                return
        raise AssertionError("the workload does not end")

    def let_executors_come_and_go(self, now: int) -> None:
        members = self.fleet.members
        if now in self.workload.losses and members:
            self.fleet.lose(members[self.workload.losses[now] % len(members)])
        if now in self.workload.retirements and members:
            retired = members[self.workload.retirements[now] % len(members)]
            self.fleet.fleet.set_takes_groups(retired.planner, False)
            self.retired.add(retired.planner)
        if now in self.workload.emptied and members:
            emptied = members[self.workload.emptied[now] % len(members)].planner
            self.fleet.fleet.set_draining(emptied, not emptied.is_draining)
            self.fleet.fleet.set_takes_groups(emptied, not (emptied.is_draining or emptied in self.retired))
        for member in list(members):
            if member.planner in self.retired and not member.planner.groups:
                self.fleet.lose(member)  # as its driver lets it go
        if now in self.workload.joins:
            self.join(self.workload.kinds[self.workload.joins[now]])
        if now == LAST_CHANGE_ROUND:  # or what waits would wait for ever
            waiting = [group for group in self.fleet.groups.values() if self.fleet.is_live(group)]
            for kind in self.workload.kinds:
                if (
                    not any(member.planner.takes_groups and member.planner.limits == kind for member in members)
                    and waiting
                ):
                    self.join(kind)

    def let_requests_arrive(self, now: int) -> None:
        for arrival, request in enumerate(self.workload.requests):
            if request.arrival_round == now:
                group = request.to_group(arrival)
                if self.fleet.fleet.can_ever_take(group):
                    self.fleet.add(group)
                    if request.stop_string_at is not None and request.beam_search is None:
                        self.fleet.stop_lengths[arrival, request.num_sequences - 1] = request.stop_string_at
                else:
                    assert not any(fits_when_empty(limits, group) for limits in self.limits_of_takers())
                    self.refused.add(arrival)

    def limits_of_takers(self) -> list[CoreLimits]:
        """Return the limits of the executors that new groups may go to or wait for; of all if every one is leaving."""
        planners = [member.planner for member in self.fleet.members]
        if not any(planner.takes_groups for planner in planners):
            return [planner.limits for planner in planners]
        return [planner.limits for planner in planners if planner.takes_groups or planner.is_draining]

    def let_clients_leave(self, now: int) -> None:
        for arrival, group in self.fleet.groups.items():
            request = self.workload.requests[arrival]
            if request.abort_round == now and self.fleet.is_live(group):
                self.fleet.abort(group)

    def let_a_request_run_alone(self, now: int) -> None:
        group = self.fleet.groups.get(self.workload.solos.get(now, -1))
        if group is not None and self.fleet.is_live(group):
            self.fleet.fleet.set_runs_alone(group, True)

    def advance(self, index: int, member: Member, now: int) -> bool:
        """Let one member send what it may, and take what has come; return whether anything happened."""
        progressed = False
        while len(member.planner.in_flight) < self.num_steps_in_flight:
            placement = PlacementCheck(self.fleet, member, float(now))
            step = self.fleet.schedule(member, float(now))
            placement.check(step)
            if step is None:
                progressed |= (
                    member.planner.queue.has_solo and not member.planner.in_flight
                )  # it is woken, and looks again
                break
            self.fleet.execute(member, step)
            self.dispatch(now)
            progressed = True
        if any(stall.holds(index, now) for stall in self.workload.stalls):
            return progressed
        drains = self.workload.drains[now % len(self.workload.drains)]
        while member.results and (drains or not progressed or len(member.results) >= self.num_steps_in_flight):
            self.fleet.process(member)
            self.dispatch(now)
            progressed = True
        return progressed

    def dispatch(self, now: int) -> None:
        if self.workload.dispatches:
            self.fleet.dispatch(float(now))

    def check_nobody_waits_in_vain(self, now: int) -> None:
        """Nothing is in flight and nobody has anything to do: then no core could take what waits."""
        assert not any(member.planner.groups for member in self.fleet.members)
        if now > LAST_CHANGE_ROUND:
            for group in list(self.fleet.fleet.dispatcher.unplaceable):
                self.fleet.abort(
                    group
                )  # it has outgrown the largest pool: as the engine does, who knows who comes back
        unplaceable = self.fleet.fleet.dispatcher.unplaceable
        head = next((group for group in self.fleet.queue.in_order() if group not in unplaceable), None)
        if head is not None and self.fleet.members:
            assert isinstance(self.fleet.fleet.place(head, float(now)), Obstacle), "the head waits and would fit"
        if any(member.planner.takes_groups for member in self.fleet.members):
            assert head is None, "all cores are idle, and somebody waits"


def check(workload: FleetWorkload) -> None:
    """Play at every depth; compare with what the plainest loop makes of each prompt."""
    for num_steps_in_flight in (1, 2, 4):
        run = Run(workload, num_steps_in_flight)
        run.play()
        for arrival, request in enumerate(workload.requests):
            if arrival in run.refused:
                continue
            if request.beam_search is not None:
                check_search(run, arrival, request)
            elif request.pooling is not None:
                check_values(run, arrival, request)
            else:
                check_outputs(run, arrival, request)


def check_values(run: Run, arrival: int, request: Request) -> None:
    """Assert that a text was answered, once, unless its client left or nobody pools it."""
    assert request.pooling is not None
    wanted = values_of(request.prompt, request.token_type_ids, request.pooling).tolist()
    assert run.fleet.values.get(arrival) == (None if (arrival, 0) in run.fleet.cut_short else wanted)


def check_outputs(run: Run, arrival: int, request: Request) -> None:
    fleet, bounds = run.fleet, run.workload.kinds[0]
    for index in range(request.num_sequences):
        next_token = hashed_next_token(VOCAB_SIZE)
        attended = attended_by(fleet.groups[arrival])
        alone = generate_alone(
            request.prompt, request.conditions, bounds, next_token, index, request.grammar, request.adapter, *attended
        )
        output = fleet.outputs[arrival, index]
        assert_provenance(fleet.groups[arrival], index, output)
        was_cut_short = (arrival, index) in fleet.cut_short or arrival in fleet.failures
        if was_cut_short and output.reason is None:
            assert output.token_ids == alone[0][: len(output.token_ids)]
        else:
            assert (output.token_ids, output.reason) == alone


def assert_provenance(group: SequenceGroup, index: int, output: Output) -> None:
    """Assert that the spans say of each token which kind of executor made it, and that no two of one kind meet."""
    spans = group.provenance.of_output(index, len(output.token_ids))
    said: list[Numerics] = []
    for number, (begin, numerics) in enumerate(spans):
        assert begin == len(said)
        assert not said or said[-1] != numerics
        end = spans[number + 1][0] if number + 1 < len(spans) else len(output.token_ids)
        said += [numerics] * (end - begin)
    assert said == output.made_by


def check_search(run: Run, arrival: int, request: Request) -> None:
    fleet, bounds = run.fleet, run.workload.kinds[0]
    assert request.beam_search is not None
    if arrival in fleet.failures or any(name[0] == arrival for name in fleet.cut_short):
        assert arrival not in fleet.searches
        return
    attended = attended_by(fleet.groups[arrival])
    alone = search_alone(request.prompt, request.beam_search, request.conditions, bounds, attended)
    assert fleet.searches[arrival] == [FoundHypothesis.of(hypothesis) for hypothesis in alone]


@settings(max_examples=10)
@given(fleet_workloads())
def test_every_output_is_the_one_computed_alone_whatever_befalls_the_fleet(workload: FleetWorkload) -> None:
    check(workload)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(settings.get_profile("thorough"), max_examples=500)
@given(fleet_workloads())
def test_every_output_is_the_one_computed_alone_over_a_thousand_fleets(workload: FleetWorkload) -> None:
    check(workload)
