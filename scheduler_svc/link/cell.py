"""The engine processes that a front has joined, as one engine: `EngineClient` over all of them.

    Generation ──> Cell ──┬─> RemoteEngine ══ Join ══> engine process of a scheduler
                          └─> RemoteEngine ══ Join ══> engine process of another one

A request runs at one of those in use (`engines_in_use.py`). Where that engine goes away,
or loses its last executor, its requests go on at another engine that computes the same bits, else they wait.
Nothing that runs is moved. Where no engine is left, as while all schedulers are restarted, new requests wait as long as
requests that ran.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial

from google.protobuf.message import Message

from octavo_shared.errors import DrainingError, NoExecutorError, OctavoServiceError, QueueFullError, UnavailableError
from octavo_shared.grpc.membership import Membership
from octavo_shared.process.concurrency import any_says_yes
from octavo_shared.process.events import Event
from octavo_shared.process.metric import Family, LabelValues, Metric
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from scheduler_svc.link.absence import LIMIT_S, Absence
from scheduler_svc.link.engines_in_use import EnginesInUse, Joined, choose_place, prefix_of
from scheduler_svc.link.messages import UNREACHABLE
from scheduler_svc.link.remote_admin import Asked, call_all
from scheduler_svc.link.remote_engine import LOADING, ReadTokenizer, RemoteEngine
from scheduler_svc.request.admin_calls import admin_stub
from scheduler_svc.request.engine_client import AnswerSink, EngineLoad
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.served_model import ServedModel

log = logging.getLogger(__name__)

LEAVING = "this front of the scheduler is shutting down"

ENGINE_REQUESTS = Metric(
    "octavo_front_engine_requests",
    "gauge",
    "Live requests of this front at a scheduler, by the name that --engine gives the model (empty: none).",
    ("model", "scheduler"),
)
ENGINE_USED = Metric(
    "octavo_front_engine_used",
    "gauge",
    "1 if this front gives new requests to a scheduler that it has joined, 0 if not; the log says why. The label model "
    "is the name in --engine (empty: none).",
    ("model", "scheduler"),
)
METRICS = (ENGINE_REQUESTS, ENGINE_USED)


# Makes what is joined to the engine at an address; the rest are RemoteEngine's `read_tokenizer` and `on_change`.
OpenEngine = Callable[[str, ReadTokenizer, Callable[[], None]], RemoteEngine]


class Cell:
    """See `EngineClient`.

    Args:
        membership: Addresses of the engine processes.
        open_engine: See `OpenEngine`.
        load_tokenizer: Called before a model with another tokenizer is served.
        set_ready: Called with whether new requests find an executor, when that changes.
        has_own_tokenizer: Whether the operator gives the tokenizer, so that the engines' files do not count.
        name: What clients call the model; "": what the schedulers call it.
        awaits_others: Whether new requests wait when the last engine that took some takes no more. Not at a front of
            the scheduler's own: no other engine comes, and clients may know another scheduler.

    Attributes:
        name: As above.
        membership: As above.
        admin: See `EngineClient`: of all engines that are named; one that does not answer fails the call.
    """

    def __init__(
        self,
        membership: Membership,
        open_engine: OpenEngine,
        load_tokenizer: ReadTokenizer,
        set_ready: Callable[[bool], Awaitable[None]],
        *,
        has_own_tokenizer: bool = False,
        name: str = "",
        awaits_others: bool = True,
    ) -> None:
        self.name = name
        self.membership = membership
        self.admin = admin_stub(self._call_admin)
        self._awaits_others = awaits_others
        self._absence = Absence(self._stop_waiting)  # of an engine that takes requests
        self._open_engine = open_engine
        self._set_ready = set_ready
        self._has_own_tokenizer = has_own_tokenizer
        self._joined: dict[str, Joined] = {}  # by address
        self._addresses: Sequence[str] = ()  # as the membership has them
        self._in_use = EnginesInUse(load_tokenizer, self._on_change, name, has_own_tokenizer=has_own_tokenizer)
        self._takes_calls = False
        self._is_leaving = False
        self._num_checked_of: Counter[str] = Counter()  # by tenant
        self._changed = asyncio.Event()  # another one after each change

    # EngineClient ----------------------------------------------------------------------------------------------

    @property
    def model(self) -> ServedModel | None:
        """See `EngineClient`: what each engine in use serves."""
        return self._in_use.model

    @property
    def _used(self) -> Sequence[RemoteEngine]:
        return self._in_use.engines

    @property
    def why_not_ready(self) -> str:
        """See `EngineClient`."""
        if self._is_leaving:
            return LEAVING
        if self._used:
            return ""
        return self._in_use.tokenizer_trouble or self._of_all(lambda engine: engine.why_not_ready or LOADING)

    @property
    def is_draining(self) -> bool:
        """See `EngineClient`."""
        reachable = [engine for engine in self.engines if engine.is_reachable]
        return bool(reachable) and all(engine.state.is_draining for engine in reachable)

    @property
    def last_trouble(self) -> str:
        """See `EngineClient`."""
        return self._in_use.tokenizer_trouble or self._of_all(lambda engine: engine.last_trouble)

    @property
    def load(self) -> EngineLoad:
        """See `EngineClient`: the sum over all that we have joined."""
        loads = [astuple(engine.state.load) for engine in self.engines]
        return EngineLoad(*map(sum, zip(*(loads or [astuple(UNREACHABLE.load)]), strict=True)))

    def waits_for(self, request_id: str, tenant: str) -> str:
        """See `EngineClient`; the place of one request is not known here."""
        num_waiting = self.load.num_waiting
        return f"{num_waiting} in line" if num_waiting else ""

    @property
    def max_requests(self) -> int | None:
        """See `EngineClient`."""
        known = [most for engine in self._used if (most := engine.state.max_requests) is not None]
        return sum(known) if known else None

    async def wait_until_reachable(self) -> None:
        """See `EngineClient`."""
        while not self._used and not self._is_leaving and self._is_one_expected:
            await self._changed.wait()

    @property
    def _is_one_expected(self) -> bool:
        return self._absence.is_on or any(engine.is_away for engine in self.engines)

    @contextmanager
    def checking(self, request_id: str, tenant: str) -> Iterator[ServedModel]:
        """See `EngineClient`: from what the engines have told; the share of a tenant is for them to say.

        A tenant that no engine names is refused only if its prompts that are being checked here fill the queues.
        """
        if not any(engine.is_reachable for engine in self.engines):
            raise UnavailableError(f"{UNREACHABLE.why_not_ready}; retry in a moment")
        if self._is_leaving and not self.is_draining:
            raise DrainingError(f"{LEAVING}; connect again, and send the request there")
        if self.is_draining:
            raise DrainingError(f"{self.why_not_ready}; retry with another scheduler")
        if not (used := self._used) or (model := self.model) is None:
            raise self._no_executor()
        self._require_place(used, tenant)
        self._num_checked_of[tenant] += 1
        try:
            yield model
        finally:
            self._num_checked_of[tenant] -= 1
            self._num_checked_of += Counter()  # forgets tenants with none

    def _no_executor(self) -> NoExecutorError:
        """Return why no engine takes a request, in the words of one whose executors all leave, if there is one."""
        states = [engine.state for engine in self.engines]
        leaving = [state.why_not_ready for state in states if state.has_executor and not state.is_draining]
        if why := next(filter(None, leaving), ""):
            return NoExecutorError(why, "")
        return NoExecutorError("no executor is attached", self.last_trouble)

    def _require_place(self, used: Sequence[RemoteEngine], tenant: str) -> None:
        """Raise QueueFullError if no queue takes a request of this tenant."""
        states = [engine.state for engine in used]
        max_waiting = sum(state.max_waiting for state in states)
        has_share = all(tenant in state.tenants_at_share for state in states)
        if has_share or self._num_checked_of[tenant] >= max_waiting:
            num_waiting, num_tokens = sum(state.num_waiting for state in states) + self._num_checked_of.total(), None
            if num_waiting < max_waiting:
                num_tokens = sum(state.load.num_waiting_prompt_tokens for state in states)
            retry_after_s = min(state.retry_after_s for state in states)
            raise QueueFullError(num_waiting, retry_after_s, num_waiting_tokens=num_tokens)

    async def submit(self, request: EngineRequest, sink: AnswerSink, checked_for: ServedModel) -> None:
        """See `EngineClient`; an engine that cannot take it is passed over while others can."""
        refusal: OctavoServiceError | None = None
        tried: list[RemoteEngine] = []
        began_s = asyncio.get_running_loop().time()
        while True:
            await self.wait_until_reachable()
            engines = [engine for engine in self._used if engine not in tried]
            if not engines and refusal is not None:
                if not self._awaits_others or not isinstance(refusal, DrainingError | NoExecutorError):
                    raise refusal
                await self._wait_for_news(refusal, began_s + LIMIT_S)
                tried.clear()
                continue
            engine = self._place(request, engines or self.engines)
            tried.append(engine)
            try:
                await engine.submit(request, sink, checked_for)
            except (NoExecutorError, QueueFullError, UnavailableError) as error:
                refusal = error
            else:
                return

    async def _wait_for_news(self, refusal: OctavoServiceError, until_s: float) -> None:
        """Wait for the next state of an engine, every 50 ms at most. Raises the refusal: it took too long.

        An engine that has just stopped taking requests refuses them before it has told so.
        """
        if self._is_leaving or not (self._used or self._is_one_expected):
            raise refusal
        try:
            async with asyncio.timeout_at(until_s):
                await self._changed.wait()
        except TimeoutError:
            raise refusal from None

    def _place(self, request: EngineRequest, engines: Sequence[RemoteEngine]) -> RemoteEngine:
        if not engines:
            raise UnavailableError(f"{UNREACHABLE.why_not_ready}; retry in a moment")
        block_size_tokens = 1 if self.model is None else self.model.info.block_size_tokens
        takes = [engine for engine in engines if request.tenant not in engine.state.tenants_at_share]
        return choose_place(prefix_of(request, block_size_tokens), request.width, takes or engines)

    async def abort_request(self, request_id: str, tenant: str | None) -> bool:
        """See `EngineClient`: at all engines. Raises UnavailableError: none that answers has it, and others do not."""
        known = [engine for engine in self.engines if engine.is_reachable or engine.is_away]
        if not known:
            raise UnavailableError(f"{UNREACHABLE.why_not_ready}; retry in a moment")
        # An engine that is away hears of it when it is back.
        return await any_says_yes(engine.abort_request(request_id, tenant) for engine in known)

    async def _call_admin(self, method: str, request: Asked) -> Message:
        named = [self._joined[address].engine for address in self._addresses if address in self._joined]
        engines = [engine for engine in named if not engine.is_joined_elsewhere()]
        if not engines:
            raise UnavailableError(f"{UNREACHABLE.why_not_ready}; retry in a moment")
        for engine in engines:
            engine.require_reachable()
        return await call_all([partial(engine.call_admin, method) for engine in engines], request)

    # For the process of the front --------------------------------------------------------------------------------

    @property
    def engines(self) -> list[RemoteEngine]:
        """All engines that are named, and engines that have left and still have requests of this front."""
        return [joined.engine for joined in self._joined.values()]

    @property
    def num_requests(self) -> int:
        """Live requests of this front."""
        return sum(engine.num_requests for engine in self.engines)

    async def run(self) -> None:
        """Be joined to every engine process; until cancelled. Raises what ends one by a fault of ours."""
        async with asyncio.TaskGroup() as group:

            async def follow(addresses: Sequence[str]) -> None:
                self._addresses = addresses
                for address in addresses:
                    if address not in self._joined:
                        engine = self._open(address)
                        self._joined[address] = Joined(engine, group.create_task(engine.run(), name="link"))
                self._on_change()

            group.create_task(self._tell_readiness())
            await self.membership.watch(follow, self._is_joined)

    def _is_joined(self, address: str) -> bool:
        return address in self._joined and self._joined[address].engine.is_reachable

    def _open(self, address: str) -> RemoteEngine:
        async def read_tokenizer(info: ExecutorInfo, fetch: Callable[[], Awaitable[Sequence[TokenizerFile]]]) -> None:
            if not self._has_own_tokenizer:
                self._joined[address].keep_tokenizer(tuple(await fetch()))

        engine = self._open_engine(address, read_tokenizer, self._on_change)

        def is_joined_elsewhere() -> bool:
            place = engine.scheduler_id, engine.incarnation
            others = [other for other in self.engines if other is not engine and other.is_reachable]
            return any((other.scheduler_id, other.incarnation) == place for other in others)

        engine.is_joined_elsewhere = is_joined_elsewhere
        return engine

    async def wait_until_told(self) -> None:
        """Return once an engine has said how it is."""
        while not any(engine.is_reachable for engine in self.engines):
            await self._changed.wait()

    def take_calls(self) -> None:
        """Clients reach us from now on."""
        self._takes_calls = True
        self._on_change()

    async def leave(self) -> None:
        """Take no new requests, and return once none is live: this front ends, and its engines may not."""
        self._is_leaving = True
        self._on_change()
        while self.num_requests:
            await self._changed.wait()

    def count(self, requests: Counter[LabelValues], used: Counter[LabelValues]) -> None:
        """Add what this front has at its engines, by the labels of metrics: of a scheduler there may be several."""
        for address, joined in self._joined.items():
            labels = self.name, joined.engine.scheduler_id or address
            requests[labels] += joined.engine.num_requests
            used[labels] += joined.engine in self._used

    # How the engines change --------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        """An engine takes requests, or no more; or one has gone, or come."""
        was_used = bool(self._used)
        self._in_use.choose({one: self._joined[one] for one in self._addresses if one in self._joined})
        if self._used:
            self._absence.end()
        elif was_used and self._awaits_others:
            self._absence.begin()
        self._rescue()
        self._forget_gone()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _stop_waiting(self, after_s: float) -> None:
        """No engine has taken requests for so long: requests that wait are refused, and new ones at once."""
        log.warning(Event("no_engine_takes_requests", cause=self.why_not_ready, after_s=after_s))
        asyncio.get_running_loop().call_soon(self._wake)  # the absence ends behind this

    def _rescue(self) -> None:
        """Have requests of engines that are away, or have no executor, go on at others that compute the same bits."""
        for lost in self.engines:
            places = [engine for engine in self._used if engine is not lost and engine.can_take_over(lost)]
            waiting = lost.waiting_requests if places else ()
            for number, request in waiting:
                assert self.model is not None, "engines are used"
                prefix = prefix_of(request, self.model.info.block_size_tokens)
                choose_place(prefix, request.width, places).take_over(lost, number)
            if waiting:
                log.info(Event("requests_moved", scheduler=lost.scheduler_id, requests=len(waiting)))

    def _forget_gone(self) -> None:
        """Leave engines that are no longer named, once nothing of ours waits for them."""
        for address, joined in list(self._joined.items()):
            engine = joined.engine
            if address not in self._addresses and not engine.num_requests:
                joined.task.cancel()
                del self._joined[address]

    async def _tell_readiness(self) -> None:
        """Tell our health and all engines whether new requests find an executor, whenever that changes."""
        told: bool | None = None
        while True:
            changed, is_ready = self._changed, not self.why_not_ready
            if self._takes_calls:
                for engine in self.engines:
                    engine.tell_ready(is_ready=is_ready)
                if is_ready != told:
                    told = is_ready
                    await self._set_ready(is_ready)
            await changed.wait()

    def _of_all(self, say: Callable[[RemoteEngine], str]) -> str:
        """Say something of all engines, each by its address if there are several."""
        said = {address: say(joined.engine) for address, joined in self._joined.items()}
        if not said:
            return "; ".join(self.membership.troubles.values()) or "the name of the schedulers has no address"
        if len(said) == 1:
            return next(iter(said.values()))
        return "; ".join(f"{address}: {words}" for address, words in said.items())


def cell_families(cells: Iterable[Cell]) -> Iterator[Family]:
    """Yield what a front knows of the engines of its cells."""
    requests, used = Counter[LabelValues](), Counter[LabelValues]()
    for cell in cells:
        cell.count(requests, used)
    yield ENGINE_REQUESTS.family(requests)
    yield ENGINE_USED.family(used)
