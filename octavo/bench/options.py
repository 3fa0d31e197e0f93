"""The flags of `octavo bench`, in groups, and what checks each by itself. They need none of the extra's packages."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from octavo.bench.config import FORMS, MAX_NUM_REQUESTS, PLOT_SUFFIXES, DatasetName, parse_lengths, parse_slo
from octavo.commands.options import Number

DEFAULT_CONCURRENCY = 4

T = TypeVar("T")

_FILE = click.Path(dir_okay=False, allow_dash=True, path_type=Path)


def _parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """Return a callback that reads a text, and refuses what the parser refuses."""

    def convert(ctx: click.Context, param: click.Parameter, text: str | None) -> T | None:
        del ctx, param  # click names them in the message
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return convert


def _check_plot(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    del ctx, param
    if path is not None and path.suffix.lower() not in PLOT_SUFFIXES:
        raise click.BadParameter(f"{str(path)!r} does not end in {', '.join(PLOT_SUFFIXES)}")
    return path


TARGET_OPTIONS = (
    click.option(
        "--one-stream",
        is_flag=True,
        help="Send all requests on one StreamRequests call, for token ids only, in place of a call for each.",
    ),
    click.option(
        "--openai", metavar="URL", help="Measure an OpenAI-compatible server instead, such as http://127.0.0.1:8080/v1."
    ),
    click.option(
        "--openai-api",
        type=click.Choice(["completions", "chat"]),
        help="API to call with --openai.  [default: completions; chat with --dataset-name]",
    ),
    click.option("--api-key", envvar="OPENAI_API_KEY", metavar="KEY", help="API key for --openai. [OPENAI_API_KEY]"),
)

LOAD_OPTIONS = (
    click.option(
        "--rate",
        type=Number(1e-6, 1e6),
        help="Open loop: send this many requests a second on average, without waiting for answers.",
    ),
    click.option(
        "--burstiness",
        type=Number(0.01, 1e6),
        default=1.0,
        help="How even --rate is. 1: Poisson; less: in bursts; more: evenly.  [default: 1]",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1, 100_000),
        help="Closed loop: this many clients; each waits for its answer.  "
        f"[default: {DEFAULT_CONCURRENCY}; 1 with --compare-speculation]",
    ),
    click.option(
        "--compare-speculation",
        "compares_speculation",
        is_flag=True,
        help="Closed loop: send each request twice, with speculation and without, and compare speed and outputs.",
    ),
    click.option(
        "--num-requests",
        type=click.IntRange(1, MAX_NUM_REQUESTS),
        help="Number of requests.  [default: 64, or all of --dataset, or as many as --duration allows]",
    ),
    click.option(
        "--duration",
        "duration_s",
        type=Number(1e-3, 1e9),
        metavar="SECONDS",
        help="Send for this long, then wait for the last answers.",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0, MAX_NUM_REQUESTS),
        default=0,
        show_default=True,
        help="Requests to send first that do not count.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="Seed of arrivals, lengths and prompts.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=Number(1e-3, 1e9),
        default=600.0,
        metavar="SECONDS",
        help="Time limit for each request.  [default: 600]",
    ),
)

CONTENT_OPTIONS = (
    click.option(
        "--input-len",
        default="128",
        show_default=True,
        callback=_parsed(parse_lengths),
        metavar="LENGTHS",
        help=f"Tokens in a prompt (words with --openai): {FORMS}.",
    ),
    click.option(
        "--output-len",
        default="64",
        show_default=True,
        callback=_parsed(parse_lengths),
        metavar="LENGTHS",
        help="Tokens in an answer, in the same forms.",
    ),
    click.option(
        "--dataset",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help='File with prompts: lines of JSON with "prompt", and "max_tokens" and "json_schema" if you like.',
    ),
    click.option(
        "--dataset-name",
        type=click.Choice([name.value for name in DatasetName]),
        help="Prompts that come with octavo: questions, files to edit, texts to copy from, or forms to fill.",
    ),
    click.option(
        "--shared-prefix-len",
        type=click.IntRange(0, 10_000_000),
        default=0,
        show_default=True,
        help="Tokens at the start of each prompt that it shares with others.",
    ),
    click.option(
        "--num-prefixes",
        type=click.IntRange(1, 1_000_000),
        default=1,
        show_default=True,
        help="Number of different shared prefixes.",
    ),
    click.option("--temperature", type=Number(0, 100), default=0.0, show_default=True, help="0: greedy decoding."),
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=None,
        help=(
            "Continue after the model's end-of-sequence token, up to the full length.  "
            "[default: ignore-eos; no-ignore-eos with --dataset-name]"
        ),
    ),
)

OUTPUT_OPTIONS = (
    click.option(
        "--slo",
        callback=_parsed(parse_slo),
        metavar="LIMITS",
        help="Limits that a good request keeps, such as ttft=200ms,itl=50ms,tpot=40ms,e2e=5s.",
    ),
    click.option(
        "--json", "json_path", type=_FILE, metavar="FILE", help='Write the report as JSON. "-" writes it to stdout.'
    ),
    click.option("--samples", "with_samples", is_flag=True, help="Add every request to --json."),
    click.option(
        "--plot",
        "plot_path",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_check_plot,
        metavar="FILE",
        help=f"Draw a plot of the results ({', '.join(PLOT_SUFFIXES)}).",
    ),
)
