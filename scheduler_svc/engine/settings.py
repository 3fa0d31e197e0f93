"""The engine's part of the configuration, and what it takes from the machine that it runs on."""

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.waiting.policy import Policy
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.executors.driver_interface import DriverSettings
from scheduler_svc.executors.serving_limits import PlannerSettings

PREFIX_KEY_BYTES = 32


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


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Secrets, randomness and the date, beside the clock of the event loop; a simulation has its own.

    Attributes:
        prefix_key: Secret of the prefix caches.
        draw: Returns a random number from 0 to 1, for the pauses before a failed executor is tried again.
        unix_s: Returns the seconds since 1970, for people.
    """

    prefix_key: bytes = field(default_factory=lambda: secrets.token_bytes(PREFIX_KEY_BYTES))
    draw: Callable[[], float] = random.random
    unix_s: Callable[[], float] = time.time
