"""Options that several commands share: the scheduler's address, sampling, whose request, the local services."""

import functools
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from octavo.client import DEFAULT_ADDRESS
from octavo.commands.flag_names import in_flags
from octavo.errors import InvalidRequestError
from octavo.local import LocalOptions
from octavo.model_names import DEMO_MODEL, resolve_model
from octavo.sampling_params import EarlyStopping, SamplingParams

_R = TypeVar("_R")


class Number(click.FloatRange):
    """A number between two limits: click's own range lets NaN through, which is beyond none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; refuse what is none."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def check_address(ctx: click.Context, param: click.Parameter, address: str) -> str:
    """Refuse what gRPC would only fail to connect to; its other targets, such as unix:PATH, pass."""
    del ctx, param  # click names them in the message
    if address.startswith(("http://", "https://")):
        raise click.BadParameter(f"{address!r} is not HOST:PORT; leave out {address.partition('//')[0]}//")
    if "/" in address or address.startswith("unix"):
        return address
    return _check_port(address, least_port=1)


def check_listen(ctx: click.Context, param: click.Parameter, address: str) -> str:
    """Refuse what no service can listen on; a callback of click. Port 0 takes a free one."""
    del ctx, param
    return _check_port(address, least_port=0)


def _check_port(address: str, *, least_port: int) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not least_port <= int(port) <= 65535:
        raise click.BadParameter(f"{address!r} is not HOST:PORT with a port from {least_port} to 65535")
    return address


address_option = click.option(
    "--address",
    callback=check_address,
    default=DEFAULT_ADDRESS,
    show_default=True,
    envvar="OCTAVO_ADDRESS",
    metavar="HOST:PORT",
    help="The scheduler. [OCTAVO_ADDRESS]",
)


def _to_early_stopping(ctx: click.Context, param: click.Parameter, word: str | None) -> EarlyStopping | None:
    """Return the word's value in SamplingParams."""
    del ctx, param
    return _EARLY_STOPPING[word] if word is not None else None


def _to_biases(ctx: click.Context, param: click.Parameter, entries: tuple[str, ...]) -> dict[int, float] | None:
    """Return the biases by token id; None: there are none."""
    del ctx, param
    biases: dict[int, float] = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{entry!r} is not ID=BIAS, such as 42=-1.5") from None
    return biases or None


_EARLY_STOPPING: dict[str, EarlyStopping] = {"true": True, "false": False, "never": "never"}

