"""Objectives for single requests: `ttft=200ms,itl=50ms`."""

import math
import re
from dataclasses import dataclass
from enum import StrEnum


class Metric(StrEnum):
    """What an objective can bound."""

    TTFT = "ttft"
    ITL = "itl"
    TPOT = "tpot"
    E2E = "e2e"


@dataclass(frozen=True, slots=True)
class Slo:
    """The longest that each metric of a good request may take.

    Attributes:
        text: As it was given.
        limits_s: In seconds, by metric; the ITL's holds for the 99th percentile of the request's own ITLs.
    """

    text: str
    limits_s: dict[Metric, float]


_ENTRY = re.compile(r"\s*([a-z0-9]+)\s*=\s*([0-9.]+)\s*(ms|s)\s*")


def parse_slo(text: str) -> Slo:
    """Return the objectives that a text describes.

    Raises:
        ValueError: it describes none; the message is a sentence.
    """
    limits_s: dict[Metric, float] = {}
    for entry in text.split(","):
        found = _ENTRY.fullmatch(entry)
        if found is None or found[1] not in list(Metric):
            raise ValueError(
                f"{entry.strip()!r} is not an objective; write METRIC=TIME with {', '.join(Metric)} and ms or s, "
                "such as ttft=200ms,itl=50ms"
            )
        try:
            limit_s = float(found[2]) * (1e-3 if found[3] == "ms" else 1.0)
        except ValueError:
            raise ValueError(f"{entry.strip()!r} is not an objective: {found[2]!r} is not a number") from None
        if limit_s <= 0 or math.isinf(limit_s):
            raise ValueError(f"{entry.strip()!r} is not an objective: the time must be above 0")
        if found[1] in limits_s:
            raise ValueError(f"{text!r} gives {found[1]} twice")
        limits_s[Metric(found[1])] = limit_s
    return Slo(text, limits_s)
