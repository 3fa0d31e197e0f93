"""Texts to be pooled, beside the requests of clients: each process that takes calls asks its own engine for some.

A text is submitted as a front does it, to `EngineClient`, so that a call ends with its process. Each is answered
exactly once: with the numbers of the fake executor for these tokens, or with an error that says why.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from executor_svc.fake.pooling import fake_values
from octavo_shared.errors import (
    CallerError,
    OctavoServiceError,
    PooledNotFiniteError,
    RequestAbortedError,
    WorldError,
)
from octavo_shared.step_wire.step import PoolingTask, SamplingRow
from scheduler_svc.request.continuation import Continuation
from scheduler_svc.request.engine_client import EngineClient, RequestHandle
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.request.provenance import Span
from tests.simulation.processes import SimulatedProcess
from tests.simulation.shapes import MAX_MODEL_LEN, NAN_TOKEN

# So many of the seeds have texts, and so many of them have long ones, which small budgets cannot take.
_SHARE = 0.4
_LONG_SHARE = 0.3

# That a process submits, at most, and how many of them at once.
_MOST = 40
_AT_ONCE = 4
_LONGEST_PAUSE_S = 0.4
_NAN_SHARE = 0.05

_PRINTABLE = (33, 127)


@dataclass(slots=True)
class Text:
    """A text and what came of it; the sink of its request.

    Attributes:
        accuse: Told of what must not come.
        process: Asks for it.
    """

    request: EngineRequest
    process: SimulatedProcess
    accuse: Callable[[str], None]
    values: list[float] | None = None
    has_ended: bool = False
    error: OctavoServiceError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_open(self) -> bool:
        """Whether somebody still waits for its answer."""
        return not (self.has_ended or self.process.is_dead)

    def begin(self, handle: RequestHandle) -> None:
        """See `TokenSink`."""

    def begin_span(self, span: Span) -> None:
        """See `TokenSink`."""

    def pooled(self, values: Float32Array) -> None:
        """Its answer."""
        if self.values is not None or self.has_ended:
            self._accuse("was answered twice, or after its end")
        self.values = values.tolist()

    def end(self, ended: EndedRequest, error: OctavoServiceError | None) -> None:
        """Its end."""
        self.fail(error)
        if (error is None) == (self.values is None):
            self._accuse(f"ended with {error!r}, and has {'no' if self.values is None else 'an'} answer")
        if self.values is not None and self.values != wanted(self.request):
            self._accuse("has the answer of another one")

    def fail(self, error: OctavoServiceError | None) -> None:
        """It has ended, or was refused."""
        if self.has_ended:
            self._accuse("ended twice")
        self.has_ended, self.error = True, error
        is_nan = NAN_TOKEN in self.request.prompt_token_ids
        if is_nan != isinstance(error, PooledNotFiniteError) and not isinstance(error, _ANY_TIME):
            self._accuse(f"ended with {error!r}")
        self.done.set()

    def so_far(self) -> Continuation:
        """See `AnswerSink`."""
        self._accuse("goes on behind what it has not")
        return Continuation()

    def push(self, index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None) -> None:
        """See `TokenSink`."""
        self._accuse("has a token")

    def push_prompt(self, logprobs: object, alternatives: Alternatives) -> None:
        """See `TokenSink`."""
        self._accuse("has log-probabilities")

    def finish_output(self, index: int, reason: FinishReason) -> None:
        """See `TokenSink`."""
        self._accuse("has an output")

    def finish_search(self, hypotheses: "list[Hypothesis] | object") -> None:
        """See `TokenSink`."""
        self._accuse("has a search")

    def _accuse(self, what: str) -> None:
        self.accuse(f"the text {self.request.request_id!r} {what}")


# What a text may be told whatever it is: that there is nobody, no room, or that it is too long for what is there.
_ANY_TIME = (WorldError, CallerError, RequestAbortedError)


def wanted(request: EngineRequest) -> list[float]:
    """Return what a text is to be answered with."""
    assert request.pooling is not None
    token_ids: list[int] = request.prompt_token_ids.tolist()
    return list(fake_values(request.pooling, token_ids, request.token_type_ids).tolist())


def has_texts(seed: int) -> bool:
    """Return whether a seed has any."""
    return random.Random(f"texts {seed}").random() < _SHARE


async def ask_for_texts(
    engine: EngineClient,
    process: SimulatedProcess,
    seed: int,
    texts: list[Text],
    accuse: Callable[[str], None],
    is_over: Callable[[], bool],
) -> None:
    """Ask an engine for texts, as long as faults come; `texts` gets all that were submitted."""
    draw = random.Random(f"texts of {process.name} {seed}")
    longest = MAX_MODEL_LEN if draw.random() < _LONG_SHARE else 16
    for number in range(_MOST):
        await asyncio.sleep(draw.random() * _LONGEST_PAUSE_S)
        own = [text for text in texts if text.process is process and text.is_open]
        if len(own) >= _AT_ONCE:
            await own[0].done.wait()
        if is_over():
            return
        text = Text(_draw(draw, f"text {number} of {process.name}", longest), process, accuse)
        texts.append(text)
        process.start(_submit(engine, text))


async def _submit(engine: EngineClient, text: Text) -> None:
    request = text.request
    try:
        await engine.wait_until_reachable()
        with engine.checking(request.request_id, request.tenant) as model:
            await asyncio.sleep(0)
        await engine.submit(request, text, model)
    except OctavoServiceError as error:
        text.fail(error)


def _draw(draw: random.Random, request_id: str, longest: int) -> EngineRequest:
    token_ids = [draw.randrange(*_PRINTABLE) for _ in range(draw.randint(1, longest))]
    if draw.random() < _NAN_SHARE:
        token_ids[-1] = NAN_TOKEN
    has_types = draw.random() < 0.5
    return EngineRequest(
        request_id,
        np.array(token_ids, np.int32),
        SamplingRow(),
        StopConditions(),
        tenant=draw.choice("abc"),
        pooling=draw.choice(list(PoolingTask)),
        token_type_ids=bytes(index % 2 for index in range(len(token_ids))) if has_types else b"",
    )
