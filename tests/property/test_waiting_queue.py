"""The waiting queue against a model that sorts everything, and the bounds that make shares fair."""

from collections import Counter
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import FcfsPolicy, PriorityPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from tests.support.waiting import shares_of, take, waiting_group

TENANTS = ("a", "b", "c", "d")
WEIGHTS = st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([0.25, 0.5, 2.0, 8.0]))


class SortedModel:
    """A list, plain counters per (level, tenant), and a sort for each question.

    Weights are powers of two, so that its sums and those of the queue are exact and ties are ties.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.groups: list[SequenceGroup] = []
        self.counters: dict[tuple[int, str], float] = {}
        self.last_left: dict[int, str] = {}
        self.held: list[SequenceGroup] = []

    def tenants(self, level: int) -> set[str]:
        return {group.tenant for group in self.groups if group.priority == level}

    def add(self, group: SequenceGroup) -> None:
        level, tenant = group.priority, group.tenant
        waiting = self.tenants(level)
        if tenant not in waiting:
            last = {self.last_left[level]} if level in self.last_left else set()
            floor = min((self.counters[level, other] for other in waiting or last), default=0.0)
            self.counters[level, tenant] = max(self.counters.get((level, tenant), 0.0), floor)
        self.groups.append(group)

    def remove(self, group: SequenceGroup) -> None:
        self.groups.remove(group)
        if group in self.held:
            self.held.remove(group)
        if group.tenant not in self.tenants(group.priority):
            self.last_left[group.priority] = group.tenant

    def charge(self, tenant: str, num_tokens: int) -> None:
        for level, other in self.counters:
            if other == tenant:
                self.counters[level, other] += num_tokens / self.weights.get(tenant, 1.0)

    def in_order(self, passed: list[SequenceGroup]) -> list[SequenceGroup]:
        """Sort the groups that a walk has not passed yet; those that are held come first."""

        used_up = [*passed, *self.held]

        def comes_before(other: SequenceGroup, group: SequenceGroup) -> bool:
            """Return whether the tokens of one count in the turn of another one of its line."""
            if other in used_up:
                return other in passed or other.has_run or not group.has_run
            return (not other.has_run, other.arrival) < (not group.has_run, group.arrival)

        def turn(group: SequenceGroup) -> tuple[int, float, bool, int]:
            num_tokens_before = sum(
                other.num_prompt_tokens
                for other in self.groups
                if (other.priority, other.tenant) == (group.priority, group.tenant) and comes_before(other, group)
            )
            counter = self.counters[group.priority, group.tenant]
            weight = self.weights.get(group.tenant, 1.0)
            return group.priority, counter + num_tokens_before / weight, not group.has_run, group.arrival

        in_line = sorted((group for group in self.groups if group not in used_up), key=turn)
        return [*(group for group in self.held if group not in passed), *in_line]


class WaitingQueueMachine(RuleBasedStateMachine):
    """Adds, removes, charges and walks in any order; the model and the queue agree."""

    @initialize(weights=WEIGHTS)
    def start(self, weights: dict[str, float]) -> None:
        self.queue, self.model = WaitingQueue(PriorityPolicy(), shares_of(weights)), SortedModel(weights)
        self.arrivals = count()
        self.gone: list[SequenceGroup] = []

    @rule(
        tenant=st.sampled_from(TENANTS),
        num_prompt_tokens=st.integers(1, 9),
        priority=st.integers(-1, 1),
        has_run=st.sampled_from([False, False, False, True]),
    )
    def add(self, tenant: str, num_prompt_tokens: int, priority: int, has_run: bool) -> None:
        group = waiting_group(
            next(self.arrivals), tenant, num_prompt_tokens=num_prompt_tokens, priority=priority, has_run=has_run
        )
        self.queue.add(group)
        self.model.add(group)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), has_run=st.booleans())
    def come_back(self, data: st.DataObject, has_run: bool) -> None:
        group = self.gone.pop(data.draw(st.integers(0, len(self.gone) - 1)))
        group.has_run = has_run
        self.queue.add(group)
        self.model.add(group)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.take_out(data.draw(st.sampled_from(self.model.groups)))

    @precondition(lambda self: len(self.model.held) < len(self.model.groups))
    @rule(data=st.data(), is_first=st.booleans())
    def hold(self, data: st.DataObject, is_first: bool) -> None:
        in_line = self.model.in_order([])[len(self.model.held) :]
        group = in_line[0] if is_first else data.draw(st.sampled_from(in_line))
        self.queue.hold(group)
        self.model.held.append(group)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        group = self.model.held.pop(data.draw(st.integers(0, len(self.model.held) - 1)))
        self.queue.release(group)

    @rule(tenant=st.sampled_from(TENANTS), num_tokens=st.integers(0, 20))
    def charge(self, tenant: str, num_tokens: int) -> None:
        self.queue.charge(tenant, num_tokens)
        self.model.charge(tenant, num_tokens)

    @rule(weights=WEIGHTS)
    def set_weights(self, weights: dict[str, float]) -> None:
        self.queue.set_shares(shares_of(weights))
        self.model.weights = weights

    @rule(decisions=st.lists(st.none() | st.integers(0, 12), max_size=6))
    def walk(self, decisions: list[int | None]) -> None:
        """Take the group and charge so many tokens, or None: pass it over."""
        walk, passed = self.queue.in_order(), list[SequenceGroup]()
        for num_tokens in decisions:
            expected = self.model.in_order(passed)
            group = next(walk, None)
            assert group is (expected[0] if expected else None)
            if group is None:
                return
            if num_tokens is None:
                passed.append(group)
            else:
                self.take_out(group)
                self.charge(group.tenant, num_tokens)

    def take_out(self, group: SequenceGroup) -> None:
        self.queue.remove(group)
        self.model.remove(group)
        self.gone.append(group)

    @invariant()
    def the_order_and_the_books_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        expected = self.model.in_order([])
        assert list(self.queue.in_order()) == expected
        assert [self.queue.num_ahead_of(group) for group in expected] == list(range(len(expected)))
        in_line = expected[len(self.model.held) :]
        turn = self.queue.first_turn()
        assert ([] if turn is None else [turn.group]) == in_line[:1]
        assert self.queue.num_in_line == len(in_line)
        assert list(self.queue) == self.model.groups
        assert len(self.queue) == len(expected)
        assert not any(group in self.queue for group in self.gone)
        counts = Counter(group.tenant for group in self.model.groups)
        assert [self.queue.num_waiting_of(tenant) for tenant in TENANTS] == [counts[tenant] for tenant in TENANTS]
        assert self.queue.num_prompt_tokens == sum(group.num_prompt_tokens for group in self.model.groups)
        for asking in self.model.groups:
            place = asking.priority, asking.tenant
            ahead = [g for g in self.model.groups if g.priority < place[0] or (g.priority, g.tenant) == place]
            assert self.queue.work_ahead_of(asking)[:2] == (len(ahead), sum(g.num_prompt_tokens for g in ahead))


TestWaitingQueue = WaitingQueueMachine.TestCase
TestWaitingQueue.settings = settings(stateful_step_count=30)

weights = st.floats(0.1, 10.0)
sizes = st.integers(1, 100)


@given(weight_a=weights, weight_b=weights, prompts=st.lists(sizes, min_size=40, max_size=120))
def test_two_backlogged_tenants_stay_within_one_largest_request_of_their_shares(
    weight_a: float, weight_b: float, prompts: list[int]
) -> None:
    queue = WaitingQueue(FcfsPolicy(), shares_of({"a": weight_a, "b": weight_b}))
    for arrival, num_prompt_tokens in enumerate(prompts):
        for tenant in ("a", "b"):
            number = 2 * arrival + (tenant == "b")
            queue.add(waiting_group(number, tenant, num_prompt_tokens=num_prompt_tokens))
    served = {"a": 0, "b": 0}
    bound = max(prompts) / min(weight_a, weight_b)

    while queue.num_waiting_of("a") and queue.num_waiting_of("b"):
        group = take(queue)
        served[group.tenant] += group.num_prompt_tokens
        assert abs(served["a"] / weight_a - served["b"] / weight_b) <= bound * (1 + 1e-9)


@given(
    weight_a=weights,
    weight_b=weights,
    num_slots=st.integers(1, 8),
    requests=st.lists(st.tuples(sizes, st.integers(0, 30)), min_size=30, max_size=80),
)
def test_with_outputs_charged_as_they_come_the_bound_is_what_may_run_at_once(
    weight_a: float, weight_b: float, num_slots: int, requests: list[tuple[int, int]]
) -> None:
    """The paper's bound: nobody is ahead by more than was charged for what ran since its last turn."""
    queue = WaitingQueue(FcfsPolicy(), shares_of({"a": weight_a, "b": weight_b}))
    num_output_tokens = {}
    for number, (num_prompt_tokens, num_outputs) in enumerate((*requests, *requests)):
        num_output_tokens[number] = num_outputs
        tenant = "ab"[number >= len(requests)]
        queue.add(waiting_group(number, tenant, num_prompt_tokens=num_prompt_tokens))
    running: dict[SequenceGroup, int] = {}
    served = {"a": 0, "b": 0}
    bound = num_slots * max(map(sum, requests)) / min(weight_a, weight_b)

    while queue.num_waiting_of("a") and queue.num_waiting_of("b"):
        while len(running) < num_slots and queue.num_waiting_of("a") and queue.num_waiting_of("b"):
            group = take(queue)
            served[group.tenant] += group.num_prompt_tokens
            running[group] = num_output_tokens[group.arrival]
        running = {group: num_left - 1 for group, num_left in running.items() if num_left}
        for group in running:
            queue.charge(group.tenant, 1)
            served[group.tenant] += 1
        assert abs(served["a"] / weight_a - served["b"] / weight_b) <= bound * (1 + 1e-9)


