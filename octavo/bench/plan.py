"""Which requests a load has, and when each is sent; all but their prompts' tokens is known before the first is sent."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.bench.config import MAX_NUM_REQUESTS, BenchConfig, BenchError
from octavo.bench.record import PlannedRequest, TargetInfo


def arrival_times(rate: float, burstiness: float, count: int, generator: np.random.Generator) -> list[float]:
    """Return the times of so many arrivals, in seconds from the beginning, ascending.

    The gaps are independent, with mean 1 / rate and squared coefficient of variation 1 / burstiness. With burstiness 1
    they are exponential: a Poisson process.

    Args:
        rate: Arrivals a second, above 0.
        burstiness: Shape of the gamma distribution, above 0. Below 1: in bursts; above 1: more even than Poisson.
        count: How many.
        generator: Where the gaps come from.
    """
    gaps = generator.gamma(burstiness, 1 / (rate * burstiness), count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def arrival_times_until(
    duration_s: float, rate: float, burstiness: float, generator: np.random.Generator
) -> list[float]:
    """Return the arrivals before `duration_s`: the first ones that `arrival_times` would return."""
    # In chunks of one size, so that the same seed gives the same gaps whatever the duration is.
    begin_s = 0.0
    times: list[float] = []
    while begin_s < duration_s:
        chunk = arrival_times(rate, burstiness, _CHUNK, generator)
        times += (begin_s + time_s for time_s in chunk)
        begin_s = times[-1]
    return [time_s for time_s in times if time_s < duration_s]


_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """A prompt, and the output tokens to ask for; None: as --output-len says."""

    prompt: str
    max_tokens: int | None


def load_dataset(path: Path) -> list[DatasetEntry]:
    """Return the entries of a file, in its order; other fields and empty lines are passed over.

    Raises:
        BenchError: the file cannot be read, or a line is no entry; with its number.
    """
    try:
        # Not splitlines(): JSON may have other line separators, such as U+2028, inside of a text.
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BenchError(f"the dataset {path} cannot be read: {reason}") from error
    entries = [_to_entry(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise BenchError(f"the dataset {path} has no prompt")
    return entries


def _to_entry(line: str, place: str) -> DatasetEntry:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{place} is not JSON: {error}") from error
    prompt = fields.get("prompt") if isinstance(fields, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise BenchError(f'{place}: no object with a text as "prompt", such as {{"prompt": "Why?"}}')
    max_tokens = fields.get("max_tokens")
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        raise BenchError(f'{place}: "max_tokens" is {max_tokens!r}; it must be a whole number, at least 1')
    return DatasetEntry(prompt, max_tokens)


# Short and common: nearly every tokenizer has one token for each, with the space in front of it.
_WORDS_IN_A_ROW = (
    "about after again air all also always and animal another answer any are area ask away back ball base bed "
    "before began being best better big bird black blue boat body book both box boy bring build but call came can "
    "car care case cat change children city class clear close cold color come common could country course cut dark "
    "day did different do does dog done door down draw dry each early earth east easy eat end enough even ever "
    "every example eye face fact fall family far farm fast father feel feet few field find fine fire first fish "
    "five food foot for force form found four free friend from front full game gave get girl give go gold good "
    "got great green ground group grow had half hand hard has have head hear help her here high him his hold home "
    "horse hot hour house how idea if in inch is it just keep kind king know land large last late"
)
WORDS = _WORDS_IN_A_ROW.split()

# What a generator is for; together with the seed it says what comes out of it.
STREAM_ARRIVALS, STREAM_INPUT_LENGTHS, STREAM_OUTPUT_LENGTHS, STREAM_PREFIX, STREAM_PROMPT = range(5)


def ordinary_token_ids(vocab_size: int) -> range:
    """Return the middle three quarters of a vocabulary: special tokens are at one of its ends."""
    return range(vocab_size // 8, max(vocab_size - vocab_size // 8, vocab_size // 8 + 1))


class Prompts:
    """Makes the prompts of a load; each depends on its arguments only, not on those made before.

    Args:
        token_ids: Which ids prompts are made of; None: they are text of `WORDS`.
        seed: Of the whole load.
        phase: Equal seeds give other prompts in another phase, but the same shared prefixes.
        prefix_len: Tokens, or words, that many prompts begin with.
        num_prefixes: How many such beginnings there are; each prompt has one of them, chosen at random.
    """

    def __init__(
        self, token_ids: range | None, *, seed: int, phase: int = 0, prefix_len: int = 0, num_prefixes: int = 1
    ) -> None:
        self._range = range(len(WORDS)) if token_ids is None else token_ids
        self._is_text = token_ids is None
        self._seed = seed
        self._phase = phase
        self._prefix_len = prefix_len
        self._num_prefixes = num_prefixes
        self._prefix = cache(self._make_prefix)

    def make(self, index: int, length: int) -> str | list[int]:
        """Return the prompt of a request: the shared prefix and so many tokens, or words, of its own."""
        generator = np.random.default_rng([self._seed, self._phase, STREAM_PROMPT, index])
        ids = self._draw(generator, length)
        if self._prefix_len:
            ids = np.concatenate([self._prefix(int(generator.integers(self._num_prefixes))), ids])
        values: list[int] = ids.tolist()
        return " ".join(WORDS[value] for value in values) if self._is_text else values

    def _make_prefix(self, number: int) -> NDArray[np.int64]:
        return self._draw(np.random.default_rng([self._seed, 0, STREAM_PREFIX, number]), self._prefix_len)

    def _draw(self, generator: np.random.Generator, length: int) -> NDArray[np.int64]:
        return generator.integers(self._range.start, self._range.stop, length)


DEFAULT_NUM_REQUESTS = 64

# Of a closed loop that is given a duration only; more than one sender can send.
_MOST_REQUESTS_A_SECOND = 5_000

# Prompts of different phases differ, so that no part of a load finds another one's in the server's cache.
_MEASURED, _WARMUP, _PROBE = range(3)

_PROBE_LEN = 8  # beside a dataset
_MAX_SHORT_PROBE_LEN = 16  # where the limit is known, and lengths are checked without sending
_MAX_LONG_PROBE_LEN = 2048  # where it is not; a longer one takes too long


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a load."""

    output_lens: list[int]  # output tokens that each request asks for
    prompt_lens: list[int]  # length of each request's own part of the prompt; empty with a dataset
    prefix_len: int  # length of the shared prefix in front of it
    arrivals_s: list[float] | None  # when each is sent, in seconds from the beginning; None: a closed loop
    concurrency: int | None  # clients of a closed loop; None: an open one
    duration_s: float | None  # when sending ends; None: with the last request
    prompts: Prompts  # makes the prompts
    dataset: Sequence[DatasetEntry]  # the prompts, instead, in a circle

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
    """Return the warm-up requests: the same load with other prompts."""
    arrivals_s = None
    if config.rate is not None:
        generator = np.random.default_rng([config.seed, _WARMUP, STREAM_ARRIVALS])
        arrivals_s = arrival_times(config.rate, config.burstiness, config.warmup, generator)
    return _plan(config, info, dataset, phase=_WARMUP, count=config.warmup, arrivals_s=arrivals_s)


def plan_probe(config: BenchConfig, info: TargetInfo, plans: Sequence[Plan]) -> Plan:
    """Return one request for one token, which shows whether requests are answered.

    Its prompt differs from all others, and is short, unless the server does not say how much it takes: then it is as
    long as the longest random prompt of the plans, up to a limit, so that a server that takes less refuses it.
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
