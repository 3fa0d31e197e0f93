"""An engine that drives nobody: cores and requests are put in by hand, for tests that look at it."""

from collections.abc import Sequence

from octavo_shared.grpc.membership import Membership
from octavo_shared.step_wire.executor_info import ExecutorInfo
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import FcfsPolicy, Policy
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.settings import EngineSettings
from scheduler_svc.executors.client import ExecutorClient
from scheduler_svc.executors.driver_interface import DriverSettings
from scheduler_svc.executors.serving_limits import PlannerSettings
from scheduler_svc.executors.session import SessionTimings
from tests.support.live_requests import live_request

TIMINGS = SessionTimings(lease_s=10.0, heartbeat_interval_s=2.0, step_timeout_s=600.0)


async def _load_no_tokenizer(info: ExecutorInfo, fetch: object) -> None:
    raise AssertionError("nobody attaches")


class IdleEngine:
    """An engine with executors that are only looked at, and its requests.

    Args:
        addresses: Executors that there ought to be.
        limits: Of the core of each one; None: they are not attached.
        policy: Of the queue and of the cores; None: first come, first served.

    Attributes:
        readiness: What was told of it, in order.
    """

    def __init__(self, addresses: Sequence[str], limits: CoreLimits | None, policy: Policy | None = None) -> None:
        settings = EngineSettings(
            planner=PlannerSettings(),
            driver=DriverSettings(),
            policy=policy or FcfsPolicy(),
            max_waiting_requests=1000,
        )
        self.readiness: list[bool] = []
        self.engine = Engine(Membership(addresses, 1.0), _client, settings, _load_no_tokenizer, self._set_ready)
        self.planners: list[ExecutorPlanner] = []
        for address in addresses:
            driver = self.engine.drivers.add(address)
            if limits is not None:
                driver.planner = self.engine.fleet.join(limits, epoch=1)
                self.planners.append(driver.planner)

    def join(self, address: str, limits: CoreLimits) -> ExecutorPlanner:
        """Let another executor be attached, and return its core."""
        core = self.engine.fleet.join(limits, epoch=1, name=address)
        self.planners.append(core)
        return core

    def add(self, group: SequenceGroup, *, num_losses: int = 0) -> LiveRequest:
        """Let a request wait, which arrived at second 0 and lost so many executors since."""
        request = live_request(group, num_losses=num_losses)
        self.engine.requests.add(request)
        return request

    async def _set_ready(self, is_ready: bool) -> None:
        self.readiness.append(is_ready)


def _client(address: str) -> ExecutorClient:
    return ExecutorClient(address, "test", TIMINGS, max_message_bytes=2**20)
