"""Groups of outputs for trainers: `Client.rollouts`.

Each output is a request of its own, so that it can be ended by itself; the prompt's blocks are shared, since the
scheduler lets requests wait for a prefix that another one computes. Events are read in a task of their own, so that the
stream goes on while a trainer computes.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from octavo.calls.many_requests import ManyRequests
from octavo.errors import InvalidRequestError, OctavoError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import Accepted, Event, FailedRequest, Finished, Output, Prompt
from octavo.values.sampling_params import SamplingParams

_SEED_BITS = 64
# Parameters of which one request makes several outputs.
_SEVERAL = ("n", "best_of", "beam_width")


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """A prompt and its outputs.

    Attributes:
        index: Of the prompt, from 0.
        prompt: As it was given.
        prompt_token_ids: Its tokens; empty if no output was accepted.
        outputs: Those that have ended, by `output_index`, from 0 to n - 1. `logprobs` are of the raw logits, and
            `provenance` says which weights made which tokens.
        unfinished: What there was of the others when `is_enough` ended the group; their `finish_reason` is ABORT.
        errors: Of outputs that failed.
        seeds: By `output_index`; an output can be had again with its seed.
    """

    index: int
    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Output, ...]
    unfinished: tuple[Output, ...]
    errors: tuple[OctavoError, ...]
    seeds: tuple[int, ...]


# Whether a group needs no more outputs.
IsEnough: TypeAlias = Callable[[RolloutGroup], bool]
MakeRequest: TypeAlias = Callable[[Prompt, SamplingParams, str], pb.GenerateRequest]


@dataclass(slots=True, eq=False)
class _Group:
    """A group that is not complete."""

    index: int
    prompt: Prompt
    seeds: tuple[int, ...]
    live: set[int] = field(default_factory=set)  # indexes of requests
    prompt_token_ids: tuple[int, ...] = ()
    outputs: dict[int, Output] = field(default_factory=dict)
    unfinished: dict[int, Output] = field(default_factory=dict)
    errors: list[OctavoError] = field(default_factory=list)

    def value(self) -> RolloutGroup:
        """Return it as callers get it."""
        outputs, unfinished = (
            tuple(output for _, output in sorted(each.items())) for each in (self.outputs, self.unfinished)
        )
        errors = tuple(self.errors)
        return RolloutGroup(self.index, self.prompt, self.prompt_token_ids, outputs, unfinished, errors, self.seeds)


class Rollouts:
    """Runs the groups of one call.

    Args:
        many: Runs the requests.
        prompts: One for each group.
        num_outputs: Of a group.
        params: Of all outputs; its seed gives each output its own.
        make_request: Returns the message of a prompt, which errors call by the name that it gets.
        max_groups: Groups that have begun, and were not taken.
        is_enough: Asked whenever an output has ended; None: groups are complete with all of them.
    """

    def __init__(
        self,
        many: ManyRequests,
        prompts: Iterable[Prompt],
        num_outputs: int,
        params: SamplingParams | None,
        make_request: MakeRequest,
        *,
        max_groups: int,
        is_enough: IsEnough | None,
    ) -> None:
        if isinstance(prompts, str):
            raise InvalidRequestError("prompts is a string; it must be a list of prompts", field="prompts")
        for name, value in (("n", num_outputs), ("max_groups", max_groups)):
            if value < 1:
                raise InvalidRequestError(f"{name} is {value}; it must be at least 1", field=name)
        params = params or SamplingParams()
        for name in _SEVERAL:
            if (asked := getattr(params, name)) is not None and asked != 1:
                raise InvalidRequestError(
                    f"{name} is {asked}; outputs of a group are requests of their own", field=name
                )
        self._many = many
        self._prompts = enumerate(prompts)
        self._num_outputs = num_outputs
        self._params = params if params.logprobs is not None else replace(params, logprobs=0)
        self._random = random.Random(params.seed)
        self._make_request = make_request
        self._max_groups = max_groups
        self._is_enough = is_enough
        self._num_untaken = 0
        self._has_more = True
        self._places: dict[int, tuple[_Group, int]] = {}  # of live requests: the group, and output_index
        self._ended: asyncio.Queue[RolloutGroup | None] = asyncio.Queue()  # None: there are no more

    async def run(
        self, events: AsyncGenerator[tuple[int, Event | FailedRequest], None]
    ) -> AsyncGenerator[RolloutGroup, None]:
        """Yield groups as they end; `events` are those of `many`."""
        self._begin_groups()
        reading = asyncio.create_task(self._read(events))
        reading.add_done_callback(lambda _: self._ended.put_nowait(None))
        try:
            while (group := await self._ended.get()) is not None:
                self._num_untaken -= 1
                self._begin_groups()
                yield group
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _begin_groups(self) -> None:
        while self._has_more and self._num_untaken < self._max_groups:
            if (numbered := next(self._prompts, None)) is None:
                self._has_more = False
                self._many.close()
                return
            index, prompt = numbered
            seeds = tuple(self._random.getrandbits(_SEED_BITS) for _ in range(self._num_outputs))
            name = f"prompts[{index}]"
            group = _Group(index, prompt, seeds)
            messages = [self._make_request(prompt, replace(self._params, seed=seed), name) for seed in seeds]
            for output_index, message in enumerate(messages):
                request = self._many.add(prompt, message)
                group.live.add(request)
                self._places[request] = group, output_index
            self._num_untaken += 1

    async def _read(self, events: AsyncGenerator[tuple[int, Event | FailedRequest], None]) -> None:
        async with aclosing(events):
            async for request, event in events:
                await self._take(request, event)

    async def _take(self, request: int, event: Event | FailedRequest) -> None:
        group, output_index = self._places[request]
        match event:
            case Accepted():
                group.prompt_token_ids = event.prompt_token_ids
            case Finished():
                [output] = event.outputs
                group.outputs[output_index] = replace(output, output_index=output_index)
            case FailedRequest():
                group.errors.append(event.error)
        if not isinstance(event, Finished | FailedRequest):
            return
        del self._places[request]
        group.live.discard(request)
        if self._is_enough is not None and self._is_enough(group.value()):
            await self._end(group)
        if not group.live:
            self._ended.put_nowait(group.value())

    async def _end(self, group: _Group) -> None:
        """Abort what is left of a group."""
        for request in sorted(group.live):
            _, output_index = self._places.pop(request)
            for output in await self._many.abort(request):
                group.unfinished[output_index] = replace(output, output_index=output_index)
        group.live.clear()
