"""The settings of a driver, and the interface of its owner, the engine. Read next: `driver.py`."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.executors.session import ExecutorSession
from scheduler_svc.executors.transfer_keys import TransferKeys

if TYPE_CHECKING:
    from scheduler_svc.executors.driver import ExecutorDriver


class OtherDrivers(Protocol):
    """The drivers of the other addresses."""

    def holder_of(self, instance_id: str) -> "ExecutorDriver | None":
        """Return the driver that has the executor process with this id, or is about to; None: none has."""

    @property
    def has_room(self) -> bool:
        """Whether another executor may be attached."""

    def transfer_place(self, address: str) -> tuple[str, str]:
        """Return where the executor at an address takes blocks of others, host:port, and its instance id."""

    transfer_keys: TransferKeys


class DriverOwner(Protocol):
    """The engine, for drivers. Their planners are only changed by the methods of `fleet`."""

    fleet: Fleet

    async def on_addresses_changed(self) -> None:
        """Note that drivers were started, retired, or are not retired any more."""

    async def admit(self, session: ExecutorSession, address: str) -> ExecutorPlanner:
        """Return a planner for an executor that was just attached.

        Raises: ExecutorRefusedError, ExecutorFaultError, TokenizerFileError: it cannot be used.
        """

    async def on_attached(self, driver: "ExecutorDriver") -> None:
        """Note that the driver has a planner from now on."""

    async def on_detached(self, driver: "ExecutorDriver") -> None:
        """Note that the driver has no planner any more, or got none."""

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be decided for now; all drivers are woken afterwards."""

    def deliver(self, planner: ExecutorPlanner, updates: StepUpdates) -> None:
        """Give the updates of a step to the requests; some may have ended since it was processed."""

    def schedule(self, planner: ExecutorPlanner, address: str, now_s: float) -> StepInFlight | None:
        """Return the next step of a planner at an address; None: nothing to do. End requests that can never go on."""

    def take_back(self, planner: ExecutorPlanner, address: str, cause: str, *, was_probed: bool) -> bool:
        """Let the requests of a planner whose executor is lost or retired wait for another one; `cause`: why it is.

        `was_probed`: right before it was attached. Returns whether only a probe can say if a request is to blame.
        """

    def on_probed(self, address: str, *, works: bool) -> None:
        """Note that the executor at an address has run a probe, or was lost with it."""

    def fail_all(self, planner: ExecutorPlanner | None) -> None:
        """After a bug of ours, end the requests of the planner, if there was one, without using it any more."""

    def dispatch(self) -> None:
        """Give waiting groups to planners with room, and set `work` of their drivers."""


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
    """The settings of a driver.

    Attributes:
        steps_in_flight: Most steps in flight; None: as `in_flight_limit.py` chooses.
        checks_batch_table: Whether steps carry a digest for the executor to compare.
        retry_interval_s: Longest time between two attempts to attach, in seconds.
        max_executors: Most executors that one scheduler attaches to; None: any number.
        at_fault_point: Called at each fault point of each step, for tests that kill processes there.
    """

    steps_in_flight: int | None = None
    checks_batch_table: bool = False
    retry_interval_s: float = 0.5
    max_executors: int | None = None
    at_fault_point: AtFaultPoint = no_fault
