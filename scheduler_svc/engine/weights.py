"""Pauses of a fleet, and other weights of its model in the middle of its work.

    running ──pause──> no step is in flight ──update, sleep, wake──> the same ──resume──> running

Weights change only while no step is in flight on any executor, so each token has one version: the digest of all bytes
of the weights. An executor that does not take them while others do leaves the fleet, and its requests go on elsewhere.
If none takes them, everything is as it was. Read next: `core/step/executor_planner.py`, `change_weights`.
"""

import asyncio
import enum
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from octavo_shared.errors import (
    CallerError,
    FencedError,
    NoExecutorError,
    OctavoServiceError,
    RequestAbortedError,
    WeightsChangedError,
)
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.engine.live_requests import LiveRequests
from scheduler_svc.engine.weight_update import Chunks, WeightUpdate, most_frequent, send_to_all
from scheduler_svc.executors.driver import ExecutorDriver
from scheduler_svc.executors.drivers import Drivers
from scheduler_svc.executors.fleet_model import FleetModel
from scheduler_svc.executors.session import ExecutorSession
from scheduler_svc.request.life import EventKind, LifeEvent

T = TypeVar("T")

log = logging.getLogger(__name__)

# How often it is looked whether the last step has been answered.
LOOK_INTERVAL_S = 0.002
# How long an update that comes in several calls waits for the next one.
_LONGEST_GAP_S = 600.0


class PauseMode(enum.Enum):
    """What becomes of live requests at a pause, and of what is computed of them if the weights change in it."""

    ABORT = "abort"
    """They end with an error."""
    WAIT = "wait"
    """They run to their ends first; new ones wait meanwhile."""
    KEEP = "keep"
    """They stop, and go on with their keys and values as they are."""
    RECOMPUTE = "recompute"
    """They stop, and are computed again from their tokens by the new weights."""


