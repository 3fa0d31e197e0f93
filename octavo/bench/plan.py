"""Which requests a load has, and when each is sent; all but their prompts' tokens is known before the first is sent."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.bench.config import MAX_NUM_REQUESTS, BenchConfig, BenchError, DatasetName, Lengths
from octavo.bench.record import PlannedRequest, TargetInfo
from octavo.values.outputs import ChatMessage, Prompt

_CHUNK = 1024


def arrival_times(
    rate: float,
    burstiness: float,
    generator: np.random.Generator,
    *,
    count: int | None = None,
    duration_s: float | None = None,
) -> list[float]:
    """Return the first so many arrivals, or those before `duration_s`, in seconds from the beginning, ascending.

    The gaps are independent, with mean 1 / rate and squared coefficient of variation 1 / burstiness (the shape of a
    gamma distribution). With burstiness 1 they are exponential: a Poisson process. Below 1 arrivals come in bursts.
    """
    limit_s = math.inf if duration_s is None else duration_s
    times: list[float] = []
    while (not times or times[-1] < limit_s) and (count is None or len(times) < count):
        # In chunks of one size, so that the same seed gives the same gaps whatever the limits are.
        gaps = generator.gamma(burstiness, 1 / (rate * burstiness), _CHUNK)
        times += ((times[-1] if times else 0.0) + np.cumsum(gaps)).tolist()
    return [time_s for time_s in times[:count] if time_s < limit_s]


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """A prompt, and what is asked for."""

    prompt: str
    max_tokens: int | None = None  # output tokens; None: as --output-len says
    json_schema: Mapping[str, Any] | None = None  # what the answer has to follow; None: nothing


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
    json_schema = fields.get("json_schema")
    if json_schema is not None and not isinstance(json_schema, dict):
        raise BenchError(f'{place}: "json_schema" is no object')
    return DatasetEntry(prompt, max_tokens, json_schema)


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
        info: The server; if it has no `vocab_size`, prompts are text of `WORDS`, else ordinary ids of it.
        seed: Of the whole load.
        phase: Equal seeds give other prompts in another phase, but the same shared prefixes.
        prefix_len: Tokens, or words, that many prompts begin with.
        num_prefixes: How many such beginnings there are; each prompt has one of them, chosen at random.
    """

    def __init__(
        self, info: TargetInfo, *, seed: int, phase: int = 0, prefix_len: int = 0, num_prefixes: int = 1
    ) -> None:
        self._is_text = info.vocab_size is None
        self._range = range(len(WORDS)) if info.vocab_size is None else ordinary_token_ids(info.vocab_size)
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
    prompt_lens: list[int]  # in token ids or words, shared prefixes included; empty: texts whose lengths are not known
    make_prompt: Callable[[int], Prompt]  # of the request with that index
    arrivals_s: list[float] | None = None  # when each is sent, in seconds from the beginning; None: a closed loop
    concurrency: int | None = None  # clients of a closed loop; None: an open one
    duration_s: float | None = None  # when sending ends; None: with the last request
    json_schemas: Sequence[Mapping[str, Any] | None] = ()  # what each answer has to follow; empty: nothing
    compares_speculation: bool = False  # whether each request is sent twice, with speculation and without

    def __len__(self) -> int:
        """Return how many requests are sent."""
        return len(self.output_lens) * (2 if self.compares_speculation else 1)

    def requests(self) -> Iterator[PlannedRequest]:
        """Make the requests one after another, in the order in which they are sent."""
        for index, output_len in enumerate(self.output_lens):
            prompt_len = self.prompt_lens[index] if self.prompt_lens else None
            scheduled_s = None if self.arrivals_s is None else self.arrivals_s[index]
            json_schema = self.json_schemas[index] if self.json_schemas else None
            yield PlannedRequest(index, self.make_prompt(index), prompt_len, output_len, scheduled_s, json_schema)

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
            prompt_len = self.prompt_lens[index] if self.prompt_lens else 0
            prompt = f"{prompt_len} prompt tokens and " if prompt_len else ""
            if info.max_encoder_tokens:
                if prompt_len > info.max_encoder_tokens:
                    raise BenchError(
                        f"request {index + 1} of the load has {prompt_len} prompt tokens, and the encoder of "
                        f"{info.model_id} takes at most {info.max_encoder_tokens}: bound the lengths"
                    )
                prompt_len, prompt = 1, "a start token and "  # the decoder's prompt
            if prompt_len + output_len > info.max_model_len:
                raise BenchError(
                    f"request {index + 1} of the load has {prompt}{output_len} output tokens, and {info.model_id} "
                    f"takes at most {info.max_model_len} tokens in all: bound the lengths"
                )


