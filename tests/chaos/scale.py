"""How much of each row is done."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done; all of it by default. A row may leave out what is too little to say anything.

    Attributes:
        minutes: How long faults strike streams.
        fault_every_s: Time from one of them to the next, in seconds.
        absence_limit_s: How long fronts wait for a core, in seconds; None: as in production.
        divisor: So many times fewer kills, requests and clients; 1: all.
    """

    minutes: float = 15.0
    fault_every_s: float = 10.0
    absence_limit_s: float | None = None
    divisor: int = 1

    def part_of(self, number: int) -> int:
        """Return the part of a number that is done, at least 1."""
        return max(1, number // self.divisor)


# About a minute in all. The first faults in the streams through fronts strike the core and a front.
SHORT = Scale(minutes=0.1, fault_every_s=0.0, absence_limit_s=2.0, divisor=32)
