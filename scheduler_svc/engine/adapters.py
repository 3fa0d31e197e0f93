"""The adapters that requests may name: each name stands for one content on the whole fleet.

Registering a name loads its source once, on whichever executor has room, and computes a token with it. What the
executor tells of the content is the name's digest from then on, and every other load has to find the same. So a name
that is loaded again with another content is another adapter: running requests keep theirs, as long as executors hold
it or find it, and no new one meets an old block. An answer that goes on names a content that this engine serves, or has
served, by that name: no client chooses what executors read.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.values.wording import shown
from octavo_shared.errors import (
    CallerError,
    FencedError,
    InvalidFieldError,
    OctavoServiceError,
    RequestAbortedError,
    UnavailableError,
    UnknownNameError,
)
from octavo_shared.process.events import Event
from octavo_shared.step_wire.step import MAX_SOURCE_BYTES, Adapter, Int32Array, SamplingRow
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.request.continuation import Continuation
from scheduler_svc.request.engine_client import RequestHandle, TokenSink
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.request.provenance import Span

log = logging.getLogger(__name__)

MAX_NAME_LENGTH = 256
MAX_ADAPTERS = 4096
# Contents that names have stood for before, with which answers go on; the oldest are forgotten.
MAX_FORMER = 512
# The token that a load computes; every vocabulary has it.
_PROMPT: Int32Array = np.zeros(1, np.int32)


class Submit(Protocol):
    """Queues a request of the engine's own."""

    def __call__(self, request: EngineRequest, sink: TokenSink) -> Awaitable[None]:
        """Raises: OctavoServiceError: it was not queued."""


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """An adapter by the name that requests use."""

    name: str
    adapter: Adapter


