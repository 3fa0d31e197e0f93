"""What `/set` of `octavo chat` changes: the sampling parameters, as their flags of the command line take them."""

from dataclasses import fields, replace
from typing import Any

import click

from octavo.values.sampling_params import SamplingParams
from octavo.values.sampling_params_table import BY_NAME
from octavo.values.wording import did_you_mean


def change_setting(params: SamplingParams, text: str, context: click.Context) -> SamplingParams:
    """Return the parameters after `/set TEXT`; a name without a value has its default again.

    Raises:
        click.UsageError: there is no such parameter, or it does not take the value.
    """
    word, _, value = text.partition(" ")
    options = _options(context)
    name = word.lstrip("-").replace("-", "_")
    option = options.get(name)
    if option is None or option.name is None:
        raise click.UsageError(f"unknown sampling parameter {word!r}{did_you_mean(name, options)}")
    default = next(field.default for field in fields(SamplingParams) if field.name == option.name)
    taken: Any = default
    if value.strip():
        given = value.strip()
        taken = option.process_value(context, [given] if option.multiple else given)
        parameter = BY_NAME.get(option.name)
        if parameter is not None and not parameter.allows(taken):
            raise click.UsageError(f"{option.name} is {given}; it must be {parameter.limit}")
    return replace(params, **{option.name: taken})


def list_settings(params: SamplingParams) -> str:
    """Return the parameters that do not have their defaults, one a line."""
    changed = [
        f"{field.name} {getattr(params, field.name)}"
        for field in fields(params)
        if getattr(params, field.name) not in (field.default, None)
    ]
    return "\n".join(changed) or "all sampling parameters have their default values"


def _options(context: click.Context) -> dict[str, click.Option]:
    """Return the flags of a command that are sampling parameters, by field and by flag."""
    names = {field.name for field in fields(SamplingParams)}
    found = [option for option in context.command.params if isinstance(option, click.Option) and option.name in names]
    by_field = {option.name or "": option for option in found}
    by_flag = {flag.lstrip("-").replace("-", "_"): option for option in found for flag in option.opts}
    return by_field | by_flag
