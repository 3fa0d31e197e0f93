"""What `octavo bench` does with its flags: opens the target, runs the load until Ctrl-C, writes the reports."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from octavo.bench.config import BenchConfig
from octavo.bench.errors import BenchError
from octavo.bench.json_report import to_json
from octavo.bench.outputs import STDOUT, Outputs
from octavo.bench.progress import shown
from octavo.bench.record import Target
from octavo.bench.report import print_report
from octavo.bench.session import SessionResult, run_session
from octavo.bench.summary import summarize


def run_bench(config: BenchConfig, target: AbstractAsyncContextManager[Target], outputs: Outputs) -> bool:
    """Run the load and write the reports; return whether it came to its end, and was not interrupted.

    Raises:
        OctavoError: nothing could be measured, or no request succeeded.
        OSError: a report could not be written.
    """
    session = asyncio.run(_run(config, target))
    summary = summarize(session.load, config.slo)
    print_report(Console(stderr=outputs.json == STDOUT), config, session.info, summary)
    if outputs.json is not None:
        report = to_json(config, session, summary, with_samples=outputs.with_samples)
        _write_json(outputs.json, json.dumps(report, ensure_ascii=False))
    if outputs.plot is not None:
        from octavo.bench.plot import save_plot  # matplotlib takes a second to load

        save_plot(outputs.plot, config, session)
    if session.load.is_interrupted:
        click.echo("octavo: interrupted; the report has what was completed until then", err=True)
    elif not summary.num_completed:
        raise BenchError(f"no request succeeded: {summary.errors[0][0]}")
    return not session.load.is_interrupted


async def _run(config: BenchConfig, opened: AbstractAsyncContextManager[Target]) -> SessionResult:
    console = Console(stderr=True)
    async with opened as target:
        return await run_session(config, target, asyncio.Event(), partial(shown, console))


def _write_json(path: Path, text: str) -> None:
    if path == STDOUT:
        click.echo(text)
    else:
        path.write_text(text + "\n", "utf-8")
