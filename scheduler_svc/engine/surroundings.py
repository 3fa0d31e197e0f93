"""What the engine takes from the machine that it runs on, beside the clock of its event loop (`process/clock.py`)."""

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PREFIX_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Secrets, randomness and the date; a simulation has its own.

    Attributes:
        prefix_key: Secret of the prefix caches.
        transfer_key: Secret of transfers between executors, another one in each process.
        draw: Returns a random number from 0 to 1, for the pauses before a failed executor is tried again.
        unix_s: Returns the seconds since 1970, for people.
    """

    prefix_key: bytes = field(default_factory=lambda: secrets.token_bytes(PREFIX_KEY_BYTES))
    transfer_key: bytes = field(default_factory=lambda: secrets.token_bytes(PREFIX_KEY_BYTES))
    draw: Callable[[], float] = random.random
    unix_s: Callable[[], float] = time.time
