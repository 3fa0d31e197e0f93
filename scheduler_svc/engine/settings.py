"""The engine's part of the configuration."""

from dataclasses import dataclass, field

from scheduler_svc.core.waiting.policy import Policy
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.executors.driver_interface import DriverSettings
from scheduler_svc.executors.serving_limits import PlannerSettings


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of the engine.

    `tenants` holds at the start. `max_waiting_tokens` is how many prompt tokens may wait; None: any number.
    `max_losses` is how often in a row a request may lose its executor while it runs there, `orphan_timeout_s` how long
    a request that no attached executor can take waits. `served_model_name` None: clients know the model by the name
    that its executor gives it.
    """

    planner: PlannerSettings
    driver: DriverSettings
    policy: Policy
    max_waiting_requests: int
    tenants: Tenants = field(default_factory=Tenants)
    has_priorities: bool = False
    max_waiting_tokens: int | None = None
    max_losses: int = 3
    orphan_timeout_s: float = 300.0
    served_model_name: str | None = None
