"""One run from beginning to end: who answers, does it fit, does one request work, warm up, measure."""

import asyncio
import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from octavo.bench.config import BenchConfig
from octavo.bench.dataset import load_dataset
from octavo.bench.errors import BenchError
from octavo.bench.load import Load, LoadResult
from octavo.bench.plan import plan_load, plan_probe, plan_warmup
from octavo.bench.record import Outcome, Target, TargetInfo

_DESCRIBE_TIMEOUT_S = 15.0

# Shows how far a load is, under a title, while the context is open.
Watch = Callable[[Load, str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class SessionResult:
    """A load that was run.

    Attributes:
        info: Who answered.
        load: What came of it.
        started_at: When it began.
    """

    info: TargetInfo
    load: LoadResult
    started_at: datetime


async def run_session(config: BenchConfig, target: Target, stop: asyncio.Event, watch: Watch) -> SessionResult:
    """Run a load; nothing is measured unless all of it fits the model and a request for one token was answered.

    Args:
        config: The load.
        target: Who is asked.
        stop: Ends the measured part; what is on its way then is cancelled. Ctrl-C sets it.
        watch: Shows the progress.

    Raises:
        OctavoError: nobody answers, requests do not fit the model, or those before the measured ones fail.
    """
    dataset = [] if config.dataset is None else load_dataset(config.dataset)
    try:
        async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
            info = await target.describe()
    except TimeoutError:
        raise BenchError(f"what listens there did not say within {_DESCRIBE_TIMEOUT_S:g} s what it serves") from None
    warmup, measured = plan_warmup(config, info, dataset), plan_load(config, info, dataset)
    if not len(measured):
        raise BenchError("the load has no request: at this rate none arrives within --duration")
    for plan in (warmup, measured):
        plan.check_fits(info)
    never = asyncio.Event()
    probe = Load(target, plan_probe(config, info, (warmup, measured)), never)
    await _run_before(probe, info, "the first request failed")
    if len(warmup):
        load = Load(target, warmup, never)
        with watch(load, "warming up"):
            await _run_before(load, info, "every request of the warm-up failed")
    started_at = datetime.now(UTC)
    load = Load(target, measured, stop)
    with watch(load, "measuring"), _set_by_ctrl_c(stop), _without_old_objects():
        result = await load.run()
    return SessionResult(info, result, started_at)


@contextmanager
def _without_old_objects() -> Iterator[None]:
    """Keep what there is already out of garbage collections, which stop the sender for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _set_by_ctrl_c(event: asyncio.Event) -> Iterator[None]:
    """Let the first SIGINT set the event; the second has its usual effect."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        event.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _run_before(load: Load, info: TargetInfo, trouble: str) -> None:
    result = await load.run()
    if not any(record.outcome is Outcome.COMPLETED for record in result.records):
        raise BenchError(f"nothing was measured: {trouble} at {info.address}: {result.records[0].error}")
