"""What a load is, as it was asked for."""

from dataclasses import dataclass
from pathlib import Path

from octavo.bench.lengths import Lengths
from octavo.bench.slo import Slo

# Of one run; what is noted of each request has to fit into memory.
MAX_NUM_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """A load; exactly one of `rate` and `concurrency` is set.

    Attributes:
        rate: Open loop: mean arrivals a second.
        burstiness: Open loop: shape of the gamma-distributed gaps; 1: Poisson.
        concurrency: Closed loop: clients that each send their next request when the last one is answered.
        num_requests: Requests that count; None: what `duration_s` allows, else one for each line of the dataset.
        duration_s: For how long requests are sent; those on their way at the end are waited for. None: no limit.
        warmup: Requests that are sent and answered before and do not count.
        seed: Equal seeds give equal arrivals, lengths and prompts.
        input_len: Length of the prompts, without the shared prefix.
        output_len: Tokens that are asked for.
        dataset: JSON lines with prompts, instead of `input_len`.
        shared_prefix_len: Tokens in front of each prompt that many requests share; 0: none.
        num_prefixes: Number of different shared prefixes.
        temperature: 0: greedy.
        ignore_eos: Whether outputs go on to their full length.
        timeout_s: Longest that one request may take.
        slo: What a good request is; None: that is not looked at.
    """

    rate: float | None
    burstiness: float
    concurrency: int | None
    num_requests: int | None
    duration_s: float | None
    warmup: int
    seed: int
    input_len: Lengths
    output_len: Lengths
    dataset: Path | None
    shared_prefix_len: int
    num_prefixes: int
    temperature: float
    ignore_eos: bool
    timeout_s: float
    slo: Slo | None