def plan_load(config: BenchConfig, info: TargetInfo, dataset: Sequence[DatasetEntry]) -> Plan:
    """Return the requests that count."""
    count, arrivals_s = config.num_requests, None
    if count is None and config.duration_s is None:
        count = len(dataset) or DEFAULT_NUM_REQUESTS
    if config.rate is not None:
        arrivals_s = arrival_times(
            config.rate,
            config.burstiness,
            np.random.default_rng([config.seed, _MEASURED, STREAM_ARRIVALS]),
            count=count,
            duration_s=config.duration_s,
        )
        count = len(arrivals_s)
    elif count is None:
        assert config.concurrency is not None
        assert config.duration_s is not None
        count = round(min(MAX_NUM_REQUESTS, config.concurrency + config.duration_s * _MOST_REQUESTS_A_SECOND))
    plan = _plan(config, info, dataset, _MEASURED, count, arrivals_s, config.duration_s)
    return replace(plan, compares_speculation=config.compares_speculation)


def plan_warmup(config: BenchConfig, info: TargetInfo, dataset: Sequence[DatasetEntry]) -> Plan:
    """Return the warm-up requests: the same load with other prompts."""
    arrivals_s = None
    if config.rate is not None:
        generator = np.random.default_rng([config.seed, _WARMUP, STREAM_ARRIVALS])
        arrivals_s = arrival_times(config.rate, config.burstiness, generator, count=config.warmup)
    return _plan(config, info, dataset, _WARMUP, config.warmup, arrivals_s, None)


def plan_probe(config: BenchConfig, info: TargetInfo, plans: Sequence[Plan]) -> Plan:
    """Return one request for one token, which shows whether requests are answered.

    Its prompt differs from all others, and is short, unless the server does not say how much it takes: then it is as
    long as the longest random prompt of the plans, up to a limit, so that a server that takes less refuses it.
    """
    longest = max((length for plan in plans for length in plan.prompt_lens), default=_PROBE_LEN)
    length = min(longest, _MAX_LONG_PROBE_LEN if info.max_model_len is None else _MAX_SHORT_PROBE_LEN)
    prompts = Prompts(info, seed=config.seed, phase=_PROBE)
    return Plan([1], [length], lambda index: prompts.make(index, length), concurrency=1)


def _plan(
    config: BenchConfig,
    info: TargetInfo,
    dataset: Sequence[DatasetEntry],
    phase: int,
    count: int,
    arrivals_s: list[float] | None,
    duration_s: float | None,
) -> Plan:
    def drawn(lengths: Lengths, stream: int) -> list[int]:
        return lengths.draw(np.random.default_rng([config.seed, phase, stream]), count)

    output_lens = drawn(config.output_len, STREAM_OUTPUT_LENGTHS)
    if dataset:
        entries = [dataset[index % len(dataset)] for index in range(count)]
        output_lens = [entry.max_tokens or length for entry, length in zip(entries, output_lens, strict=True)]
        is_chat = isinstance(config.dataset, DatasetName) and info.has_chat_template

        def prompt_of(index: int) -> Prompt:
            prompt = entries[index].prompt
            return [ChatMessage(role="user", content=prompt)] if is_chat else prompt

        schemas = [entry.json_schema for entry in entries]
        return Plan(output_lens, [], prompt_of, arrivals_s, config.concurrency, duration_s, schemas)
    own_lens, prefix_len = drawn(config.input_len, STREAM_INPUT_LENGTHS), config.shared_prefix_len
    prompts = Prompts(info, seed=config.seed, phase=phase, prefix_len=prefix_len, num_prefixes=config.num_prefixes)
    return Plan(
        output_lens,
        [prefix_len + length for length in own_lens],
        lambda index: prompts.make(index, own_lens[index]),
        arrivals_s,
        config.concurrency,
        duration_s,
    )
