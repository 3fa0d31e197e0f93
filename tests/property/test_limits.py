"""Limits and the counts behind them: whatever becomes of requests, each count is that of where all of them are.

Each seed lets two tenants send requests of every kind to an engine with two small executors, which come and go. After
every event `tests/support/counts.py` makes all counts anew, and no limit is exceeded by who has just come in.
"""

import asyncio
import itertools
from collections import Counter, deque
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random

import numpy as np

from executor_svc.fake.worker import FakeWorker
from octavo_shared.errors import OctavoServiceError
from octavo_shared.step_wire.step import PoolingTask, SamplingRow, StepResult
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import PriorityPolicy
from scheduler_svc.core.waiting.tenant_shares import TenantShare
from scheduler_svc.engine.tenants import TenantQuota, Tenants
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from scheduler_svc.request.served_model import ServedModel
from tests.support.counts import check_counts_of_engine, slots_of_tenants
from tests.support.driving import small_limits
from tests.support.idle_engine import IdleEngine
from tests.support.live_requests import RecordingSink
from tests.support.toy_executor import ToyExecutor, hashed_next_token

NUM_SEEDS = 8
NUM_EVENTS = 150
TENANTS = ("red", "red", "blue")
ADDRESSES = ("a:1", "b:1")
LIMITS = replace(
    small_limits(max_num_seqs=4, budget=24, vocab_size=50, blocks=9, host_blocks=24),
    pooling_tasks=(PoolingTask.EMBED,),
    embedding_size=3,
)
KINDS: tuple[dict[str, object], ...] = (
    {},
    {},
    {"num_sequences": 3},
    {"beam_search": BeamSearchParams(beam_width=2)},
    {"pooling": PoolingTask.EMBED, "stop_conditions": StopConditions(max_tokens=0)},
)
EVENTS = {"submit": 4, "step": 8, "result": 7, "abort": 0.5, "check": 1, "lose": 1, "probe": 0.5, "quota": 1.5}


