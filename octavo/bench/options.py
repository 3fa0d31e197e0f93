"""The flags of `octavo bench`, in groups, and what checks each by itself. They need none of the extra's packages."""

import math
from collections.abc import Callable
from pathlib import Path

import click

from octavo.bench.config import MAX_NUM_REQUESTS
from octavo.bench.lengths import FORMS, Lengths, parse_lengths
from octavo.bench.outputs import PLOT_SUFFIXES
from octavo.bench.slo import Slo, parse_slo
from octavo.commands.options import Number

DEFAULT_CONCURRENCY = 4

_FILE = click.Path(dir_okay=False, allow_dash=True, path_type=Path)


def _to_lengths(ctx: click.Context, param: click.Parameter, text: str) -> Lengths:
    del ctx, param  # click names them in the message
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _to_slo(ctx: click.Context, param: click.Parameter, text: str | None) -> Slo | None:
    del ctx, param
    try:
        return None if text is None else parse_slo(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _between(least: float, most: float) -> Callable[[click.Context, click.Parameter, float | None], float | None]:
    """Return a callback that refuses numbers beyond two positive limits."""

    def check(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
        del ctx, param
        if value is None or least <= value <= most:
            return value
        if not (value > 0 and math.isfinite(value)):
            raise click.BadParameter(f"{value:g} is not a number above 0")
        raise click.BadParameter(f"{value:g} is not from {least:g} to {most:g}")

    return check


def _check_plot(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    del ctx, param
    if path is not None and path.suffix.lower() not in PLOT_SUFFIXES:
        raise click.BadParameter(f"{str(path)!r} does not end in {', '.join(PLOT_SUFFIXES)}")
    return path


TARGET_OPTIONS = (
    click.option(
        "--openai", metavar="URL", help="An OpenAI-compatible server instead, such as http://127.0.0.1:8080/v1."
    ),
    click.option(
        "--openai-api",
        type=click.Choice(["completions", "chat"]),
        default="completions",
        show_default=True,
        help="Which of its streams.",
    ),
    click.option("--api-key", envvar="OPENAI_API_KEY", metavar="KEY", help="Its key. [OPENAI_API_KEY]"),
    click.option("--model", metavar="NAME", help="Its model.  [default: the first that it lists]"),
)

LOAD_OPTIONS = (
    click.option(
        "--rate",
        type=float,
        callback=_between(1e-6, 1e6),
        help="Open loop: mean arrivals a second; requests are sent at their times, whatever the answers do.",
    ),
    click.option(
        "--burstiness",
        type=float,
        default=1.0,
        callback=_between(0.01, 1e6),
        help="Of --rate: 1: Poisson; below: in bursts; above: more even.  [default: 1]",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1, 100_000),
        help=f"Closed loop: so many clients that each wait for their answers.  [default: {DEFAULT_CONCURRENCY}]",
    ),
    click.option(
        "--num-requests",
        type=click.IntRange(1, MAX_NUM_REQUESTS),
        help="Requests to send.  [default: 64, or the lines of the dataset, or what --duration allows]",
    ),
    click.option(
        "--duration",
        "duration_s",
        type=float,
        callback=_between(1e-3, 1e9),
        metavar="SECONDS",
        help="Send for so long; what is on its way then is waited for.",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0, MAX_NUM_REQUESTS),
        default=0,
        show_default=True,
        help="Requests before those; they do not count.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="Of arrivals, lengths and prompts.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=float,
        default=600.0,
        callback=_between(1e-3, 1e9),
        metavar="SECONDS",
        help="Time limit for each request.  [default: 600]",
    ),
)

CONTENT_OPTIONS = (
    click.option(
        "--input-len",
        default="128",
        show_default=True,
        callback=_to_lengths,
        metavar="LENGTHS",
        help=f"Tokens of a prompt (words, for OpenAI's API): {FORMS}.",
    ),
    click.option(
        "--output-len",
        default="64",
        show_default=True,
        callback=_to_lengths,
        metavar="LENGTHS",
        help="Tokens of an answer, likewise.",
    ),
    click.option(
        "--dataset",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help='Prompts instead of random ones: lines of JSON with "prompt" and maybe "max_tokens".',
    ),
    click.option(
        "--shared-prefix-len",
        type=click.IntRange(0, 10_000_000),
        default=0,
        show_default=True,
        help="Tokens in front of each prompt that others have too.",
    ),
    click.option(
        "--num-prefixes",
        type=click.IntRange(1, 1_000_000),
        default=1,
        show_default=True,
        help="How many such prefixes there are.",
    ),
    click.option("--temperature", type=Number(0, 100), default=0.0, show_default=True, help="0: the likeliest token."),
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=True,
        help="Whether answers have their full length.  [default: ignore-eos]",
    ),
)

OUTPUT_OPTIONS = (
    click.option(
        "--slo",
        callback=_to_slo,
        metavar="LIMITS",
        help="What a good request is, such as ttft=200ms,itl=50ms,tpot=40ms,e2e=5s.",
    ),
    click.option("--json", "json_path", type=_FILE, metavar="FILE", help='Write everything as JSON; "-": to stdout.'),
    click.option("--samples", "with_samples", is_flag=True, help="With --json: every request too."),
    click.option(
        "--plot",
        "plot_path",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_check_plot,
        metavar="FILE",
        help=f"Draw it ({', '.join(PLOT_SUFFIXES)}).",
    ),
)
