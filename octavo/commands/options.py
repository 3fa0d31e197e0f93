"""Options that several commands share: the scheduler's address, sampling, the two local services."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from octavo.client import DEFAULT_ADDRESS
from octavo.local import LocalOptions
from octavo.model_names import DEMO_MODEL, resolve_model
from octavo.sampling_params import SamplingParams

_R = TypeVar("_R")


def _check_address(ctx: click.Context, param: click.Parameter, address: str) -> str:
    """Refuse what gRPC would only fail to connect to; its other targets, such as unix:PATH, pass."""
    del ctx, param  # click names them in the message
    if "/" in address or address.startswith("unix"):
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise click.BadParameter(f"{address!r} is not HOST:PORT with a port from 1 to 65535")
    return address


address_option = click.option(
    "--address",
    callback=_check_address,
    default=DEFAULT_ADDRESS,
    show_default=True,
    envvar="OCTAVO_ADDRESS",
    metavar="HOST:PORT",
    help="The scheduler. [OCTAVO_ADDRESS]",
)

_SAMPLING_OPTIONS = (
    click.option("--temperature", type=float, help="0: greedy, the most likely token.  [default: 1]"),
    click.option("--top-k", type=int, help="Keep only so many of the most likely tokens."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability."),
    click.option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
    click.option("--seed", type=int, help="Equal seeds give equal outputs."),
    click.option("--max-tokens", type=int, help="Most tokens to make.  [default: as many as fit]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. Repeatable."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token. Repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token."),
)


def sampling_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command the sampling flags; it gets them as SamplingParams, its first argument."""

    @functools.wraps(command)
    def with_sampling_params(**flags: Any) -> _R:
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos")
        sampling_params = SamplingParams(**{name: flags.pop(name) for name in names})
        return command(sampling_params, **flags)

    return _decorate(with_sampling_params, _SAMPLING_OPTIONS)


_SERVICE_OPTIONS = (
    click.option(
        "--model",
        default=DEMO_MODEL,
        show_default=True,
        help="The demo model, a Hugging Face directory, or a hub id.",
    ),
    click.option("--dtype", help="Number format of weights and cache, such as float32."),
    click.option("--device", help="cpu or cuda."),
    click.option("--kv-cache-gib", type=float, help="Size of the KV cache."),
    click.option("--max-model-len", type=int, help="Longest sequence, prompt and output, in tokens."),
    click.option("--max-num-batched-tokens", type=int, help="Token budget of a step."),
    click.option("--max-num-seqs", type=int, help="Most sequences in the batch."),
    click.option("--max-waiting-requests", type=int, help="Most requests that wait; more are refused."),
    click.option("--verbose", is_flag=True, help="Show the services' logs on stderr."),
)


def service_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command the flags of the two local services, named like the fields of LocalOptions."""
    return _decorate(command, _SERVICE_OPTIONS)


def to_local_options(model: str, **flags: Any) -> LocalOptions:
    """Return the options that the flags describe; the demo model is made, with progress bars, if missing."""
    return LocalOptions(model=resolve_model(model), **flags)


def _decorate(command: Callable[..., _R], options: tuple[Callable[..., Any], ...]) -> Callable[..., _R]:
    for option in reversed(options):
        command = option(command)
    return command
