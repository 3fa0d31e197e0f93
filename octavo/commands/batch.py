"""`octavo batch`: the requests of a file, in the format of OpenAI's batches, answered into another file."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.calls.scheduler_channel import token_metadata
from octavo.calls.tls import TlsOptions, client_context
from octavo.commands.connection import http_options
from octavo.commands.extras import check_packages
from octavo.values.wording import counted

if TYPE_CHECKING:  # needs the extra, and the help does not
    from octavo.batch.answer_file import Answer

_DEFAULT_URL = "http://127.0.0.1:8080/v1"


@click.command()
@click.argument("requests_path", metavar="IN.jsonl", type=click.Path(path_type=Path))
@click.argument("answers_path", metavar="OUT.jsonl", type=click.Path(path_type=Path))
@click.option("--resume", is_flag=True, help="Keep the good answers that OUT.jsonl has, and ask for the others.")
@click.option(
    "--base-url",
    default=_DEFAULT_URL,
    show_default=True,
    metavar="URL",
    help="Where the OpenAI-compatible API is.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Model of every request.  [default: the one that each names, or the only one of the server]",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(1, 10_000),
    default=32,
    show_default=True,
    metavar="NUMBER",
    help="Number of requests that run at a time.",
)
@http_options
def batch(
    requests_path: Path,
    answers_path: Path,
    resume: bool,
    base_url: str,
    model: str | None,
    max_in_flight: int,
    tls: TlsOptions,
    token: str | None,
) -> None:
    """Answer the requests in IN.jsonl into OUT.jsonl, in the format of OpenAI's batch files.

    Each answer is a line of OUT.jsonl, in the order in which they come. The exit status is 1 if any request failed.
    """
    url, headers = _check_url(base_url, tls, token)
    check_packages("batch", "aiohttp")
    from octavo.batch.answer_file import AnswerFile
    from octavo.batch.batch_file import BatchFile
    from octavo.batch.runner import Server, run_batch

    requests = BatchFile(requests_path)
    with AnswerFile(answers_path, requests, resume=resume) as answers:
        tally = _Tally(len(requests), len(answers.done))

        async def run() -> None:
            async with Server(url, headers, client_context(tls), _say) as server:
                await run_batch(
                    requests, answers, server, model=model, max_in_flight=max_in_flight, on_answer=tally.add
                )

        try:
            with tally.progress:
                asyncio.run(run())
        finally:
            if tally.num_ended:
                click.echo(tally.summary(), err=True)
    if tally.failures:
        raise click.exceptions.Exit(1)


class _Tally:
    """Counts the answers, and shows on a terminal how many there are.

    Args:
        num_requests: Of the batch.
        num_before: How many have good answers of earlier runs.
    """

    def __init__(self, num_requests: int, num_before: int) -> None:
        self.failures: Counter[str] = Counter()
        self.num_ended = num_before
        self._num_requests = num_requests
        self._num_before = num_before
        console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.progress.add_task("", total=num_requests, completed=num_before)

    def add(self, answer: "Answer") -> None:
        self.num_ended += 1
        if not answer.is_good:
            self.failures[answer.trouble] += 1
        failed = f"{self.failures.total():,} failed" if self.failures else ""
        self.progress.update(self._task, advance=1, description=failed)

    def summary(self) -> str:
        """Say how many were answered, and what there is to do."""
        before = f" ({self._num_before:,} by an earlier run)" if self._num_before else ""
        failed = "".join(f", {number:,} failed with {what}" for what, number in self.failures.most_common())
        is_left = self.failures or self.num_ended < self._num_requests
        num_good = self.num_ended - self.failures.total()
        requests = counted(self._num_requests, "request")
        return f"{requests}: {num_good:,} answered{before}{failed}{'; --resume asks for the rest' if is_left else ''}"


def _say(sentence: str) -> None:
    click.echo(f"octavo: {sentence}", err=True)


def _check_url(url: str, tls: TlsOptions, token: str | None) -> tuple[str, dict[str, str]]:
    """Return where the paths of requests begin, and what carries the token.

    Raises: click.UsageError: the URL is none. ConnectionOptionsError: the token cannot be sent there.
    """
    context = click.get_current_context()
    parts = urlsplit(url)
    try:
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise click.UsageError(f"--base-url: {url!r} is not the URL of an API, such as {_DEFAULT_URL}", context)
    if parts.scheme == "http" and tls != TlsOptions():
        raise click.UsageError(
            "--tls-ca, --tls-cert and --tls-key need a --base-url that begins with https://", context
        )
    address = parts.netloc.rpartition("@")[2]
    if parts.port is None:
        address += ":80"
    metadata = token_metadata(address, token, is_encrypted=parts.scheme == "https") if token is not None else ()
    return url.rstrip("/").removesuffix("/v1"), dict(metadata)
