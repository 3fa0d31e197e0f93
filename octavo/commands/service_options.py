"""The flags of the commands that start the services: the settings of the services, from where they are declared."""

import functools
import importlib.util
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from octavo.commands.options import with_options
from octavo.errors import SettingsError
from octavo.models.names import DEMO_MODEL

_R = TypeVar("_R")

# What the help of a command describes; all other settings it only names.
_COMMON = (
    *("dtype", "quantization", "compute_dtype", "attention_backend", "device", "tp", "num_threads", "kv_cache_gib"),
    *("host_cache_gib", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "max_waiting_requests", "policy"),
)

# `octavo up` has flags of its own for them, with other defaults.
_OWN = ("admin_listen", "page_listen", "openai_listen")


class _SettingOption(click.Option):
    """A setting as a flag. Its value is text here: the rules of the services check it, with all the others.

    Args:
        param_decls: As for any option.
        is_common: Whether the help of a command describes it.
        choices: What it may be, for the shell's completion; empty: anything.
        attributes: As for any option.
    """

    def __init__(
        self, param_decls: Sequence[str], *, is_common: bool, choices: Sequence[str], **attributes: Any
    ) -> None:
        super().__init__(param_decls, **attributes)
        self._is_common = is_common
        self._choices = choices

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if self._is_common else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(choice) for choice in self._choices if choice.startswith(incomplete)]


class ServiceCommand(click.Command):
    """A command that starts both services, with their settings as flags, for a function with `service_options`.

    The flags are made on first use: their declarations need packages that other commands do without.
    """

    _has_settings = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the flags; for one that was removed, or that each service has by itself, say what to use."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if gone := _removed_hint(error.option_name):
                raise click.UsageError(f"{error.option_name} is not a flag{gone}", ctx) from error
            name = error.option_name.removeprefix("--").replace("-", "_")
            if name not in _names_of_one_service():
                raise
            message = f"No such option {error.option_name!r}: each service has its own; to set the scheduler's, use"
            raise click.UsageError(f"{message} --set scheduler.{name}=VALUE", ctx) from error

    @property
    def params(self) -> list[click.Parameter]:
        """All parameters: the command's own, the settings, then --set and --verbose; click changes the list."""
        if not self._has_settings:
            self._has_settings = True
            self._params += [*map(_setting_option, _plain_names()), _SET, _VERBOSE]
        return self._params

    @params.setter
    def params(self, own_params: list[click.Parameter]) -> None:
        self._params = own_params

    @property
    def epilog(self) -> str | None:
        """The last paragraphs of the help: the settings that it does not describe."""
        flags = " ".join(to_flag(name) for name in _plain_names() if name not in _COMMON)
        lines = textwrap.wrap(flags, 76, break_on_hyphens=False)
        # click keeps the line breaks of a paragraph that begins with \b.
        return "\n".join(
            [
                "All other settings of the services are accepted as flags too; `python -m executor_svc --help` and "
                "`python -m scheduler_svc --help` explain them:",
                "",
                "\b",
                *lines,
                "",
                "A flag that both services have applies to both. Ports and certificates differ per service: use --set.",
            ]
        )

    @epilog.setter
    def epilog(self, text: str | None) -> None:
        assert text is None, "it is made from the settings"


def service_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Let a function be a ServiceCommand.

    It gets `model`, `verbose`, and as `options` the other arguments of LocalOptions. Wrong settings are wrong usage.
    """

    @functools.wraps(command)
    def with_settings(*, assignments: tuple[str, ...], **flags: Any) -> _R:
        settings = {name: flags.pop(name) for name in _plain_names()}
        of_one_service: dict[str, dict[str, object]] = {"executor": {}, "scheduler": {}}
        for assignment in assignments:
            service, name, value = _parse(assignment)
            of_one_service[service][name] = value
        try:
            return command(options={"settings": settings, "spell": to_flag, **of_one_service}, **flags)
        except SettingsError as error:
            raise click.UsageError(str(error), click.get_current_context()) from error

    return with_options(_MODEL)(with_settings)


def to_flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


_MODEL = click.option(
    "--model",
    default=DEMO_MODEL,
    show_default=True,
    metavar="MODEL",
    help="The demo model, a Hugging Face directory, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B.",
)
_SET = click.Option(
    ["--set", "assignments"],
    multiple=True,
    metavar="SERVICE.NAME=VALUE",
    help="Set an option of one service only, such as executor.log_level=debug. Repeatable.",
)
_VERBOSE = click.Option(["--verbose"], is_flag=True, help="Print the services' logs to stderr.")


@functools.cache
def _plain_names() -> tuple[str, ...]:
    """Return the settings that have a flag, common ones first; none where the packages of the services are missing."""
    if importlib.util.find_spec("pydantic") is None:  # LocalOptions says so
        return ()
    from octavo.local.service_settings import plain_names

    return (*_COMMON, *(name for name in plain_names() if name not in (*_COMMON, *_OWN)))


def _names_of_one_service() -> list[str]:
    """Return the settings that both services have, and that are given to each by itself."""
    if importlib.util.find_spec("pydantic") is None:
        return []
    from octavo.local.service_settings import CONFIG_CLASSES, services_of, settable_names

    return [name for name in settable_names(CONFIG_CLASSES[0]) if not services_of(name)]


def _removed_hint(flag: str) -> str:
    """Return what there is to say of a flag that an earlier release had; "": nothing."""
    if importlib.util.find_spec("pydantic") is None:
        return ""
    from octavo_shared.process.config import removed_flag_hint
    from scheduler_svc.config.scheduler_config import SchedulerConfig

    return removed_flag_hint(SchedulerConfig, flag)


def _setting_option(name: str) -> _SettingOption:
    from octavo.local.service_settings import field_of

    field = field_of(name)
    is_bool = field.annotation is bool
    is_number = field.annotation in (int, int | None, float, float | None)
    choices = [str(choice) for choice in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
    default = "" if field.default in (None, (), "") or is_bool else f"  [default: {field.default}]"
    return _SettingOption(
        [f"{to_flag(name)}/{to_flag(f'no_{name}')}" if is_bool else to_flag(name), name],
        is_common=name in _COMMON,
        choices=choices,
        type=bool if is_bool else str,
        default=None,
        metavar=None if is_bool else f"[{'|'.join(choices)}]" if choices else "NUMBER" if is_number else "VALUE",
        help=f"{field.description}{default}",
    )


def _parse(assignment: str) -> tuple[str, str, str]:
    place, equals, value = assignment.partition("=")
    service, dot, name = place.partition(".")
    if not (equals and dot and service in ("executor", "scheduler")):
        raise click.BadParameter(
            f"{assignment!r} is not SERVICE.NAME=VALUE, such as executor.log_level=debug; the services are executor "
            "and scheduler",
            param_hint="--set",
        )
    return service, name.replace("-", "_"), value
