"""What an adapter is, and the messages between it and the benchmark: one JSON object a line."""

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from benchmarks.end_to_end.workloads import Request


@dataclass(frozen=True, slots=True)
class Options:
    """How an engine is started.

    Attributes:
        model: What it loads: a directory or a file.
        number_format: Of its weights, as it calls it.
        num_threads: Equal for all engines.
        cores: The cores that it may use.
        max_tokens: Longest sequence of all workloads.
        program: An executable of the engine, where it is no Python package; else "".
        kv_cache_gib: Room for keys and values, where an engine wants to be told.
    """

    model: str
    number_format: str
    num_threads: int
    cores: list[int]
    max_tokens: int
    program: str = ""
    kv_cache_gib: int = 2


@dataclass(frozen=True, slots=True)
class Description:
    """What runs: versions of packages, and every setting that is not the engine's default."""

    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """What became of the requests of one workload.

    Attributes:
        seconds: From the first request sent to the last token there.
        first_token_s: Of each request, seconds until its first token; empty: the engine does not say.
        output_tokens: Number of tokens that each request got.
        token_ids: The ids; empty: the engine does not say.
    """

    seconds: float
    first_token_s: list[float]
    output_tokens: list[int]
    token_ids: list[list[int]] = field(default_factory=list)


class Engine(Protocol):
    """One engine: made with `Options`, started once, asked any number of times, stopped."""

    def start(self) -> Description:
        """Load the model and return when requests can be sent."""

    def generate(self, requests: list[Request]) -> Generation:
        """Compute requests that arrive at once, and measure."""

    def stop(self) -> None:
        """End what was started; also after a failed start."""


Message: TypeAlias = dict[str, Any]
