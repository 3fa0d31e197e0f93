"""Sends the requests of a plan to a target, and records what became of each.

An open loop sends at its times, a closed one when a client is free. An open loop never waits for an answer. How late it
was all the same is in the records (`lateness_s`), and how busy its event loop was in the result: a sender that is late
measures itself.
"""

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice

from octavo.bench.plan import Plan
from octavo.bench.record import Outcome, PlannedRequest, RequestRecord, Target, TargetInfo
from octavo.errors import OctavoError

# A client of a closed loop waits so long after a failure, or it would do nothing but ask a server that is gone.
_PAUSE_AFTER_FAILURE_S = 0.1

_LAG_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load brought."""

    records: list[RequestRecord]  # of the requests that were sent, in their order
    begin_s: float  # when it began, by `time.perf_counter`
    end_s: float  # when the last answer was complete, or the load was interrupted
    # How late the sender's event loop came to each of the ticks of a clock, one every 10 ms; in seconds.
    lags_s: list[float]
    busy_share: float  # share of the time that the event loop's thread computed, 0 to 1
    is_interrupted: bool  # whether it was stopped before its end


@dataclass(frozen=True, slots=True)
class SessionResult:
    """A load that was run."""

    info: TargetInfo
    load: LoadResult
    started_at: datetime


class Load:
    """Runs a plan once against a target.

    Args:
        target: The server.
        plan: The requests.
        stop: Ends the load as soon as it is set; requests on their way are cancelled.
    """

    def __init__(self, target: Target, plan: Plan, stop: asyncio.Event) -> None:
        self.plan = plan
        self.records: list[RequestRecord] = []
        self.begin_s = math.nan
        self.num_ended = 0
        self.num_failed = 0
        self._target = target
        self._stop = stop

    async def run(self) -> LoadResult:
        """Send everything and wait for the answers."""
        lags_s: list[float] = []
        cpu_begin_s = time.thread_time()
        self.begin_s = time.perf_counter()
        work = asyncio.create_task(self._send_all())
        stopped = asyncio.create_task(self._stop.wait())
        lag = asyncio.create_task(_watch_lag(lags_s))
        tasks = (work, stopped, lag)
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            is_interrupted = not work.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not is_interrupted:
            work.result()
        end_s = time.perf_counter()
        busy_share = (time.thread_time() - cpu_begin_s) / (end_s - self.begin_s)
        if not is_interrupted:
            end_s = max((record.ended_s for record in self.records), default=end_s)
        return LoadResult(self.records, self.begin_s, end_s, lags_s, busy_share, is_interrupted)

    async def _send_all(self) -> None:
        if self.plan.compares_speculation:
            await self._paired_loop()
        elif self.plan.arrivals_s is None:
            await self._closed_loop()
        else:
            await self._open_loop()

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            # The prompt is made before the time has come.
            for planned in self.plan.requests():
                assert planned.scheduled_s is not None
                scheduled_s = self.begin_s + planned.scheduled_s
                await asyncio.sleep(max(0.0, scheduled_s - time.perf_counter()))
                group.create_task(self._send(planned, scheduled_s))

    async def _closed_loop(self) -> None:
        assert self.plan.concurrency is not None
        requests = self.plan.requests()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.plan.concurrency, len(self.plan))):
                group.create_task(self._client(requests))

    async def _paired_loop(self) -> None:
        """Send as many requests at once as there are clients, then the same again on the other side.

        Which side is first alternates (ABBA): what the second one finds in the server's cache helps both sides alike.
        """
        requests, order = self.plan.requests(), (False, True)
        while (batch := list(islice(requests, self.plan.concurrency))) and time.perf_counter() < self._send_until_s:
            for speculate in order:
                sides = [replace(planned, speculate=speculate) for planned in batch]
                records = await asyncio.gather(*(self._send(planned, None) for planned in sides))
                if any(record.outcome is Outcome.FAILED for record in records):
                    await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
            order = order[::-1]

    @property
    def _send_until_s(self) -> float:
        return math.inf if self.plan.duration_s is None else self.begin_s + self.plan.duration_s

    async def _client(self, requests: Iterator[PlannedRequest]) -> None:
        for planned in requests:
            if time.perf_counter() >= self._send_until_s:
                return
            record = await self._send(planned, None)
            if record.outcome is Outcome.FAILED:
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _send(self, planned: PlannedRequest, scheduled_s: float | None) -> RequestRecord:
        record = RequestRecord(planned, scheduled_s, token_ids=None if planned.speculate is None else [])
        self.records.append(record)
        record.outcome = Outcome.CANCELLED  # unless it comes to an end below
        record.sent_s = time.perf_counter()
        try:
            await self._target.send(record)
            record.outcome = Outcome.COMPLETED
        except OctavoError as error:
            record.outcome = Outcome.FAILED
            record.error = str(error)
            self.num_failed += 1
        except Exception as error:  # one broken answer must not cost the answers of an hour
            record.outcome = Outcome.FAILED
            record.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self.num_failed += 1
        finally:
            if math.isnan(record.ended_s):
                record.ended_s = time.perf_counter()
            self.num_ended += 1
        return record


async def _watch_lag(lags_s: list[float]) -> None:
    """Note how late the event loop comes to each tick of a clock, until cancelled."""
    tick_s = time.perf_counter()
    while True:
        # A long lag is late for several ticks, and counts for each.
        tick_s += _LAG_INTERVAL_S
        await asyncio.sleep(max(0.0, tick_s - time.perf_counter()))
        lags_s.append(max(0.0, time.perf_counter() - tick_s))