@given(
    num_groups=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    history=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 500)), max_size=30),
    num_taken=st.integers(0, 40),
    num_prompt_tokens=sizes,
)
def test_a_newcomer_waits_for_at_most_one_request_of_each_tenant_whatever_their_bursts(
    num_groups: list[int], history: list[tuple[int, int]], num_taken: int, num_prompt_tokens: int
) -> None:
    arrivals = count()
    queue = WaitingQueue(FcfsPolicy())
    for tenant, num in enumerate(num_groups):
        for _ in range(num):
            queue.add(waiting_group(next(arrivals), f"{tenant}", num_prompt_tokens=num_prompt_tokens))
    for tenant, num_tokens in history:
        queue.charge(f"{tenant}", num_tokens)
    for _ in range(min(num_taken, sum(num_groups))):
        take(queue)
    newcomer = waiting_group(next(arrivals), "newcomer")
    queue.add(newcomer)

    ahead = []
    while (group := take(queue)) is not newcomer:
        ahead.append(group.tenant)

    assert max(Counter(ahead).values(), default=0) <= 1


@given(
    num_served_tokens=st.integers(0, 500),
    weights_of=st.lists(weights, min_size=2, max_size=5),
    prompts=st.lists(sizes, min_size=1, max_size=50),
)
def test_nobody_starves_while_the_others_never_stop_asking(
    num_served_tokens: int, weights_of: list[float], prompts: list[int]
) -> None:
    """Once the others have what the patient tenant had, by weight, and one request each, it is its turn."""
    names = [f"{number}" for number in range(len(weights_of))]
    queue = WaitingQueue(FcfsPolicy(), shares_of(dict(zip(names, weights_of, strict=True))))
    arrivals = count()
    for name in names:
        queue.add(waiting_group(next(arrivals), name, num_prompt_tokens=prompts[0]))
    patient = next(iter(queue))
    queue.charge(patient.tenant, num_served_tokens)
    served: Counter[str] = Counter()

    while (group := take(queue)) is not patient:
        served[group.tenant] += group.num_prompt_tokens
        for name in {group.tenant, names[len(served) % len(names)]} - {patient.tenant}:
            arrival = next(arrivals)
            queue.add(waiting_group(arrival, name, num_prompt_tokens=prompts[arrival % len(prompts)]))

        share = num_served_tokens / weights_of[0]
        for name, num_tokens in served.items():
            assert num_tokens <= share * weights_of[int(name)] * (1 + 1e-9) + max(prompts)


@given(prompts=st.lists(sizes, min_size=20, max_size=60), num_idle_turns=st.integers(0, 20))
def test_from_its_return_on_an_idle_tenant_gets_its_share_and_no_more(prompts: list[int], num_idle_turns: int) -> None:
    queue = WaitingQueue(FcfsPolicy())
    arrivals = count()
    queue.add(waiting_group(next(arrivals), "idle"))
    for num_prompt_tokens in (*prompts, *prompts):
        queue.add(waiting_group(next(arrivals), "busy", num_prompt_tokens=num_prompt_tokens))
    for _ in range(1 + num_idle_turns):
        take(queue)
    for num_prompt_tokens in prompts:
        queue.add(waiting_group(next(arrivals), "idle", num_prompt_tokens=num_prompt_tokens))
    served = {"idle": 0, "busy": 0}

    while queue.num_waiting_of("idle") and queue.num_waiting_of("busy"):
        group = take(queue)
        served[group.tenant] += group.num_prompt_tokens
        assert abs(served["idle"] - served["busy"]) <= max(prompts) + 1, "the one token is that of its first request"
