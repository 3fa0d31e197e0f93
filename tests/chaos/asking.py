"""Requests, what came of them, and whether that is what came when nothing was disturbed."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import openai

from octavo import Client, SamplingParams
from octavo.errors import OctavoError, UnavailableError
from octavo.values.outputs import Accepted, Delta, Finished
from tests.chaos.result import Result

# Pause before a request is sent again that was refused.
AGAIN_AFTER_S = 0.2

# The kernel deals connections to fronts.
CONNECTIONS_OF_A_FRONT = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Of those that run at once no two prompts begin alike: the fake cannot tell equal histories apart.

    Attributes:
        stream: Number of the client that sends it, below 94 ** 2.
        turn: Which of its requests.
        num_tokens: Length of the answer.
    """

    stream: int
    turn: int
    num_tokens: int = 64

    @property
    def request_id(self) -> str | None:
        """Its name; None: the scheduler gives it one."""
        return None

    @property
    def prompt(self) -> list[int]:
        """Its token ids, printable bytes."""
        begin = [33 + self.stream % 94, 33 + self.stream // 94, 33 + self.turn % 94]
        return begin + [33 + (self.stream + 7 * number) % 94 for number in range(14 + self.stream % 23)]

    @property
    def sampling(self) -> SamplingParams:
        """Half of them are greedy; log-probabilities of all tokens."""
        return SamplingParams(
            temperature=self.stream % 2, seed=self.stream, max_tokens=self.num_tokens, ignore_eos=True, logprobs=0
        )


@dataclass(slots=True)
class Answer:
    """What came of a request.

    Attributes:
        tokens: Token ids, or what OpenAI's API has in their place.
        logprobs: One for each token.
        text: All of it.
        is_finished: Whether its last event came.
        error: How it failed.
        refusals: Why it was refused before it was accepted, each time.
        longest_gap_s: Longest time without a message with tokens, from the first attempt to send it.
        last_at_s: Monotonic time of the last one, or of that attempt.
    """

    tokens: list[int | str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    is_finished: bool = False
    error: str = ""
    refusals: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    last_at_s: float = field(default_factory=time.monotonic)

    def take(self, tokens: Sequence[int | str], logprobs: Sequence[float], text: str) -> None:
        """Take a message."""
        now_s = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_at_s)
        self.last_at_s = now_s
        self.tokens += tokens
        self.logprobs += logprobs
        self.text += text


OnToken = Callable[[Answer], object]
Send = Callable[[Ask, Answer], Awaitable[None]]


def by_grpc(client: Client, on_token: OnToken = lambda _: None) -> Send:
    """Return what sends a request over the native API; what is refused before it is accepted is sent again.

    Args:
        client: An open one.
        on_token: Called after each message with tokens.
    """

    async def send(ask: Ask, answer: Answer) -> None:
        is_accepted = False
        while True:
            try:
                async for event in client.stream(ask.prompt, ask.sampling, request_id=ask.request_id):
                    if isinstance(event, Accepted):
                        is_accepted = True
                    elif isinstance(event, Delta):
                        answer.take(event.token_ids, event.logprobs, event.text)
                        on_token(answer)
                    elif isinstance(event, Finished):
                        answer.is_finished = True
                return
            except UnavailableError as error:
                if is_accepted:
                    raise
                answer.refusals.append(str(error))
            await asyncio.sleep(AGAIN_AFTER_S)

    return send


@asynccontextmanager
async def dealt(address: str, num_fronts: int) -> AsyncIterator[Send]:
    """Give what sends each stream's requests over a connection, of which there are enough to reach all fronts."""
    num_connections = CONNECTIONS_OF_A_FRONT * num_fronts or 1
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(address)) for _ in range(num_connections)]
        sends = [by_grpc(client) for client in clients]

        async def send(ask: Ask, answer: Answer) -> None:
            await sends[ask.stream % num_connections](ask, answer)

        yield send


def by_openai(client: openai.AsyncOpenAI, model: str) -> Send:
    """Return what sends a request with OpenAI's own client, which tries again what is refused."""

    async def send(ask: Ask, answer: Answer) -> None:
        stream = await client.completions.create(
            model=model,
            prompt=ask.prompt,
            max_tokens=ask.num_tokens,
            temperature=ask.sampling.temperature,
            seed=ask.stream,
            logprobs=1,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    tokens, logprobs = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
                    answer.take(tokens, logprobs, "")
                answer.text += choice.text
                answer.is_finished = answer.is_finished or choice.finish_reason is not None

    return send


async def answer_to(ask: Ask, send: Send) -> Answer:
    """Send a request and return what came of it, be it an error."""
    answer = Answer()
    try:
        await send(ask, answer)
    except (OctavoError, openai.OpenAIError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def answers_to(asks: Sequence[Ask], send: Send, num_at_once: int = 16) -> dict[Ask, Answer]:
    """Send requests, so many at once; return what came of each."""
    answers: dict[Ask, Answer] = {}
    waiting = iter(asks)

    async def work() -> None:
        for ask in waiting:
            answers[ask] = await answer_to(ask, send)

    await asyncio.gather(*(work() for _ in range(num_at_once)))
    return answers


def compare(result: Result, ask: Ask, answer: Answer, undisturbed: Answer) -> None:
    """Count an answer as equal, lost, repeated or changed."""
    result.num_asked += 1
    for text in answer.refusals:
        result.refusals[text] = result.refusals.get(text, 0) + 1
    result.longest_gap_s = max(result.longest_gap_s, answer.longest_gap_s)
    if verdict := _difference(answer, undisturbed):
        kind, words = verdict
        setattr(result, kind, getattr(result, kind) + 1)
        result.complain(f"stream {ask.stream}, request {ask.turn}: {words}")
    else:
        result.num_equal += 1


def _difference(answer: Answer, undisturbed: Answer) -> tuple[str, str] | None:
    """Return as what an answer counts that is not the undisturbed one, and why; None: it is."""
    num_tokens, expected = len(answer.tokens), len(undisturbed.tokens)
    if answer.error or not answer.is_finished or num_tokens < expected:
        return "num_lost", answer.error or f"it ended after {num_tokens} of {expected} tokens"
    if num_tokens > expected:
        return "num_repeated", f"{num_tokens} tokens came, and there are {expected}"
    if answer.tokens != undisturbed.tokens:
        index = next(i for i, (a, b) in enumerate(zip(answer.tokens, undisturbed.tokens, strict=True)) if a != b)
        return "num_changed", f"token {index} is {answer.tokens[index]!r}, and was {undisturbed.tokens[index]!r}"
    if answer.logprobs != undisturbed.logprobs:
        return "num_changed", "log-probabilities differ"
    if answer.text != undisturbed.text:
        return "num_changed", "the text differs"
    return None
