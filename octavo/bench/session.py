"""One run: ask the server, check lengths, try one request, warm up, measure until Ctrl-C, write the reports."""

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.bench.config import STDOUT, BenchConfig, BenchError, DatasetName, Outputs
from octavo.bench.load import Load, SessionResult
from octavo.bench.plan import load_dataset, plan_load, plan_probe, plan_warmup
from octavo.bench.provenance import provenance
from octavo.bench.record import Outcome, Target, TargetInfo
from octavo.bench.report import print_report, to_json
from octavo.bench.summary import summarize

_DESCRIBE_TIMEOUT_S = 15.0
_DRAWING_INTERVAL_S = 0.25  # rare, since drawing takes the sender's time

# Shows how far a load is, under a title, while the context is open.
Watch = Callable[[Load, str], AbstractContextManager[None]]


def run_bench(config: BenchConfig, target: AbstractAsyncContextManager[Target], outputs: Outputs) -> bool:
    """Run the load and write the reports; return whether it came to its end, and was not interrupted.

    Raises:
        OctavoError: nothing could be measured, or no request succeeded.
        OSError: a report could not be written.
    """

    async def run() -> SessionResult:
        async with target as opened:
            return await run_session(config, opened, asyncio.Event(), partial(shown, Console(stderr=True)))

    session = asyncio.run(run())
    summary = summarize(session.load, config.slo)
    print_report(Console(stderr=outputs.json == STDOUT), config, session.info, summary)
    if outputs.json is not None:
        report = to_json(config, session, summary, with_samples=outputs.with_samples)
        text = provenance(*_without_secrets(sys.argv)).json(report, indent=None)
        if outputs.json == STDOUT:
            click.echo(text, nl=False)
        else:
            outputs.json.write_text(text, "utf-8")
    if outputs.plot is not None:
        from octavo.bench.plot import save_plot  # matplotlib takes a second to load

        save_plot(outputs.plot, config, session)
    if session.load.is_interrupted:
        click.echo("octavo: interrupted; the report has what was completed until then", err=True)
    elif not summary.num_completed:
        raise BenchError(f"no request succeeded: {summary.errors[0][0]}")
    elif config.compares_speculation and summary.comparison is None:
        raise BenchError(f"no request succeeded both with speculation and without: {summary.errors[0][0]}")
    if summary.comparison is not None and summary.comparison.differences:
        raise BenchError(summary.comparison.verdict())
    return not session.load.is_interrupted


def _without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command without the values of flags that hold secrets."""
    words = list(command)
    for index, word in enumerate(command):
        flag, _, value = word.partition("=")
        if flag in ("--api-key", "--token", "--cache-salt"):
            if value:
                words[index] = f"{flag}=..."
            elif index + 1 < len(words):
                words[index + 1] = "..."
    return words


async def run_session(config: BenchConfig, target: Target, stop: asyncio.Event, watch: Watch) -> SessionResult:
    """Run a load; nothing is measured unless all of it fits the model and a request for one token was answered.

    Args:
        config: The load.
        target: The server.
        stop: Ends the measured part; what is on its way then is cancelled. Ctrl-C sets it.
        watch: Shows the progress.

    Raises:
        OctavoError: no server answers, requests do not fit the model, or a request before the measured ones fails.
    """
    path = config.dataset.path if isinstance(config.dataset, DatasetName) else config.dataset
    dataset = [] if path is None else load_dataset(path)
    try:
        async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
            info = await target.describe()
    except TimeoutError:
        raise BenchError(f"what listens there did not say within {_DESCRIBE_TIMEOUT_S:g} s what it serves") from None
    if config.compares_speculation and not info.speculates:
        raise BenchError(
            f"{info.model_id} at {info.address} does not speculate: its scheduler has --speculate off, or its "
            "executors draft nothing (--max-draft-tokens 0, no C kernels, or rows that are not invariant)"
        )
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


@contextmanager
def shown(console: Console, load: Load, title: str) -> Iterator[None]:
    """Draw a bar while the context is open; nothing if the console is no terminal."""
    if not console.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        updates = asyncio.create_task(_update(progress, load, title))
        try:
            yield
        finally:
            updates.cancel()


async def _update(progress: Progress, load: Load, title: str) -> None:
    task = progress.add_task(title, total=1.0, counts="")
    while True:
        progress.update(task, completed=_share(load), counts=_counts(load))
        progress.refresh()
        await asyncio.sleep(_DRAWING_INTERVAL_S)


def _share(load: Load) -> float:
    """Return how much of the load is done, 0 to 1: by requests, or by time if that comes first."""
    share = load.num_ended / max(1, len(load.plan))
    if load.plan.duration_s is not None and load.plan.arrivals_s is None:
        share = max(share, (time.perf_counter() - load.begin_s) / load.plan.duration_s)
    return min(1.0, share)


def _counts(load: Load) -> str:
    failed = f", {load.num_failed} failed" if load.num_failed else ""
    return f"{load.num_ended} answered, {len(load.records) - load.num_ended} running{failed}"