class FleetWeights:
    """Owns the pause, and changes the weights of all executors.

    Args:
        fleet, drivers, requests, fleet_model: Of the engine.
        go_on: Called when steps may be decided again.

    Attributes:
        mode: Of the pause that was asked for; None: the fleet runs.
        holds_steps: Whether no step may be decided.
        is_paused: Whether none is in flight either.
        sleep_level: As of `Sleep`; 0: the executors are awake.
        num_updates: That have succeeded since the start.
    """

    def __init__(
        self,
        fleet: Fleet,
        drivers: Drivers,
        requests: LiveRequests,
        fleet_model: FleetModel,
        go_on: Callable[[], None],
    ) -> None:
        self.mode: PauseMode | None = None
        self.holds_steps = self.is_paused = False
        self.sleep_level = 0
        self.num_updates = 0
        self._fleet = fleet
        self._drivers = drivers
        self._requests = requests
        self._fleet_model = fleet_model
        self._go_on = go_on
        self._is_changing = False
        self._num_pauses = 0
        self._slept_by_itself = False
        self._open: Sequence[WeightUpdate] = ()  # an update that has begun, and gets more
        self._ending: list[WeightUpdate] = []  # given up, and perhaps still in the way of the next one
        self._is_receiving = False
        self._gap: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_open(self) -> bool:
        """Whether an update has begun that comes in several calls."""
        return bool(self._open)

    @property
    def version(self) -> str:
        """The digest of the weights that are served; empty: it is not known."""
        model = self._fleet_model.model
        return "" if model is None else model.info.weights_digest

    @property
    def why_paused(self) -> str:
        """Why waiting requests are not computed, in words; empty: the fleet runs."""
        if self.mode is None:
            return ""
        asleep = f", and its executors sleep (level {self.sleep_level})" if self.sleep_level else ""
        return f"the fleet is paused ({self.mode.value}){asleep}; requests are computed when it is resumed"

    # Pauses --------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Let no step be decided, and return when none is in flight; another pause takes the place of this one.

        It goes on even if its caller leaves.

        Raises: FencedError: the weights are changing, or the fleet was resumed meanwhile.
        """
        await self._run(self._pause(mode))

    async def _pause(self, mode: PauseMode) -> None:
        self._require_no_change()
        self._num_pauses += 1
        number, self.mode = self._num_pauses, mode
        log.info(Event("pausing", mode=mode.value, requests=len(self._requests)))
        if mode is PauseMode.ABORT:
            for request in list(self._requests.values()):
                self._requests.abort(request, RequestAbortedError("an operator has paused the fleet, and aborted all"))
        if mode is PauseMode.WAIT and not self.sleep_level:
            self._requests.hold_new()
            self.holds_steps = self.is_paused = False
            self._go_on()
            await self._until(number, lambda: self._requests.num_unheld == 0)
        self.holds_steps = True
        await self._until(number, lambda: not any(planner.in_flight for planner in self._fleet.planners))
        self.is_paused = True

    async def resume(self) -> None:
        """End a pause; nothing happens without one. An update that has not all of its files is given up.

        Raises: FencedError: the weights are changing, or are not there.
        """
        self._require_no_change(but_receiving=True)
        if self.sleep_level:
            raise FencedError("the executors sleep; wake them first (WakeUp)")
        if self.mode is None:
            return
        self._cancel_open()
        self._num_pauses += 1
        self.mode, self.holds_steps, self.is_paused = None, False, False
        self._requests.release_held()
        log.info(Event("resumed", requests=len(self._requests)))
        self._go_on()

    async def _until(self, number: int, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await asyncio.sleep(LOOK_INTERVAL_S)
            if self._num_pauses != number:
                raise FencedError("the fleet was resumed, or paused anew, before this pause was complete")

    # Changes -------------------------------------------------------------------------------------

    async def update(
        self, source: str, weights_digest: str, chunks: Chunks, *, stays_open: bool = False, begins_anew: bool = False
    ) -> str:
        """Put other weights in place on all executors; return the digest of those that are served then.

        Once everything has been sent to the executors, the update goes on even if its caller leaves.

        Args:
            source: A folder that every executor finds in its --weights-dir; empty: `chunks` has safetensors files.
            weights_digest: That they must have; empty: any. The first call of an update says it.
            chunks: As above.
            stays_open: Whether the next call goes on with this update; the last one makes it. Not with a source.
            begins_anew: Whether an update that is open is given up.

        Raises:
            FencedError: the fleet is not paused, another change is under way, or this one was given up meanwhile.
            CallerError: no executor takes them, or no piece came for long; all go on with what they have.
            NoExecutorError: there is no executor, or none is left.
        """
        self._require_pause()
        if source or begins_anew:
            self._cancel_open()
        if self._open and weights_digest:
            raise FencedError("an update is open, and its first call says which weights_digest it has; end it first")
        if not self._open:
            while self._ending:
                await self._ending.pop().wait()
            self._require_pause()
            self._open = [WeightUpdate(driver, source, weights_digest) for driver in self._able_drivers()]
        updates, self._is_receiving = self._open, True
        try:
            if not source:
                await send_to_all(chunks, updates)
            if self._open is not updates:
                raise FencedError("the update was given up: the fleet was resumed before all of it had come")
        except BaseException:
            if self._open is updates:
                self._cancel_open()
            raise
        self._is_receiving = False
        if stays_open:
            self._wait_for_more()
            return self.version
        self._open = ()
        self._is_changing = True  # at once: the task begins later
        return await self._run(self._apply(updates, source))

    def _wait_for_more(self) -> None:
        if self._gap is not None:
            self._gap.cancel()
        self._gap = asyncio.get_running_loop().call_later(_LONGEST_GAP_S, self._end_gap)

    def _end_gap(self) -> None:
        if not self._is_receiving:
            self._cancel_open()

    def _cancel_open(self) -> None:
        """Give up an update that has not been made: all executors go on with what they have."""
        for update in self._open:
            update.give_up()
        self._ending.extend(self._open)
        self._open, self._is_receiving = (), False

    async def _apply(self, updates: Sequence[WeightUpdate], source: str) -> str:
        async with self._changing():
            outcomes = await asyncio.gather(*(update.finish() for update in updates), return_exceptions=True)
            served = most_frequent(outcomes)
            model_hash, digest = served
            staying: set[ExecutorSession] = set()
            for update, outcome in zip(updates, outcomes, strict=True):
                if outcome == served:
                    staying.add(update.session)
                elif isinstance(outcome, BaseException):
                    update.session.give_up(f"it did not take the new weights: {outcome}")
                else:
                    update.session.give_up(f"its new weights have another digest, {outcome[1][:16]}…")
            for driver in self._drivers.values():
                if driver.session is not None and driver.session not in staying:
                    driver.session.give_up("it was attached while the weights changed")
            await self._until(self._num_pauses, lambda: self._have_left(staying))
            self._fleet_model.follow_weights(model_hash, digest, source)
            self._follow(digest)
        self.num_updates += 1
        log.info(Event("weights_changed", weights_digest=digest, executors=len(self._fleet.planners)))
        return digest

    def _have_left(self, staying: Collection[ExecutorSession]) -> bool:
        return all(driver.planner is None or driver.session in staying for driver in self._drivers.values())

    def _follow(self, digest: str) -> None:
        """Let live requests go on with other weights."""
        assert self.mode is not None, "the fleet is paused"
        for request in list(self._requests.values()):
            if request.group.requires_same_numerics and (request.num_output_tokens or request.group.has_run):
                self._requests.abort(request, WeightsChangedError())
        keeps_live, now_s = self.mode is PauseMode.KEEP, monotonic_s()
        for group in self._fleet.change_weights(digest, keeps_live=keeps_live):
            request = self._requests.of(group)
            num_tokens = group.num_prompt_tokens + request.num_output_tokens
            request.life.add(LifeEvent(EventKind.WEIGHTS_CHANGED, now_s, num_tokens=num_tokens))
            request.tell_span()

    def reset_prefix_cache(self) -> None:
        """Let no block be found again that is cached now; running requests go on."""
        self._fleet.reset_prefixes()

    async def sleep(self, level: int) -> None:
        """Let all executors give memory back: 1, the cache, and on GPUs the weights; 2, the weights altogether.

        A fleet that runs is paused first: its requests are computed again after `wake_up`, which ends that pause.

        Raises: as `update`.
        """
        await self._run(self._sleep(level))

    async def _sleep(self, level: int) -> None:
        self._require_no_change()
        if self.sleep_level:
            raise FencedError("the executors sleep already")
        self._able_drivers()
        if pauses := self.mode is None:
            await self._pause(PauseMode.RECOMPUTE)
        number = self._num_pauses
        self._require_pause()
        try:
            drivers = self._able_drivers()
            async with self._changing():
                await _on_all(drivers, lambda session: session.sleep(level), "it does not sleep")
                self._fleet.lose_blocks()
                self.sleep_level, self._slept_by_itself = level, pauses
        except OctavoServiceError:
            if pauses and self._num_pauses == number:
                await self.resume()
            raise

    async def wake_up(self) -> None:
        """End `sleep`. Raises: FencedError: they do not sleep, or have no weights; as `update`."""
        await self._run(self._wake())

    async def _wake(self) -> None:
        self._require_pause()
        if not self.sleep_level:
            raise FencedError("the executors do not sleep")
        drivers = self._able_drivers()
        async with self._changing():
            await _on_all(drivers, lambda session: session.wake(), "it does not wake up")
            self.sleep_level = 0
        if self._slept_by_itself:
            await self.resume()

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something to its end, whether its caller waits or not."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return await asyncio.shield(task)

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Let nothing else change, and no executor join, for the length of a block."""
        self._is_changing = True
        try:
            async with self._fleet_model.changing_weights():
                yield
        finally:
            self._is_changing = False

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, FencedError):  # its caller may have left
            log.warning(Event("weights_change_failed", cause=f"{type(error).__name__}: {error}"))

    def _able_drivers(self) -> list[ExecutorDriver]:
        attached = [driver for driver in self._drivers.values() if driver.session is not None and driver.planner]
        if not attached:
            raise NoExecutorError("no executor is attached", self._drivers.last_trouble)
        unable = [driver.address for driver in attached if driver.session and not driver.session.changes_weights]
        if unable:
            raise CallerError(
                f"the executor at {unable[0]} takes no other weights; start all executors with --weights-dir"
            )
        return attached

    def _require_no_change(self, *, but_receiving: bool = False) -> None:
        if self._is_changing:
            raise FencedError("the weights are being changed; wait for its end")
        if self._is_receiving and not but_receiving:
            raise FencedError("an update is being received; wait for its end, or give it up with Resume")

    def _require_pause(self) -> None:
        self._require_no_change()
        if not self.is_paused:
            raise FencedError("the fleet is not paused; pause it first (Pause), and resume it afterwards")


async def _on_all(
    drivers: Sequence[ExecutorDriver], call: Callable[[ExecutorSession], Awaitable[None]], what: str
) -> None:
    """Make a call on all executors. Raises the first error if none succeeds; else those that fail leave."""
    sessions = [driver.session for driver in drivers if driver.session is not None]
    outcomes = await asyncio.gather(*map(call, sessions), return_exceptions=True)
    errors = [outcome for outcome in outcomes if outcome is not None]
    if len(errors) == len(sessions):
        raise errors[0]
    for session, outcome in zip(sessions, outcomes, strict=True):
        if outcome is not None:
            session.give_up(f"{what}: {outcome}")
