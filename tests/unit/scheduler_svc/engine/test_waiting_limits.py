"""A full queue: who is refused, and who gives way to a tenant that has less than its share of it."""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.fake.worker import FakeWorker
from octavo_shared.errors import QueueFullError
from octavo_shared.grpc.grpc_status import rpc_status
from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.core.waiting.tenant_shares import TenantShare
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.tenants import TenantQuota, Tenants
from scheduler_svc.request.continuation import Continuation
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.request.served_model import ServedModel
from tests.support.driving import small_limits
from tests.support.idle_engine import IdleEngine
from tests.support.live_requests import RecordingSink, sink_of
from tests.support.waiting import waiting_group


class Queue:
    """The queue of an engine whose executor takes nothing."""

    def __init__(
        self,
        most: int,
        *,
        most_tokens: int | None = None,
        of_a_tenant: int = 1000,
        weights: Mapping[str, float] = {},
    ) -> None:
        self.idle = IdleEngine(["a"], small_limits())
        self.engine = self.idle.engine
        self.engine.fleet_model.model = ServedModel(FakeWorker().info, 24, 4)
        self.engine.waiting.settings = replace(
            self.engine.settings,
            max_waiting_requests=most,
            max_waiting_tokens=most_tokens,
        )
        named = {name: TenantQuota(TenantShare(weight), of_a_tenant) for name, weight in weights.items()}
        self.engine.set_tenants(Tenants(named, TenantQuota(max_waiting=of_a_tenant)))
        self.requests: list[LiveRequest] = []

    def fill(self, tenant: str, num: int, *, num_prompt_tokens: int = 1, has_run: bool = False) -> list[LiveRequest]:
        """Let requests wait, whatever the limits say."""
        arrivals = range(self.engine._num_arrivals + 1, self.engine._num_arrivals + 1 + num)
        added = [
            self.idle.add(waiting_group(arrival, tenant, num_prompt_tokens=num_prompt_tokens, has_run=has_run))
            for arrival in arrivals
        ]
        self.requests += added
        self.engine._num_arrivals += num
        return added

    async def submit(self, tenant: str, num_prompt_tokens: int = 1) -> None:
        request_id = f"new{self.engine._num_arrivals}"
        prompt = np.zeros(num_prompt_tokens, np.int32)
        request = EngineRequest(request_id, prompt, SamplingRow(), StopConditions(max_tokens=2), tenant=tenant)
        with self.engine.checking(request_id, tenant) as model:
            before = self.tenants
        assert self.tenants == before, "nobody is displaced before the request was checked"
        await self.engine.submit(request, RecordingSink(), model)

    @property
    def tenants(self) -> Mapping[str, int]:
        return Counter(group.tenant for group in self.engine.queue)


async def test_a_queue_that_one_tenant_fills_takes_others_up_to_their_share() -> None:
    queue = Queue(10)
    reds = queue.fill("red", 10)
    for _ in range(5):
        await queue.submit("blue")
    assert queue.tenants == {"red": 5, "blue": 5}
    for tenant in ("red", "blue"):
        with pytest.raises(QueueFullError, match=r"the waiting queue is full \(10 requests\)"):
            await queue.submit(tenant)
    assert [red.error is None for red in reds] == [True] * 5 + [False] * 5, "the newest ones gave way"

    error = sink_of(reds[-1]).error
    assert str(error) == (
        "the waiting queue of tenant 'red' is full, and the request was displaced by another tenant's request (10 "
        "requests); retry in 1 s"
    )
    assert error is not None
    status = rpc_status(error)
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert any(detail.Unpack(error_details_pb2.RetryInfo()) for detail in status.details)


async def test_shares_are_by_weight_and_the_furthest_above_its_own_gives_way_first() -> None:
    queue = Queue(12, weights={"gold": 4.0})  # shares: gold 8, red and blue 2 each
    queue.fill("gold", 7)
    queue.fill("red", 5)
    await queue.submit("blue")
    assert queue.tenants == {"gold": 7, "red": 4, "blue": 1}
    await queue.submit("gold")
    assert queue.tenants == {"gold": 8, "red": 3, "blue": 1}
    with pytest.raises(QueueFullError):
        await queue.submit("gold")
    await queue.submit("blue")
    assert queue.tenants == {"gold": 8, "red": 2, "blue": 2}