_SAMPLING_OPTIONS = (
    click.option("--temperature", type=float, help="0: greedy, the most likely token.  [default: 1]"),
    click.option("--top-k", type=int, help="Keep only so many of the most likely tokens."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability."),
    click.option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
    click.option("--typical-p", type=float, help="Keep the tokens nearest to the expected information."),
    click.option("--repetition-penalty", type=float, help="Above 1: tokens of prompt and output come less."),
    click.option("--presence-penalty", type=float, help="Above 0: tokens of the output come less."),
    click.option("--frequency-penalty", type=float, help="Above 0: the oftener a token came, the less it comes."),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=_to_biases,
        metavar="ID=BIAS",
        help="Add to the logit of a token. Repeatable.",
    ),
    click.option("--ban", "banned_words", multiple=True, metavar="TEXT", help="Never make this text. Repeatable."),
    click.option(
        "--ban-token-id", "banned_token_ids", type=int, multiple=True, help="Never make this token. Repeatable."
    ),
    click.option(
        "--allow-token-id", "allowed_token_ids", type=int, multiple=True, help="Make only such tokens. Repeatable."
    ),
    click.option("--min-tokens", type=int, help="Fewest tokens before anything ends the output."),
    click.option("--seed", type=int, help="Equal seeds give equal outputs."),
    click.option("--max-tokens", type=int, help="Most tokens to make.  [default: as many as fit]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. Repeatable."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token. Repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token."),
    click.option("--best-of", type=int, help="Make so many outputs and return the likeliest."),
    click.option("--beam-width", type=int, help="Search with so many beams instead of sampling."),
    click.option("--length-penalty", type=float, help="Beams: above 0 favours long outputs.  [default: 1]"),
    click.option(
        "--early-stopping",
        type=click.Choice(list(_EARLY_STOPPING)),
        callback=_to_early_stopping,
        help="Beams: stop at the first hypotheses, or when better ones are unlikely or impossible.  [default: false]",
    ),
)

_ACCOUNT_OPTIONS = (
    click.option("--priority", type=int, default=0, show_default=True, help="A lower number is served first."),
    click.option("--tenant", default="", metavar="NAME", help="On whose account it runs."),
    click.option("--cache-salt", default="", metavar="TEXT", help="Share cached prompts only with equal salts."),
)


def sampling_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command the sampling flags.

    All its flags that are named like fields of SamplingParams, own ones too, come as its first argument.
    What the scheduler says of a field is said of the flag.
    """
    names = {field.name for field in fields(SamplingParams)}

    @functools.wraps(command)
    def with_sampling_params(**flags: Any) -> _R:
        params = {name: flags.pop(name) for name in names & flags.keys()}
        try:
            return command(SamplingParams(**params), **flags)
        except InvalidRequestError as error:
            sentence = in_flags(str(error), click.get_current_context())
            raise InvalidRequestError(sentence, field=error.field) from error

    return with_options(*_SAMPLING_OPTIONS)(with_sampling_params)


def account_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command the flags that tell requests apart, named like the arguments of `Client.stream`."""
    return with_options(*_ACCOUNT_OPTIONS)(command)


_COUNT = click.IntRange(min=1)

# What a service would refuse is refused before one is started. The values and defaults are those of the services.
_SERVICE_OPTIONS = (
    click.option(
        "--model",
        default=DEMO_MODEL,
        show_default=True,
        metavar="MODEL",
        help="The demo model, a Hugging Face directory, or a hub id.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="Number format of weights and cache; auto: on a GPU that of the model, on a CPU float32.  [default: auto]",
    ),
    click.option(
        "--quantization",
        type=click.Choice(["none", "int8"]),
        help="int8: weights in a quarter of float32's memory.  [default: none]",
    ),
    click.option(
        "--attention-backend",
        type=click.Choice(["auto", "triton", "flash_attn", "xformers", "torch"]),
        help="What computes attention.  [default: auto]",
    ),
    click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where the model runs.  [default: cpu]"),
    click.option("--tp", type=_COUNT, help="Ranks that share the model, each a process.  [default: 1]"),
    click.option(
        "--kv-cache-gib",
        type=Number(min=0, min_open=True),
        metavar="GIB",
        help="Size of the KV cache.  [default: by the free memory]",
    ),
    click.option(
        "--host-cache-gib",
        type=Number(min=0),
        metavar="GIB",
        help="Host memory for swapped sequences; 0: none.  [default: 0.5]",
    ),
    click.option(
        "--max-model-len",
        type=_COUNT,
        metavar="TOKENS",
        help="Longest sequence, prompt and output.  [default: the model's]",
    ),
    click.option("--max-num-batched-tokens", type=_COUNT, metavar="TOKENS", help="Budget of a step.  [default: 2048]"),
    click.option("--max-num-seqs", type=_COUNT, help="Most sequences in the batch.  [default: 256]"),
    click.option(
        "--max-waiting-requests", type=_COUNT, help="Most requests that wait; more are refused.  [default: 1024]"
    ),
    click.option("--verbose", is_flag=True, help="Show the services' logs on stderr."),
)


def service_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command the flags of the two local services, named like the fields of LocalOptions."""
    return with_options(*_SERVICE_OPTIONS)(command)


def to_local_options(model: str, **flags: Any) -> LocalOptions:
    """Return the options that the flags describe; the demo model is made, with progress bars, if missing."""
    return LocalOptions(model=resolve_model(model), **flags)


def with_options(*options: Callable[..., Any]) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Return what gives a command flags, in this order."""

    def decorate(command: Callable[..., _R]) -> Callable[..., _R]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def is_on_command_line(context: click.Context, name: str) -> bool:
    """Return whether somebody gave a parameter as a flag, and not by a variable or not at all."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
