"""Command lines of the documentation, read by the parsers of the programs that they name."""

import re
from collections.abc import Sequence

import click

from executor_svc.config import ExecutorConfig, FakeConfig
from octavo.commands.command_line import cli
from octavo_shared.process.config import ConfigError, load_config
from octavo_shared.process.service_config import ServiceConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig

SERVICES: dict[str, type[ServiceConfig]] = {
    "scheduler_svc": SchedulerConfig,
    "executor_svc": ExecutorConfig,
    "executor_svc.fake": FakeConfig,
}


def mistake(words: Sequence[str]) -> str:
    """Return what is wrong with a command line of ours; empty: nothing is, or it is another program's.

    Args:
        words: The program and its arguments; with `...`, which stands for more of them, only flags are looked at.
    """
    if "..." in words:
        return ", ".join(unknown_flags(words))
    if words[0] == "octavo":
        return _mistake_of_octavo(list(words[1:]))
    service = _service(words)
    if service is None or "--help" in words:
        return ""
    try:
        load_config(SERVICES[service], words[words.index(service) + 1 :], {})
    except ConfigError as error:
        return str(error)
    return ""


def unknown_flags(words: Sequence[str]) -> list[str]:
    """Return the flags that a command of ours does not have; what a sentence quotes need not be complete."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    service = _service(words)
    if service is not None:
        names = [name.replace("_", "-") for name in SERVICES[service].model_fields]
        known = {"--help", "--config", *(f"--{name}" for name in names), *(f"--no-{name}" for name in names)}
    elif words[0] == "octavo":
        known = _flags_of_octavo(words[1:])
    else:
        return []
    return [flag for flag in flags if flag not in known]


def _service(words: Sequence[str]) -> str | None:
    """Return which service `python -m` runs; None: it is something else."""
    if not re.fullmatch(r"python3?", words[0]) or "-m" not in words[:-1]:
        return None
    module = words[words.index("-m") + 1]
    return module if module in SERVICES else None


def _mistake_of_octavo(arguments: list[str]) -> str:
    """Parse as `octavo` does, without running anything."""
    command: click.Command = cli
    try:
        while isinstance(command, click.Group):
            at = next((index for index, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
            context = click.Context(command)
            command.make_parser(context).parse_args(arguments[:at])
            if at == len(arguments):
                return ""
            name, arguments = arguments[at], arguments[at + 1 :]
            found = command.get_command(context, name)
            if found is None:
                return f"octavo has no command {name!r}"
            command = found
        command.make_context("octavo", arguments)
    except click.exceptions.Exit:  # --help
        return ""
    except click.ClickException as error:
        said = error.format_message()
        return "" if said.endswith("No such file or directory") else said  # another command of the page writes it
    return ""


def _flags_of_octavo(arguments: Sequence[str]) -> set[str]:
    """Return the flags of the command that the arguments name, and of the groups that it is in."""
    command: click.Command = cli
    known = {"--help"}
    for word in [*arguments, ""]:
        known |= {flag for param in command.params for flag in [*param.opts, *param.secondary_opts]}
        if isinstance(command, click.Group) and not word.startswith("-"):
            command = command.get_command(click.Context(command), word) or command
    return known
