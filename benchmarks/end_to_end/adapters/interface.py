"""What an adapter is, and the messages between it and the benchmark: one JSON object a line."""

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from benchmarks.end_to_end.workloads import Request


@dataclass(frozen=True, slots=True)
class Options:
    """How an engine is started."""

    model: str  # what it loads: a directory or a file
    number_format: str  # of its weights, as it calls it
    num_threads: int  # equal for all engines
    cores: list[int]  # the cores that it may use
    max_tokens: int  # longest sequence of all workloads
    program: str = ""  # an executable of the engine, where it is no Python package; else ""
    kv_cache_gib: int = 2  # room for keys and values, where an engine wants to be told


@dataclass(frozen=True, slots=True)
class Description:
    """What runs: versions of packages, and every setting that is not the engine's default."""

    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """What became of the requests of one workload."""

    seconds: float  # from the first request sent to the last token there
    first_token_s: list[float]  # of each request, seconds until its first token; empty: the engine does not say
    output_tokens: list[int]  # number of tokens that each request got
    token_ids: list[list[int]] = field(default_factory=list)  # the ids; empty: the engine does not say


class Engine(Protocol):
    """One engine: made with `Options`, started once, asked any number of times, stopped."""

    def start(self) -> Description:
        """Load the model and return when requests can be sent."""

    def generate(self, requests: list[Request]) -> Generation:
        """Compute requests that arrive at once, and measure."""

    def stop(self) -> None:
        """End what was started; also after a failed start."""


Message: TypeAlias = dict[str, Any]
