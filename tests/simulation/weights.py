"""Weights that change in the middle of a run: where they lie, and what an operator does with a fleet.

Answers stay as they are alone. What changes are the histories that blocks are written with
(`executor_svc/fake/cache.py`): so each position has the weights that wrote it, wherever it is moved, and a row that
reads a position of older weights fails, unless its slot was kept.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from executor_svc.fake.cache import Histories, UInt64Array
from executor_svc.fake.encoder import without_weights
from executor_svc.service.servicer import ExecutionServicer
from executor_svc.service.weight_updates import WeightUpdates
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo_shared.errors import CallerError, FencedError, NoExecutorError
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import Int32Array, TableDelta
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.weights import PauseMode
from scheduler_svc.executors.session import ExecutorLostError
from tests.simulation.plan import FaultPlan

if TYPE_CHECKING:
    from tests.simulation.machines import SchedulerMachine
    from tests.simulation.world import World

FOLDER = Path(__file__).parent / "sources"
SOURCES = ("first", "second", "third")
NOWHERE = "nowhere"
NO_WEIGHTS = np.uint64(1)  # as in `Histories`: those of the start

# How long an executor reads new weights, in seconds; it may be killed meanwhile.
READ_S = 0.1
# A pause that takes longer is given up, in seconds: requests that are waited for may never end.
PATIENCE_S = 10.0
_LOOK_INTERVAL_S = 0.02
_RETRY_S = 0.1

_MODES = (*[PauseMode.KEEP] * 5, *[PauseMode.RECOMPUTE] * 3, PauseMode.WAIT, PauseMode.ABORT)
# Of the updates one executor is killed in the middle, or refuses the weights.
_KILL_SHARE, _REFUSE_SHARE = 0.25, 0.15
# Of the updates have a digest that the weights do not have: no executor can be used afterwards.
_WRONG_DIGEST_SHARE = 0.05

_REFUSALS = (FencedError, CallerError, NoExecutorError, ExecutorLostError, TimeoutError)

RARE_CHANGES = {
    "updated while an executor was away": "the weights of a fleet changed, and one of its executors was not there",
    "an executor killed in an update": "an executor was killed while it read new weights",
    "slept": "all executors gave their memory back, and woke up",
    "slept without weights": "they had given back the weights too",
    "paused": "no step was in flight for a while, and the weights stayed",
}


class SlowUpdates(WeightUpdates):
    """Takes a while to read the weights."""

    @asynccontextmanager
    async def receiving(
        self, begin: pb.UpdateWeightsBegin, messages: AsyncIterator[pb.UpdateWeightsRequest], weights_bytes: int
    ) -> AsyncIterator[Path]:
        """See `WeightUpdates`."""
        async with super().receiving(begin, messages, weights_bytes) as folder:
            await asyncio.sleep(READ_S)
            yield folder


def watch_versions(servicer: ExecutionServicer) -> None:
    """Let a worker know for which weights each step is meant that it is given."""
    runner = servicer._runner
    launch = runner._launch

    def noting(worker: Any, arrived: Any) -> None:
        message = arrived.message
        has_version = message.HasField("expected_weights_version")
        worker.expected_version = message.expected_weights_version if has_version else None
        launch(worker, arrived)

    runner._launch = noting  # type: ignore[method-assign]


class SpokenHistories(Histories):
    """Histories with the weights in them, and without: `spoken`, from which answers follow."""

    def __init__(self, table: BatchTable, weights: np.uint64) -> None:
        super().__init__(table, weights)
        self._table = table
        self.spoken: Histories = self if weights == NO_WEIGHTS else Histories(table, NO_WEIGHTS)

    def split(self) -> None:
        """Let the weights change from here on."""
        if self.spoken is self:
            self.spoken = Histories(self._table, NO_WEIGHTS)
            self.spoken.by_position[:] = self.by_position
            self.spoken._num_hashed[:] = self._num_hashed

    def follow(
        self,
        table: BatchTable,
        delta: TableDelta,
        layout: StepLayout,
        adapters: Mapping[int, bytes] | None = None,
        inputs: UInt64Array | None = None,
    ) -> None:
        """See `Histories`."""
        super().follow(table, delta, layout, adapters, inputs)
        if self.spoken is not self:
            spoken = None if inputs is None else without_weights(inputs, self.weights)
            self.spoken.follow(table, delta, layout, adapters, spoken)

    def append(self, layout: StepLayout, token_ids: Int32Array) -> None:
        """See `Histories`."""
        super().append(layout, token_ids)
        if self.spoken is not self:
            self.spoken.append(layout, token_ids)


@dataclass(slots=True)
class Operator:
    """Somebody who changes the weights of an engine's fleet, and lets it run again in the end.

    Args:
        engine: In whose process it runs.
        draw: Has what it does.
        duration_s: How long pauses and sleeps last.
        note: Told of rare things.
    """

    engine: Engine
    draw: random.Random
    duration_s: float
    note: Callable[[str], None]

    async def pause_fleet(self) -> None:
        """Pause, and change nothing."""
        await self._pause()
        await asyncio.sleep(self.duration_s)
        self.note("paused")

    async def update_weights(self) -> None:
        """Pause, and put other weights in place."""
        await self._pause()
        is_away = any(driver.session is None for driver in self.engine.drivers.values())
        version = self.engine.weights.version
        digest = "0" * 64 if self.draw.random() < _WRONG_DIGEST_SHARE else ""
        await self._update(self.draw.choice((*SOURCES, *SOURCES, NOWHERE)), digest)
        if is_away and self.engine.weights.version != version:
            self.note("updated while an executor was away")

    async def sleep_fleet(self) -> None:
        """Let executors sleep, in a pause or without, with an update or without."""
        weights, level = self.engine.weights, self.draw.choice((1, 1, 2))
        if self.draw.random() < 0.5:
            await self._pause()
        await weights.sleep(level)
        await asyncio.sleep(self.duration_s)
        if level == 2 or self.draw.random() < 0.3:
            await self._update(self.draw.choice(SOURCES))
        await weights.wake_up()
        self.note("slept without weights" if level == 2 else "slept")

    async def do(self, kind: str) -> None:
        """Do something that may be refused, or fail, and let the fleet run."""
        with suppress(*_REFUSALS):
            await getattr(self, kind)()
        while self.engine.weights.mode is not None:
            try:
                await self._run()
            except _REFUSALS:
                await asyncio.sleep(_RETRY_S)

    async def _run(self) -> None:
        weights = self.engine.weights
        if weights.sleep_level:
            try:
                await weights.wake_up()
            except CallerError:  # there are no weights
                await self._update(self.draw.choice(SOURCES))
                await weights.wake_up()
        await weights.resume()

    async def _pause(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.engine.weights.pause(self.draw.choice(_MODES))

    async def _update(self, source: str, digest: str = "") -> None:
        await self.engine.weights.update(source, digest, _no_chunks())


async def change_fleet(world: "World", plan: FaultPlan) -> bool:
    """Let an operator do what a fault says; return whether there was a fleet for it."""
    machine = world.schedulers[plan.target % len(world.schedulers)]
    scheduler, process = machine.scheduler, machine.process
    if scheduler is None or process is None or not process.is_running or not scheduler.has_begun:
        return False
    engine, draw = scheduler.engine, random.Random(f"weights {world.plan.seed} {plan.number}")
    executor = world.executors[plan.number % len(world.executors)]

    def note(name: str) -> None:
        for watcher in world.checks.watchers:
            watcher.changed_weights(machine.name, name)

    async def operate() -> None:
        try:
            await Operator(engine, draw, plan.duration_s, note).do(plan.kind)
        except Exception as error:
            world.checks.break_promise(f"{plan.kind} failed: {type(error).__name__}: {error}")

    kills = plan.kind == "update_weights" and draw.random() < _KILL_SHARE
    if executor.worker is not None and draw.random() < _REFUSE_SHARE:
        executor.worker.num_refusing += 1
    operating, was_killed = process.start(operate()), False
    while not (operating.done() or process.is_dead):
        if kills and executor.is_reading_weights:
            kills, was_killed = False, True
            executor.kill()
            note("an executor killed in an update")
        await asyncio.sleep(_LOOK_INTERVAL_S)
    if was_killed:
        await asyncio.sleep(plan.duration_s)
        executor.start()
    return True


def end_those_apart(world: "World") -> None:
    """End whoever would never agree on the weights again: each begins anew with those of the start."""
    workers = [(executor, executor.worker) for executor in world.executors if executor.worker is not None]
    if not (world.plan.updates_weights and workers):
        return
    first = workers[0][1].first_digest
    for machine in world.schedulers:
        taken = _taken_by(machine) or {first}
        if first not in taken:
            machine.kill()
            taken = {first}
        for executor, worker in workers:
            if worker.info.weights_digest not in taken:
                executor.kill()


def _taken_by(machine: "SchedulerMachine") -> set[str]:
    """Return the digests with which an executor may join an engine; empty: any, or it is down."""
    if not machine.is_up or machine.scheduler is None or not machine.scheduler.has_begun:
        return set()
    fleet_model = machine.scheduler.engine.fleet_model
    if fleet_model.model is None:
        return set()
    former = fleet_model._former.values() if fleet_model._source else ()
    return {fleet_model.model.info.weights_digest, *former}


async def _no_chunks() -> AsyncIterator[pb.WeightsChunk]:
    return
    yield
