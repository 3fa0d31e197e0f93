"""The fence around a simulation: what is real is refused, so that a run is a function of its seed.

Code of ours that reads a clock of the machine, starts a thread or opens a socket gets a `RealWorldError`. Libraries
get the virtual time where they only want to know it (logging stamps its records). Whoever draws from the machine's
chance draws from the seed.
"""

import contextlib
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tests.simulation.loop import RealWorldError, SimulationLoop

OURS = ("scheduler_svc", "executor_svc", "octavo_shared", "octavo", "tests")

_CLOCKS = ("time", "monotonic", "perf_counter")
_WAYS_OUT: dict[Any, tuple[str, ...]] = {
    threading.Thread: ("start",),
    socket: ("socket",),
    time: ("sleep",),
    uuid: ("uuid1", "uuid4"),
    random: ("shuffle", "sample", "uniform"),
    os: ("urandom", "fork"),
    subprocess: ("Popen",),
}


@contextlib.contextmanager
def fence(loop: SimulationLoop, seed: str) -> Iterator[None]:
    """Refuse what is real until the block ends; `seed` is that of what the services draw."""
    chance = random.Random(f"chance {seed}")
    drawn: list[tuple[Any, str, Callable[..., object]]] = [
        (time, "thread_time", lambda: 0.0),  # the CPU that a chat template may take: as much as it likes
        (random, "random", chance.random),
        (random, "choice", chance.choice),
        (secrets, "choice", chance.choice),
        (secrets, "randbits", chance.getrandbits),
        (secrets, "token_bytes", chance.randbytes),
        (secrets, "token_hex", lambda num_bytes: chance.randbytes(num_bytes).hex()),
    ]
    with contextlib.ExitStack() as stack:
        for name in _CLOCKS:
            stack.enter_context(mock.patch.object(time, name, _virtual(name, loop.time)))
        for module, name, draw in drawn:
            stack.enter_context(mock.patch.object(module, name, draw))
        for module, names in _WAYS_OUT.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, _refused(f"{module.__name__}.{name}")))
        yield


def _virtual(name: str, clock: Callable[[], float]) -> Callable[[], float]:
    def tell() -> float:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".", 1)[0] in OURS:
            raise RealWorldError(
                f"{caller} reads time.{name}(); shared/octavo_shared/process/clock.py has the time of the loop"
            )
        return clock()

    return tell


def _refused(what: str) -> Callable[..., object]:
    def refuse(*_: object, **__: object) -> object:
        raise RealWorldError(f"{what} does not exist in a simulation")

    return refuse
