"""What a load is, as it was asked for: lengths, objectives, numbers, and where reports go.

Needs none of the extra's packages, since the help of the command is made of it.
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import OctavoError

if TYPE_CHECKING:
    import numpy as np


class BenchError(OctavoError):
    """The load cannot be run, or its result is worth nothing; one sentence for a person."""


class RequestFailedError(OctavoError):
    """One request got no complete answer; requests that fail alike have equal messages."""


_LARGEST = 2**31 - 1

FORMS = "N, uniform:MIN:MAX, normal:MEAN:SD[:MIN:MAX] or lognormal:MEAN:SD[:MIN:MAX]"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens."""

    text: str  # as it was given
    shape: str  # "uniform", "normal" or "lognormal"
    mean: float  # mean before rounding and clipping
    deviation: float  # standard deviation of the lengths themselves, also of lognormal ones; uniform ones need none
    minimum: int  # shortest length; what is drawn below becomes it
    maximum: int  # longest length; what is drawn above becomes it

    def draw(self, generator: "np.random.Generator", count: int) -> list[int]:
        """Return so many lengths, rounded to whole tokens and clipped to the limits."""
        if self.shape == "uniform":
            drawn = generator.integers(self.minimum, self.maximum, count, endpoint=True).astype(float)
        elif self.shape == "normal":
            drawn = generator.normal(self.mean, self.deviation, count)
        else:
            # The parameters of the underlying normal distribution that give this mean and deviation.
            variance = math.log1p((self.deviation / self.mean) ** 2)
            drawn = generator.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        lengths: list[int] = drawn.round().clip(self.minimum, self.maximum).astype(int).tolist()
        return lengths


def parse_lengths(text: str) -> Lengths:
    """Return the distribution that a text describes.

    Raises:
        ValueError: it describes none; the message is a sentence with the text and what would be right.
    """
    try:
        return _parse(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a length: {error}") from None


def _parse(text: str) -> Lengths:
    name, *fields = text.strip().split(":")
    if not fields:
        name, fields = "uniform", [name, name]
    if name not in ("uniform", "normal", "lognormal"):
        raise ValueError(f"{name!r} is not a distribution; write {FORMS}")
    if len(fields) not in ((2,) if name == "uniform" else (2, 4)):
        raise ValueError(f"{name} does not take {len(fields)} numbers; write {FORMS}")
    mean = deviation = 0.0
    minimum, maximum = 1, _LARGEST
    if name != "uniform":
        mean, deviation = map(_number, fields[:2])
    if name == "uniform" or len(fields) == 4:
        minimum, maximum = map(_whole, fields[-2:])
    if not 1 <= minimum <= maximum <= _LARGEST:
        raise ValueError(f"lengths go from 1 to {_LARGEST}, the shorter limit first")
    if name != "uniform" and (mean < 1 or deviation < 0):
        raise ValueError("the mean must be at least 1 and the deviation at least 0")
    if max(mean, deviation) > _LARGEST:
        raise ValueError(f"mean and deviation must be at most {_LARGEST}")
    return Lengths(text, name, mean, deviation, minimum, maximum)


def _whole(field: str) -> int:
    if not (field.isascii() and field.isdigit() and len(field) <= 10):
        raise ValueError(f"{field!r} is not a whole number of tokens; write {FORMS}")
    return int(field)


def _number(field: str) -> float:
    try:
        number = float(field)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{field!r} is not a number; write {FORMS}")
    return number


class Metric(StrEnum):
    """What an objective can bound."""

    TTFT = "ttft"
    ITL = "itl"
    TPOT = "tpot"
    E2E = "e2e"


@dataclass(frozen=True, slots=True)
class Slo:
    """The longest that each metric of a good request may take."""

    text: str  # as it was given
    # In seconds, by metric; the ITL's holds for the 99th percentile of the request's own ITLs.
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


class DatasetName(StrEnum):
    """Prompts that come with octavo, sent as chat, with the output tokens that each needs."""

    CHAT = "chat"  # open questions, whose answers repeat nothing
    CODE = "code"  # edit a file that stands in the prompt, and return it whole
    COPY = "copy"  # rewrite, extract from or quote a text that stands in the prompt
    SCHEMA = "schema"  # fill a JSON schema from a short text; the server holds the answer to it

    @property
    def path(self) -> Path:
        """Its file, in the form of every dataset."""
        return Path(__file__).parent / "datasets" / f"{self.value}.jsonl"


# Of one run; what is noted of each request has to fit into memory.
MAX_NUM_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """A load; exactly one of `rate` and `concurrency` is set."""

    rate: float | None  # open loop: mean arrivals a second
    burstiness: float  # open loop: shape of the gamma-distributed gaps; 1: Poisson
    concurrency: int | None  # closed loop: clients that each send their next request when the last one is answered
    # Requests that count; None: what `duration_s` allows, else one for each line of the dataset.
    num_requests: int | None
    # For how long requests are sent; those on their way at the end are waited for. None: no limit.
    duration_s: float | None
    warmup: int  # requests that are sent and answered before and do not count
    seed: int  # equal seeds give equal arrivals, lengths and prompts
    input_len: Lengths  # length of the prompts, without the shared prefix
    output_len: Lengths  # tokens that are asked for
    dataset: Path | DatasetName | None  # JSON lines with prompts, instead of `input_len`
    shared_prefix_len: int  # tokens in front of each prompt that many requests share; 0: none
    num_prefixes: int  # number of different shared prefixes
    temperature: float
    ignore_eos: bool  # whether outputs go on to their full length
    timeout_s: float  # longest that one request may take
    slo: Slo | None  # what a good request is; None: that is not looked at
    compares_speculation: bool = False  # closed loop: whether each request is sent with speculation, and without


STDOUT = Path("-")

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Outputs:
    """What is written beside the table."""

    json: Path | None  # the file of the JSON report; "-": stdout, the table then goes to stderr. None: none
    with_samples: bool  # whether it has every request
    plot: Path | None  # the picture's file; None: none

    def check_writable(self) -> None:
        """Refuse paths that cannot be written; what is there stays as it is.

        Raises:
            BenchError: with the path and the reason.
        """
        for path in (self.json, self.plot):
            if path is not None and path != STDOUT:
                _check_writable(path)


def _check_writable(path: Path) -> None:
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from error
    if is_new:
        path.unlink()
