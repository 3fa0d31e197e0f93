"""Which requests a load has, all of them known before the first one is sent, but for their prompts' tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.bench.arrivals import arrival_times, arrival_times_until
from octavo.bench.config import MAX_NUM_REQUESTS, BenchConfig
from octavo.bench.dataset import DatasetEntry
from octavo.bench.errors import BenchError
from octavo.bench.prompts import (
    STREAM_ARRIVALS,
    STREAM_INPUT_LENGTHS,
    STREAM_OUTPUT_LENGTHS,
    Prompts,
    ordinary_token_ids,
)
from octavo.bench.record import PlannedRequest, TargetInfo

DEFAULT_NUM_REQUESTS = 64

# Of a closed loop that is given a duration only; more than one sender can send.
_MOST_REQUESTS_A_SECOND = 5_000

# Prompts of different phases differ, so that no part of a load finds another one's in the server's cache.
_MEASURED, _WARMUP, _PROBE = range(3)

_PROBE_LEN = 8  # beside a dataset
_MAX_SHORT_PROBE_LEN = 16  # where the limit is known, and lengths are checked without sending
_MAX_LONG_PROBE_LEN = 2048  # where it is not; nobody wants to wait for a longer one


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a load.

    Attributes:
        output_lens: Output tokens that each request asks for.
        prompt_lens: Length of each request's own part of the prompt; empty with a dataset.
        prefix_len: Length of the shared prefix in front of it.
        arrivals_s: When each is sent, in seconds from the beginning; None: a closed loop.
        concurrency: Clients of a closed loop; None: an open one.
        duration_s: When sending ends; None: with the last request.
        prompts: Makes the prompts.
        dataset: The prompts, instead, in a circle.
    """

    output_lens: list[int]
    prompt_lens: list[int]
    prefix_len: int
    arrivals_s: list[float] | None
    concurrency: int | None
    duration_s: float | None
    prompts: Prompts
    dataset: Sequence[DatasetEntry]

    def __len__(self) -> int:
        return len(self.output_lens)

    def requests(self) -> Iterator[PlannedRequest]:
        """Make the requests one after another, in the order in which they are sent."""
        for index, output_len in enumerate(self.output_lens):
            scheduled_s = None if self.arrivals_s is None else self.arrivals_s[index]
            if self.dataset:
                prompt = self.dataset[index % len(self.dataset)].prompt
                yield PlannedRequest(index, prompt, None, output_len, scheduled_s)
            else:
                length = self.prompt_lens[index]
                made = self.prompts.make(index, length)
                yield PlannedRequest(index, made, self.prefix_len + length, output_len, scheduled_s)

    def check_fits(self, info: TargetInfo) -> None:
        """Refuse requests that are longer than the model's context, if they are sure to be sent.

        A closed loop that ends by time has more requests than it sends: of those behind its clients' first ones the
        server refuses what is too long, and the report counts it as failed.

        Raises:
            BenchError: one is; with the lengths and the limit.
        """
        if info.max_model_len is None:
            return
        is_cut_by_time = self.arrivals_s is None and self.duration_s is not None
        for index, output_len in enumerate(self.output_lens[: self.concurrency if is_cut_by_time else None]):
            prompt_len = self.prefix_len + self.prompt_lens[index] if self.prompt_lens else 0
            if prompt_len + output_len > info.max_model_len:
                prompt = f"{prompt_len} prompt tokens and " if prompt_len else ""
                raise BenchError(
                    f"request {index + 1} of the load has {prompt}{output_len} output tokens, and {info.model_id} "
                    f"takes at most {info.max_model_len} tokens in all: bound the lengths"
                )


def plan_load(config: BenchConfig, info: TargetInfo, dataset: Sequence[DatasetEntry]) -> Plan:
    """Return the requests that count."""
    seed = [config.seed, _MEASURED]
    generator = np.random.default_rng([*seed, STREAM_ARRIVALS])
    arrivals_s = None
    count = config.num_requests
    if count is None and config.duration_s is None:
        count = len(dataset) or DEFAULT_NUM_REQUESTS
    if config.rate is not None:
        if count is not None:
            arrivals_s = arrival_times(config.rate, config.burstiness, count, generator)
            if config.duration_s is not None:
                arrivals_s = [time_s for time_s in arrivals_s if time_s < config.duration_s]
        else:
            assert config.duration_s is not None
            arrivals_s = arrival_times_until(config.duration_s, config.rate, config.burstiness, generator)
        count = len(arrivals_s)
    elif count is None:
        assert config.concurrency is not None
        assert config.duration_s is not None
        count = round(min(MAX_NUM_REQUESTS, config.concurrency + config.duration_s * _MOST_REQUESTS_A_SECOND))
    return _plan(config, info, dataset, phase=_MEASURED, count=count, arrivals_s=arrivals_s)


def plan_warmup(config: BenchConfig, info: TargetInfo, dataset: Sequence[DatasetEntry]) -> Plan:
    """Return the requests before those: the same load with other prompts."""
    arrivals_s = None
    if config.rate is not None:
        generator = np.random.default_rng([config.seed, _WARMUP, STREAM_ARRIVALS])
        arrivals_s = arrival_times(config.rate, config.burstiness, config.warmup, generator)
    return _plan(config, info, dataset, phase=_WARMUP, count=config.warmup, arrivals_s=arrivals_s)


def plan_probe(config: BenchConfig, info: TargetInfo, plans: Sequence[Plan]) -> Plan:
    """Return one request for one token, which shows whether requests are answered.

    Its prompt is unlike all of theirs, and short, unless the server does not say how much it takes: then it is as
    long as the longest random one of the plans, up to a limit, so that a server that takes less refuses it.
    """
    longest = max((plan.prefix_len + length for plan in plans for length in plan.prompt_lens), default=_PROBE_LEN)
    probe_len = min(longest, _MAX_LONG_PROBE_LEN if info.max_model_len is None else _MAX_SHORT_PROBE_LEN)
    return Plan(
        output_lens=[1],
        prompt_lens=[probe_len],
        prefix_len=0,
        arrivals_s=None,
        concurrency=1,
        duration_s=None,
        prompts=Prompts(_token_ids(info), seed=config.seed, phase=_PROBE),
        dataset=(),
    )


def _token_ids(info: TargetInfo) -> range | None:
    return None if info.vocab_size is None else ordinary_token_ids(info.vocab_size)


def _plan(
    config: BenchConfig,
    info: TargetInfo,
    dataset: Sequence[DatasetEntry],
    *,
    phase: int,
    count: int,
    arrivals_s: list[float] | None,
) -> Plan:
    seed = [config.seed, phase]
    output_lens = config.output_len.draw(np.random.default_rng([*seed, STREAM_OUTPUT_LENGTHS]), count)
    prompt_lens: list[int] = []
    if dataset:
        given = [dataset[index % len(dataset)].max_tokens for index in range(count)]
        output_lens = [ours or drawn for ours, drawn in zip(given, output_lens, strict=True)]
    else:
        prompt_lens = config.input_len.draw(np.random.default_rng([*seed, STREAM_INPUT_LENGTHS]), count)
    prompts = Prompts(
        _token_ids(info),
        seed=config.seed,
        phase=phase,
        prefix_len=config.shared_prefix_len,
        num_prefixes=config.num_prefixes,
    )
    return Plan(
        output_lens=output_lens,
        prompt_lens=prompt_lens,
        prefix_len=0 if dataset else config.shared_prefix_len,
        arrivals_s=arrivals_s,
        concurrency=config.concurrency,
        duration_s=config.duration_s if phase == _MEASURED else None,
        prompts=prompts,
        dataset=dataset,
    )
