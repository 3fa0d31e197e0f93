"""What a driver is given by the configuration, and what it asks of its owner, the engine. Read next: `driver.py`."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.results import StepUpdates
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.executors.session import ExecutorSession

if TYPE_CHECKING:
    from scheduler_svc.executors.driver import ExecutorDriver


class OtherDrivers(Protocol):
    """What a driver asks about those of the other addresses."""

    def holder_of(self, instance_id: str) -> "ExecutorDriver | None":
        """Return the driver that has the executor process with this id, or is about to; None: nobody."""

    @property
    def has_room(self) -> bool:
        """Whether another executor may be attached."""


class DriverOwner(Protocol):
    """What drivers ask of the engine.

    Attributes:
        fleet: Their planners are part of it, and changed by its methods.
    """

    fleet: Fleet

    async def on_addresses_changed(self) -> None:
        """Drivers were started, retired, or are not retired any more."""

    async def admit(self, session: ExecutorSession, address: str) -> ExecutorPlanner:
        """Return a planner for an executor that was just attached.

        Raises: ExecutorRefusedError, ExecutorFaultError, TokenizerFileError: it cannot be used.
        """

    async def on_attached(self, driver: "ExecutorDriver") -> None:
        """The driver has a planner from now on."""

    async def on_detached(self, driver: "ExecutorDriver") -> None:
        """The driver has no planner any more, or got none."""

    def deliver(self, planner: ExecutorPlanner, updates: StepUpdates) -> None:
        """Give what a step of the planner brought to the requests; some may have ended since it was processed."""

    def schedule(self, planner: ExecutorPlanner, address: str, now_s: float) -> StepInFlight | None:
        """Return the next step of the planner of an address, None: nothing to do. The requests that it gave up end."""

    def take_back(self, planner: ExecutorPlanner, address: str, cause: str, *, was_probed: bool) -> bool:
        """The executor is lost or retired, and why: keep the requests of its planner for another one.

        `was_probed`: right before it was attached. Returns whether only a probe can say if a request is to blame.
        """

    def on_probed(self, address: str, *, works: bool) -> None:
        """The executor at an address, which has to prove itself, has run a probe, or was lost with it."""

    def fail_all(self, planner: ExecutorPlanner | None) -> None:
        """A bug of ours: end the requests of the planner, if there was one, without asking it any more."""

    def dispatch(self) -> None:
        """Groups may stand in line: give them to planners that have room, and set `work` of their drivers."""


class FaultPoint(enum.Enum):
    """A moment in the life of a step at which `tests/chaos` kills a process."""

    BEFORE_SEND = "the step is decided, and not sent"
    AFTER_SEND = "the step is sent"
    AFTER_ANSWER = "the answer has come, and is not processed"


# Called with the point and the address of the executor.
AtFaultPoint = Callable[[FaultPoint, str], None]


def no_fault(_point: FaultPoint, _address: str) -> None:
    """Go on: no fault is planned."""


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """What a driver takes from the configuration.

    Attributes:
        steps_in_flight: Most steps sent and not answered; None: as many as the link asks for.
        checks_batch_table: Whether steps carry a digest for the executor to compare.
        retry_interval_s: Longest time between two attempts to attach, in seconds.
        max_executors: Most executors that one scheduler attaches to; None: any number.
        at_fault_point: Called at each fault point of each step; tests kill processes there, and no setting has it.
    """

    steps_in_flight: int | None = None
    checks_batch_table: bool = False
    retry_interval_s: float = 0.5
    max_executors: int | None = None
    at_fault_point: AtFaultPoint = no_fault
