"""Requests of every kind, and what comes of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from octavo import Client, SamplingParams
from octavo.values.outputs import Accepted, Delta, Event, FailedRequest, Finished, Output, PromptLogprobs

NUM_TOKENS = 48
NUM_PROMPT_TOKENS = 20
NUM_LONG_PROMPT_TOKENS = 150

REQUESTS = [
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2),
    SamplingParams(temperature=0.9, seed=1, max_tokens=NUM_TOKENS, min_tokens=24, stop=[*"aeiou0123456789"]),
    SamplingParams(temperature=1.0, seed=2, max_tokens=NUM_TOKENS, n=3, logprobs=0),
    SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, n=2, best_of=4),
    SamplingParams(max_tokens=NUM_TOKENS, beam_width=4, n=2, logprobs=0),
    SamplingParams(max_tokens=NUM_TOKENS, beam_width=2, length_penalty=0.5, early_stopping=True),
    SamplingParams(temperature=0.7, seed=4, max_tokens=NUM_TOKENS, repetition_penalty=1.2, presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logit_bias={97: 5.0}, banned_words=["zz"]),
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, prompt_logprobs=1),
]
STOPPED_BY_STRING, WITH_LONG_PROMPT = 1, 8

# Two that run beside the others where a test asks for them: they want more than a small executor holds. The last one is
# on a stream for many.
NUM_LONG_TOKENS = 1000
LONG = SamplingParams(temperature=0.0, max_tokens=NUM_LONG_TOKENS, ignore_eos=True)
WITH_LONG = [*REQUESTS, LONG, LONG]


@dataclass(slots=True)
class Stream:
    """What came of one request so far, by output, as it was streamed."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    outputs: tuple[Output, ...] = ()
    is_accepted: bool = field(default=False, compare=False)
    num_cached_tokens: int = field(default=0, compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(map(len, self.token_ids.values()))

    def summary(self) -> list[object]:
        """All that any release has of it, as JSON."""
        ends = [[list(output.token_ids), output.text, str(output.finish_reason)] for output in self.outputs]
        return [sorted(self.token_ids.items()), sorted(self.texts.items()), self.prompt_logprobs, ends]


def prompt_of(index: int) -> list[int]:
    """Return the prompt of a request; no two begin alike, since the fake cannot tell equal histories apart."""
    num_tokens = NUM_LONG_PROMPT_TOKENS if index == WITH_LONG_PROMPT else NUM_PROMPT_TOKENS
    return [65 + index, *(97 + i % 26 for i in range(num_tokens - 1))]


async def events_of(client: Client, index: int) -> AsyncIterator[Event]:
    """Run a request; yield its events."""
    prompt, params = prompt_of(index), WITH_LONG[index]
    if index < len(WITH_LONG) - 1:
        async for event in client.stream(prompt, params):
            yield event
        return
    async for _, each in client.stream_many([prompt], params):
        if isinstance(each, FailedRequest):
            raise each.error
        yield each


async def watch(client: Client, index: int, stream: Stream) -> None:
    """Run a request to its end and keep what comes."""
    async for event in events_of(client, index):
        if isinstance(event, Accepted):
            stream.is_accepted = True
        elif isinstance(event, Delta):
            stream.token_ids.setdefault(event.output_index, []).extend(event.token_ids)
            stream.texts[event.output_index] = stream.texts.get(event.output_index, "") + event.text
        elif isinstance(event, PromptLogprobs):
            stream.prompt_logprobs += event.logprobs
        elif isinstance(event, Finished):
            stream.outputs = tuple(event.outputs)
            stream.num_cached_tokens = event.usage.num_cached_tokens


async def run_all(client: Client, streams: list[Stream]) -> None:
    """Run every request at once, each into its stream; the long ones, too, if they have one."""
    async with asyncio.TaskGroup() as group:
        for index, stream in enumerate(streams):
            group.create_task(watch(client, index, stream))


async def until_all_stream(streams: list[Stream], num_tokens: int, is_over: Callable[[], bool]) -> None:
    """Return once every request that streams before its end has so many tokens, or it is over."""
    shown = [s for s, params in zip(streams, WITH_LONG, strict=False) if not (params.beam_width or params.best_of)]
    while min(stream.num_tokens for stream in shown) < num_tokens and not is_over():
        await asyncio.sleep(0.001)
