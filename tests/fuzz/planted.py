"""Targets that fail, for the test of the driver."""

import os
import time
from collections.abc import Sequence

from tests.fuzz.target import Case, Target


class Planted(Target):
    """Fails at bytes that hold an A."""

    name = "planted"
    max_seconds = 0.1

    def corpus(self) -> Sequence[Case]:
        return [(b"--A--",)]

    def one(self, case: Case) -> None:
        if b"A" in case[0]:
            raise KeyError("planted")


class Crashing(Planted):
    """Ends its process, as a library in C may."""

    def one(self, case: Case) -> None:
        os._exit(9)


class Hanging(Planted):
    """Comes back too late."""

    def one(self, case: Case) -> None:
        time.sleep(60)