class Adapters:
    """Owns the names of adapters.

    Args:
        fleet: Whose executors hold them.
        submit: Queues the request that loads one.
        on_change: Called with all names whenever they have changed.
        model_name: Returns the served model's name, which no adapter may have.
        is_paused: Returns whether nothing is computed until an operator resumes the fleet.
    """

    def __init__(
        self,
        fleet: Fleet,
        submit: Submit,
        on_change: Callable[[Sequence[str]], object],
        model_name: Callable[[], str],
        is_paused: Callable[[], bool],
    ) -> None:
        self._fleet = fleet
        self._submit = submit
        self._on_change = on_change
        self._model_name = model_name
        self._is_paused = is_paused
        self._by_name: dict[str, Adapter] = {}
        self._former: dict[tuple[str, bytes], Adapter] = {}  # by name and digest
        self._loading: set[str] = set()
        self._num_attempts = 0
        self._unloaded: set[str] = set()  # what executors offer, and an operator does not want
        self._not_served: set[str] = set()  # what executors offer, and none could load
        self._offered_names: asyncio.Queue[str] = asyncio.Queue()

    @property
    def all(self) -> list[RegisteredAdapter]:
        """All of them, by name."""
        return [RegisteredAdapter(name, adapter) for name, adapter in sorted(self._by_name.items())]

    def resolve(self, name: str, continuation: Continuation | None = None, *, was_queued: bool = False) -> Adapter:
        """Return the adapter with a name; for an answer that goes on, the one that made its beginning.

        `was_queued`: an engine before this one had found it, and its front says so.

        Raises:
            InvalidFieldError: there is none, or an answer that has begun does not say what made it.
            UnavailableError: the name has not stood for that content here.
        """
        adapter = self._by_name.get(name)
        if continuation is not None and continuation.adapter is not None:
            return self._begun_with(name, continuation.adapter, is_known=was_queued)
        if continuation is not None and continuation.has_begun:
            rule = "the Provenance.adapter_digest of its tokens: the name may stand for another content by now"
            raise InvalidFieldError("continuation.adapter_digest", "empty", rule)
        if adapter is None:
            raise InvalidFieldError("lora_adapter", name, self._offered)
        return adapter

    def _begun_with(self, name: str, adapter: Adapter, *, is_known: bool) -> Adapter:
        digest = adapter.digest
        registered = self._by_name.get(name)
        former = self._former.get((name, digest), adapter if is_known else None)
        if former is None and (registered is None or registered.digest != digest):
            content = f"with the SHA-256 {digest.hex()[:12]}…"
            raise UnavailableError(
                f"the adapter {shown(name)} {content}, which began the answer, is not loaded; load it"
            )
        # A former source may be gone, and a load that fails ends the requests of all that have this content.
        loaded = (registered, *self._by_name.values())
        return next((one for one in loaded if one is not None and one.digest == digest), former or adapter)

    async def load(self, name: str, source: str, *, in_place: bool = False) -> RegisteredAdapter:
        """Load a source, and let requests name it from then on; with `in_place` the name may stand for another one.

        Raises:
            InvalidFieldError: a name or a source that cannot be.
            CallerError: the name is taken or is being loaded, or there are too many.
            FencedError: the fleet is paused.
            OctavoServiceError: no executor can load it.
        """
        if self._is_paused():
            raise FencedError("the fleet is paused, and a load computes a token; resume the fleet first, then load")
        return await self._load(name, source, in_place=in_place)

    async def _load(self, name: str, source: str, *, in_place: bool = False) -> RegisteredAdapter:
        if not (1 <= len(name) <= MAX_NAME_LENGTH and name.isprintable()):
            rule = f"1 to {MAX_NAME_LENGTH} characters long, without line breaks and control characters"
            raise InvalidFieldError("name", shown(name), rule)
        if name == self._model_name():
            raise InvalidFieldError("name", name, "another name than the model's, which requests without adapters use")
        if not 1 <= len(source.encode()) <= MAX_SOURCE_BYTES:
            raise InvalidFieldError("source", source, f"1 to {MAX_SOURCE_BYTES} bytes long")
        if name in self._loading:
            raise CallerError(f"the adapter {name!r} is being loaded; wait for that")
        if name in self._by_name and not in_place:
            raise CallerError(f"the adapter {name!r} is loaded already; unload it, or load it in place (in_place)")
        if name not in self._by_name and len(self._by_name) + len(self._loading) >= MAX_ADAPTERS:
            raise CallerError(f"there are {MAX_ADAPTERS} adapters; unload some of them")
        self._loading.add(name)
        try:
            digest = await self._digest_of(source)
        finally:
            self._loading.discard(name)
        self._note_former(name)
        self._by_name[name] = Adapter(source, digest)
        self._unloaded.discard(name)
        self._on_change(sorted(self._by_name))
        return RegisteredAdapter(name, self._by_name[name])

    def unload(self, name: str) -> None:
        """Let no new request name an adapter; those that run go on. Raises UnknownNameError: there is none."""
        if name not in self._by_name:
            raise UnknownNameError(f"no adapter has the name {name!r}; it must be {self._offered}")
        self._note_former(name)
        del self._by_name[name]
        self._unloaded.add(name)
        self._on_change(sorted(self._by_name))

    def _note_former(self, name: str) -> None:
        if (adapter := self._by_name.get(name)) is not None:
            self._former.pop((name, adapter.digest), None)
            self._former[name, adapter.digest] = adapter
            if len(self._former) > MAX_FORMER:
                del self._former[next(iter(self._former))]

    def note_offered(self, names: Sequence[str]) -> None:
        """Note that an executor was attached whose operator wants these sources served under their own names."""
        for name in (*names[:MAX_ADAPTERS], *self._not_served):
            self._offered_names.put_nowait(name)
        self._not_served.clear()

    async def load_offered(self) -> None:
        """Load what executors offer, one after the other, until cancelled.

        A name that there is stays as it is, and one that an operator has unloaded stays unloaded. What fails is tried
        again when the next executor is attached.
        """
        while True:
            name = await self._offered_names.get()
            if name in self._by_name or name in self._loading or name in self._unloaded:
                continue
            try:
                await self._load(name, name)  # in a pause it waits for its end
            except OctavoServiceError as error:
                if len(self._not_served) < MAX_ADAPTERS:
                    self._not_served.add(name)
                log.warning(Event("adapter_not_served", adapter=name[:MAX_NAME_LENGTH], cause=str(error)))

    @property
    def _offered(self) -> str:
        names = ", ".join(sorted(self._by_name)[:20]) + ", ..." * (len(self._by_name) > 20)
        return f"one of the loaded adapters: {names}" if names else "unset: no adapter is loaded"

    async def _digest_of(self, source: str) -> bytes:
        """Compute a token with whatever is at a source; return what the executor told of it."""
        self._num_attempts += 1
        adapter = Adapter(source, attempt=self._num_attempts)
        request = EngineRequest(
            request_id=f"load-adapter-{self._num_attempts}",
            prompt_token_ids=_PROMPT,
            sampling=SamplingRow(temperature=0.0),
            stop_conditions=StopConditions(1, ignore_eos=True),
            adapter=adapter,
        )
        ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        sink = _LoadSink(ended, lambda: self._told_of(adapter))
        await self._submit(request, sink)
        try:
            return await ended
        finally:
            if ended.cancelled():
                sink.abort()

    def _told_of(self, adapter: Adapter) -> bytes:
        for planner in self._fleet.planners:
            slots = planner.batch.things.adapters
            if (slot := slots.slot_of(adapter)) is not None and slots.digests[slot]:
                return slots.digests[slot]
        return b""


class _LoadSink:
    """Waits for the end of a request that loads an adapter; see `TokenSink`."""

    def __init__(self, ended: asyncio.Future[bytes], told: Callable[[], bytes]) -> None:
        self._ended = ended
        self._told = told
        self._handle: RequestHandle | None = None

    def begin(self, handle: RequestHandle) -> None:
        self._handle = handle

    def abort(self) -> None:
        """End the request, for which nobody waits."""
        if self._handle is not None:
            self._handle.abort(RequestAbortedError("the caller of the load has left"))

    def begin_span(self, span: Span) -> None: ...

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> None: ...

    def push_prompt(self, logprobs: Sequence[float], alternatives: Alternatives) -> None: ...

    def finish_output(self, output_index: int, reason: FinishReason) -> None: ...

    def finish_search(self, hypotheses: Sequence[Hypothesis]) -> None: ...

    def pooled(self, values: Float32Array) -> None: ...

    def end(self, ended: EndedRequest, error: OctavoServiceError | None) -> None:
        """Hand out the digest, while its executor still has it."""
        digest = self._told()
        if self._ended.done():
            return
        if error is None and not digest:
            error = OctavoServiceError("the executor that loaded the adapter was lost; load it again")
        if error is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(digest)