class Play:
    """One engine, and what was done with it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        idle = IdleEngine(ADDRESSES, LIMITS, PriorityPolicy())
        self.engine = idle.engine
        self.model = self.engine.fleet_model.model = ServedModel(FakeWorker().info, LIMITS.max_model_len, 4)
        self.engine.waiting.settings = replace(self.engine.settings, max_waiting_requests=10, max_waiting_tokens=70)
        self.set_quotas()
        self.executors = {planner: self.executor() for planner in idle.planners}
        self.address_of = dict(zip(idle.planners, ADDRESSES, strict=True))
        self.checking: list[tuple[str, AbstractContextManager[ServedModel]]] = []
        self.sinks: list[tuple[str, RecordingSink]] = []
        self.num_searched: Counter[str] = Counter()
        self.num_prompt_tokens: Counter[str] = Counter()
        self.num_taken: Counter[str] = Counter()
        self.slots: dict[str, list[int]] = {}
        self.seen: set[str] = set()
        take = self.engine.token_quotas.take

        def count_taken(tenant: str, num_tokens: int, now_s: float, *, adapter: str = "") -> None:
            self.num_taken[tenant] += num_tokens
            take(tenant, num_tokens, now_s, adapter=adapter)

        self.engine.token_quotas.take = count_taken  # type: ignore[method-assign]

    def executor(self) -> tuple[ToyExecutor, deque[StepResult]]:
        """Return a new executor and its results."""
        return ToyExecutor(LIMITS, hashed_next_token(LIMITS.vocab_size)), deque()

    def set_quotas(self) -> None:
        """Let tenants have other slots, as many tokens as they want, and few requests that wait."""
        most = self.random.choice((2, 4, 8))
        self.engine.set_tenants(Tenants(others=TenantQuota(TenantShare(max_num_seqs=most), 6, 10**9)))

    async def submit(self) -> None:
        """Submit a request, which may be refused."""
        tenant, number = self.random.choice(TENANTS), len(self.sinks)
        prompt = np.arange(self.random.randint(1, 12), dtype=np.int32)
        conditions = StopConditions(max_tokens=self.random.randint(1, 12), ignore_eos=True)
        plain = EngineRequest(f"r{number}", prompt, SamplingRow(), conditions, tenant=tenant)
        request = replace(plain, priority=self.random.randint(0, 1), **self.random.choice(KINDS))  # type: ignore[arg-type]
        sink, limits, waiting = RecordingSink(), self.engine.waiting, self.engine._waiting_requests()
        try:
            await self.engine.submit_checked(request, sink, self.model.info.model_hash, LIMITS.max_model_len)
        except OctavoServiceError:
            return
        self.sinks.append((tenant, sink))
        self.num_prompt_tokens[tenant] += len(prompt)
        now = self.engine._waiting_requests()
        assert len(now) <= max(limits.settings.max_waiting_requests, len(waiting)), "more wait than may"
        assert sum(one.group.tenant == tenant for one in now) <= 6, "more of a tenant wait than may"

    def check(self) -> None:
        """Begin to check a request, or end a check, by which it may be refused."""
        if self.checking and self.random.random() < 0.5:
            _, context = self.checking.pop()
            error = self.random.choice((None, ValueError("refused")))
            context.__exit__(type(error) if error else None, error, None)
            return
        tenant = self.random.choice(TENANTS)
        context = self.engine.checking(f"checked{self.random.random()}", tenant)
        try:
            context.__enter__()
        except OctavoServiceError:
            return
        self.checking.append((tenant, context))

    def step(self, planner: ExecutorPlanner) -> None:
        """Let an executor compute its next step."""
        if len(planner.in_flight) < 3 and (sent := self.engine.schedule(planner, self.address_of[planner], 0.0)):
            executor, results = self.executors[planner]
            results.append(executor.execute(sent.step))

    def result(self, planner: ExecutorPlanner) -> None:
        """Take the oldest result of an executor."""
        if not (results := self.executors[planner][1]):
            return
        updates = self.engine.fleet.process(planner, results.popleft())
        for group in (*updates.advanced_searches, *updates.finished_searches):
            self.num_searched[group.tenant] += 2
        self.engine.deliver(planner, updates)

    def lose(self, planner: ExecutorPlanner) -> None:
        """An executor is lost, and the next one comes to its address."""
        address = self.address_of.pop(planner)
        del self.executors[planner]
        self.engine.take_back(planner, address, "it is lost", was_probed=self.random.random() < 0.7)
        joined = self.engine.fleet.join(LIMITS, epoch=planner.epoch + 1, name=address)
        self.executors[joined], self.address_of[joined] = self.executor(), address

    async def do(self, event: str) -> None:
        """Let something happen, and look at all counts."""
        planner = self.random.choice(self.engine.fleet.planners)
        if event == "submit":
            await self.submit()
        elif event == "check":
            self.check()
        elif event == "step":
            self.step(planner)
        elif event == "result":
            self.result(planner)
        elif event == "lose":
            self.lose(planner)
        elif event == "probe":
            self.engine.on_probed(self.random.choice(ADDRESSES), works=self.random.random() < 0.7)
        elif event == "quota":
            self.set_quotas()
        elif self.engine.requests:
            request = self.random.choice(list(self.engine.requests.values()))
            await self.engine.abort_request(request.request_id, request.group.tenant)
        self.look()

    def look(self) -> None:
        """Assert the counts, and that no tenant has got slots beyond its own."""
        engine = self.engine
        check_counts_of_engine(engine, Counter(tenant for tenant, _ in self.checking))
        parked = [request.group for request in engine.requests.suspects.parked]
        groups = [request.group for request in engine.requests.values()]
        slots = slots_of_tenants(engine.fleet, [group for group in groups if group not in parked])
        for tenant, nums in slots.items():
            most = engine.tenants.of(tenant).share.max_num_seqs or 0
            before = sum(self.slots.get(tenant, []))
            assert len(nums) == 1 or sum(nums) <= max(most, before), f"{tenant} has got more than {most} slots: {nums}"
        self.slots = slots
        num_made = Counter[str]()
        for tenant, sink in self.sinks:
            num_made[tenant] += sum(map(len, sink.token_ids.values()))
        assert self.num_taken == self.num_prompt_tokens + num_made + self.num_searched, "the tokens of tenants"
        self.seen.update(f"parked {_kind_of(group)}" for group in parked)
        for planner in engine.fleet.planners:
            self.seen.update(f"running {_kind_of(group)}" for group in planner.batch.running)
            self.seen.update(f"swapped {_kind_of(group)}" for group in planner.swapped.groups)
            self.seen.update(f"preempted {_kind_of(group)}" for group in planner.preempted.groups)
        self.seen.update(f"waiting {_kind_of(group)}" for group in engine.queue)
        self.seen.update(
            f"dispatched {_kind_of(given.group)}"
            for box in engine.fleet.dispatcher.inboxes
            for given in box.assignments
        )

    async def play(self) -> None:
        """Let much happen, then all end."""
        events, weights = list(EVENTS), list(EVENTS.values())
        for event in self.random.choices(events, weights, k=NUM_EVENTS):
            await self.do(event)
        for number in itertools.count():
            if not self.engine.requests:
                break
            assert number < 1000, "requests do not end"
            await self.do("step")
            await self.do("result")
            if number % 100 == 99:
                self.engine.orphans.look(now_s=1e6 * number)  # what has outgrown every cache
        assert all(sink.ended for _, sink in self.sinks)
        assert not self.slots


def _kind_of(group: SequenceGroup) -> str:
    if group.pooling is not None:
        return "text"
    return "search" if group.beam_search is not None else f"{group.num_sequences} outputs"


def test_every_count_is_that_of_where_all_requests_are_and_no_limit_is_exceeded() -> None:
    seen = set[str]()
    for seed in range(NUM_SEEDS):
        play = Play(seed)
        asyncio.run(play.play())
        seen |= play.seen
    wanted = {
        *(f"{state} 1 outputs" for state in ("parked", "waiting", "dispatched", "running", "preempted")),
        *(f"{state} search" for state in ("waiting", "dispatched", "running", "swapped")),
        *(f"{state} text" for state in ("waiting", "dispatched", "running")),
        "swapped 3 outputs",
    }
    assert wanted <= seen, "the events have to reach every state"