async def test_nothing_that_ran_and_nothing_that_goes_on_gives_way() -> None:
    queue = Queue(4)
    queue.fill("red", 2, has_run=True)
    [plain, continued] = queue.fill("red", 2)
    continued.group.continuation = Continuation()
    await queue.submit("blue")
    assert [request.error is not None for request in queue.requests] == [False, False, True, False]
    with pytest.raises(QueueFullError):
        await queue.submit("blue")
    assert queue.tenants == {"red": 3, "blue": 1}
    assert plain.error is not None


async def test_a_queue_full_of_tokens_gives_way_as_well_by_as_many_requests_as_it_takes() -> None:
    queue = Queue(100, most_tokens=20)
    queue.fill("red", 6, num_prompt_tokens=3)
    await queue.submit("blue", 8)
    assert queue.tenants == {"red": 4, "blue": 1}
    with pytest.raises(QueueFullError, match="20 prompt tokens"):
        await queue.submit("blue", 3)


async def test_one_request_is_within_any_share_and_the_only_one_of_a_tenant_stays() -> None:
    queue = Queue(4, most_tokens=20, weights={"gold": 9.0})
    queue.fill("gold", 4, num_prompt_tokens=5)
    await queue.submit("blue", 7)  # its share is 0.4 requests and 2 tokens
    assert queue.tenants == {"gold": 3, "blue": 1}
    with pytest.raises(QueueFullError):
        await queue.submit("blue", 1)
    with pytest.raises(QueueFullError):
        await queue.submit("red", 1)  # gold has no more than its share now, 3.3 requests


async def test_what_is_being_checked_keeps_nobody_out_beyond_the_share_of_its_tenant() -> None:
    queue = Queue(4)
    with ExitStack() as red, ExitStack() as blue:
        for number in range(4):
            red.enter_context(queue.engine.checking(f"red{number}", "red"))
        for number in range(2):
            blue.enter_context(queue.engine.checking(f"blue{number}", "blue"))
        for name in ("red", "blue"):
            with pytest.raises(QueueFullError, match=r"full \(6 requests\)"):
                await queue.submit(name)
        blue.close()
        await queue.submit("blue")
        assert queue.engine.waiting.tenants_at_share == {"red"}


async def test_one_comes_and_one_goes_however_many_are_being_checked() -> None:
    queue = Queue(10)
    queue.fill("red", 10)
    with queue.engine.checking("blue1", "blue"), queue.engine.checking("blue2", "blue"):
        await queue.submit("blue")
    assert queue.tenants == {"red": 9, "blue": 1}


async def test_the_bound_of_a_tenant_stays_hard() -> None:
    queue = Queue(10, of_a_tenant=2)
    queue.fill("red", 10)
    for _ in range(2):
        await queue.submit("blue")
    with pytest.raises(QueueFullError, match="of tenant 'blue' is full"):
        await queue.submit("blue")


@given(
    held=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1),
    weights=st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.5, 2.0, 4.0])),
    asking=st.sampled_from("abcde"),
)
def test_who_gives_way_had_more_than_its_share_and_who_comes_has_no_more_than_its_own(
    held: dict[str, int], weights: dict[str, float], asking: str
) -> None:
    most = sum(held.values())
    queue = Queue(most, weights=weights)
    for tenant, num in held.items():
        queue.fill(tenant, num)
    unit = most / sum(weights.get(tenant, 1.0) for tenant in {*held, asking})
    shares = {tenant: unit * weights.get(tenant, 1.0) for tenant in {*held, asking}}
    excess = {tenant: num - shares[tenant] for tenant, num in held.items() if num > 1}
    is_within = asking not in held or held[asking] + 1 <= shares[asking]
    try:
        displaced = [group for group, _ in queue.engine.waiting.require_room(asking)]
    except QueueFullError:
        assert not is_within or max(excess.values(), default=0) <= 0
        return
    finally:
        at_share = queue.engine.waiting.tenants_at_share
    assert is_within
    assert asking not in at_share
    [group] = displaced
    assert excess[group.tenant] == max(excess.values()) > 0
    assert group.arrival == max(other.arrival for other in queue.engine.queue if other.tenant == group.tenant)
