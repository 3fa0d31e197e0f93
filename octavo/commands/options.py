"""Options that several commands share: the scheduler's address, sampling, tenant and priority."""

import functools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from octavo.client import DEFAULT_ADDRESS
from octavo.commands.flag_names import in_flags
from octavo.errors import InvalidRequestError
from octavo.values.address import port_trouble, target_trouble
from octavo.values.sampling_params import EarlyStopping, SamplingParams
from octavo.values.sampling_params_table import BY_NAME, SAMPLING_PARAMS

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
    if trouble := target_trouble(address):
        raise click.BadParameter(trouble)
    return address


def check_addresses(ctx: click.Context, param: click.Parameter, addresses: str) -> tuple[str, ...]:
    """Return the addresses in a list with commas; a target of gRPC's that has commas itself is one."""
    each = (addresses,) if addresses.startswith(("ipv4:", "ipv6:")) else tuple(addresses.split(","))
    return tuple(check_address(ctx, param, address.strip()) for address in each)


def check_listen(ctx: click.Context, param: click.Parameter, address: str | None) -> str | None:
    """Refuse what no service can listen on; a callback of click. Port 0 takes a free one."""
    del ctx, param
    if address is not None and (trouble := port_trouble(address, least_port=0)):
        raise click.BadParameter(trouble)
    return address


def check_listen_or_off(ctx: click.Context, param: click.Parameter, address: str | None) -> str | None:
    """Refuse what is neither an address to listen on nor the word off."""
    if address == "off":
        return address
    try:
        return check_listen(ctx, param, address)
    except click.BadParameter as error:
        raise click.BadParameter(f"{error.message}, or the word off") from error


address_option = click.option(
    "--address",
    callback=check_addresses,
    default=DEFAULT_ADDRESS,
    show_default=True,
    envvar="OCTAVO_ADDRESS",
    metavar="HOST:PORT",
    help="Address of the scheduler. With several, separated by commas, the next one is tried if one cannot serve. "
    "[OCTAVO_ADDRESS]",
)


def _to_early_stopping(ctx: click.Context, param: click.Parameter, word: str | None) -> EarlyStopping | None:
    del ctx, param
    return _EARLY_STOPPING[word] if word is not None else None


def _to_biases(ctx: click.Context, param: click.Parameter, entries: tuple[str, ...]) -> dict[int, float] | None:
    del ctx, param
    biases: dict[int, float] = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{entry!r} is not ID=BIAS, such as 42=-1.5") from None
    return biases or None


def _to_text(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    del ctx, param
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise click.BadParameter(f"{path!r} cannot be read: {reason}") from error


def _to_choice(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the texts; None: there are none, so nothing is restricted."""
    del ctx, param
    return texts or None


_EARLY_STOPPING: dict[str, EarlyStopping] = {"true": True, "false": False, "never": "never"}


# Without --max-tokens. The API goes on to the model's length, which can be a book.
DEFAULT_MAX_TOKENS = 512


def number_option(name: str, help_text: str | None = None) -> Callable[..., Any]:
    """Return the flag of a number in the table of sampling parameters; `help_text`: in place of the table's."""
    parameter = BY_NAME[name]
    default = DEFAULT_MAX_TOKENS if name == "max_tokens" else parameter.default_words
    return click.option(
        f"--{name.replace('_', '-')}",
        type=int if parameter.is_whole else float,
        help=f"{help_text or parameter.doc}  [default: {default}]",
    )


# The numbers that only one command takes: it has their flags.
OF_ONE_COMMAND = ("n", "logprobs", "prompt_logprobs")

_SAMPLING_OPTIONS = (
    *(
        number_option(parameter.name)
        for parameter in SAMPLING_PARAMS
        if parameter.is_public and parameter.name not in OF_ONE_COMMAND
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=_to_biases,
        metavar="ID=BIAS",
        help="Add BIAS to the logit of token ID. Repeatable.",
    ),
    click.option("--ban", "banned_words", multiple=True, metavar="TEXT", help="Never generate this text. Repeatable."),
    click.option(
        "--ban-token-id", "banned_token_ids", type=int, multiple=True, help="Never generate this token. Repeatable."
    ),
    click.option(
        "--allow-token-id",
        "allowed_token_ids",
        type=int,
        multiple=True,
        help="Generate only the tokens given by this flag. Repeatable.",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop string: stop before this text. Repeatable."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        help="Stop token: stop at this token id. Repeatable.",
    ),
    click.option(
        "--json-schema", callback=_to_text, metavar="FILE", help="Generate JSON that is valid by the schema in FILE."
    ),
    click.option("--json-object", is_flag=True, help="Generate a JSON object."),
    click.option("--regex", metavar="REGEX", help="Generate a text that matches this regular expression, all of it."),
    click.option(
        "--choice", multiple=True, callback=_to_choice, metavar="TEXT", help="Generate one of these texts. Repeatable."
    ),
    click.option(
        "--grammar",
        callback=_to_text,
        metavar="FILE",
        help="Generate a text of the grammar in FILE, in Lark's notation.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Continue after the model's end-of-sequence token."),
    click.option(
        "--early-stopping",
        type=click.Choice(list(_EARLY_STOPPING)),
        callback=_to_early_stopping,
        help=(
            "When a beam search stops. true: once there are enough hypotheses; false: once better ones are unlikely; "
            "never: once better ones are impossible.  [default: false]"
        ),
    ),
)

_ACCOUNT_OPTIONS = (
    click.option("--priority", type=int, default=0, show_default=True, help="Smaller numbers are served first."),
    click.option("--tenant", default="", metavar="NAME", help="Tenant of the request."),
    click.option(
        "--cache-salt",
        default="",
        metavar="TEXT",
        help="Share cached prefixes only with requests that have the same salt.",
    ),
    click.option(
        "--no-speculate",
        "speculate",
        flag_value=False,
        default=True,
        help="Take one token a step, also where the scheduler speculates.",
    ),
)


adapter_option = click.option(
    "--lora-adapter", default="", metavar="NAME", help="Adapter on top of the weights; octavo list names those loaded."
)


def sampling_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command the sampling flags.

    All its flags that are named like fields of SamplingParams, own ones too, come as its first argument. Its
    `max_tokens` is None without --max-tokens: `bounded` sets it where a request is sent.
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


def bounded(params: SamplingParams) -> SamplingParams:
    """Return the parameters with DEFAULT_MAX_TOKENS, or --min-tokens if that is more, unless they have max_tokens."""
    if params.max_tokens is not None:
        return params
    return replace(params, max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens or 0))


def account_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command the flags that tell requests apart, named like the arguments of `Client.stream`."""
    return with_options(*_ACCOUNT_OPTIONS)(command)


def with_options(*options: Callable[..., Any]) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Return what gives a command flags, in this order."""

    def decorate(command: Callable[..., _R]) -> Callable[..., _R]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def is_on_command_line(context: click.Context, name: str) -> bool:
    """Return whether a parameter was given as a flag, and not by a variable or not at all."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
