"""The settings of the two services where both are started together: `octavo up`, `octavo demo`, `octavo.LLM`.

They are declared once, in executor_svc/config.py and scheduler_svc/config/scheduler_config.py; from there come names,
types, rules and sentences. Each is called by its name, which says which service it is for. A name that both services
have, such as `log_level`, is for both, but for ports and certificates: each of those belongs to one. SERVICE.NAME is
for one service only. Next: `services.py`, which starts the services.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic.fields import FieldInfo

from executor_svc.config import ExecutorConfig
from octavo.errors import SettingsError
from octavo.values.wording import did_you_mean, kind_of
from octavo_shared.process.config import ConfigError, Setting, load_config, removed_hint
from octavo_shared.process.service_config import ServiceConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig

_ConfigT = TypeVar("_ConfigT", bound=ServiceConfig)

CONFIG_CLASSES: tuple[type[ServiceConfig], ...] = (ExecutorConfig, SchedulerConfig)

# What is given to the services here: the model, where the executor is, and that they end with us.
_FIXED = ("model", "executor", "exit_on_stdin_close")


@dataclass(frozen=True, slots=True)
class CheckedSettings(Generic[_ConfigT]):
    """What one service will run with, as far as it can be known here.

    Attributes:
        config: The whole configuration, also from the environment and the file that OCTAVO_CONFIG names.
        given: The settings that were given here, by name.
    """

    config: _ConfigT
    given: tuple[str, ...]

    def arguments(self) -> list[str]:
        """Return what was given as flags of the service."""
        return [argument for name in self.given for argument in _to_arguments(name, getattr(self.config, name))]


def settable_names(config_class: type[ServiceConfig]) -> list[str]:
    """Return the settings that can be given to a service here."""
    return [name for name in config_class.model_fields if name not in _FIXED]


def services_of(name: str) -> list[str]:
    """Return the services that a setting is for when it is called by its name alone; none: there is no such name."""
    services = [config_class.service for config_class in CONFIG_CLASSES if name in settable_names(config_class)]
    return [] if len(services) > 1 and _belongs_to_one(name) else services


def plain_names() -> list[str]:
    """Return the settings that can be called by their names alone; the executor's come first."""
    names = [name for config_class in CONFIG_CLASSES for name in settable_names(config_class)]
    return [name for name in dict.fromkeys(names) if services_of(name)]


def field_of(name: str) -> FieldInfo:
    """Return the declaration of a setting that can be called by its name alone; of both services', the executor's."""
    return next(each.model_fields[name] for each in CONFIG_CLASSES if name in settable_names(each))


def unknown_name(name: str) -> str | None:
    """Return what there is to say of a name that is no setting; None: it is one."""
    if services_of(name):
        return None
    if all(name in settable_names(config_class) for config_class in CONFIG_CLASSES):
        return f"{name} applies to one service: use executor={{'{name}': ...}} or scheduler={{'{name}': ...}}"
    return f"{name} is not a setting{removed_hint(SchedulerConfig, name) or did_you_mean(name, plain_names())}"


def settings_by_service(
    settings: Mapping[str, object], *, spell: Callable[[str], str], **of_one_service: object
) -> dict[str, dict[str, Setting]]:
    """Return the settings of each service by name; settings of one service only win.

    Args:
        settings: By name.
        spell: How the caller's user calls a setting, for the sentence about a wrong value.
        of_one_service: By service, and there by name.

    Raises:
        SettingsError: a name is no setting.
    """
    mistakes = [mistake for name in settings if (mistake := unknown_name(name))]
    found: dict[str, dict[str, Setting]] = {}
    for config_class in CONFIG_CLASSES:
        service, known = config_class.service, settable_names(config_class)
        found[service] = {
            name: Setting(value, spell(name)) for name, value in settings.items() if service in services_of(name)
        }
        own = of_one_service.get(service, {})
        if not isinstance(own, Mapping):
            example = "{'log_level': 'debug'}"
            mistakes.append(f"{service} is {kind_of(own)}; it must be a dict of settings, such as {example}")
            continue
        found[service] |= {name: Setting(value, f"{service}.{name}") for name, value in own.items()}
        mistakes += [f"{service}.{name} {_why_not(service, name, known)}" for name in own if name not in known]
    if mistakes:
        raise SettingsError(mistakes)
    # None is what it is everywhere in this package: not given.
    return {
        service: {name: setting for name, setting in named.items() if setting.value is not None}
        for service, named in found.items()
    }


def check_settings(
    executor: Mapping[str, Setting], scheduler: Mapping[str, Setting], environ: Mapping[str, str]
) -> tuple[CheckedSettings[ExecutorConfig], CheckedSettings[SchedulerConfig]]:
    """Return what both services will run with, checked as each itself does, in the same sentences.

    Raises:
        SettingsError: values break their rules, or the environment or the file of settings is wrong.
    """
    mistakes: list[str] = []
    checked = _check(ExecutorConfig, executor, environ, mistakes), _check(SchedulerConfig, scheduler, environ, mistakes)
    of_executor, of_scheduler = checked
    if of_executor is None or of_scheduler is None:
        raise SettingsError(list(dict.fromkeys(mistakes)))  # a mistake that concerns both is told once
    return of_executor, of_scheduler


def _check(
    config_class: type[_ConfigT], given: Mapping[str, Setting], environ: Mapping[str, str], mistakes: list[str]
) -> CheckedSettings[_ConfigT] | None:
    try:
        return CheckedSettings(load_config(config_class, [], environ, given), tuple(given))
    except ConfigError as error:
        mistakes += error.mistakes
        return None


def _belongs_to_one(name: str) -> bool:
    return name.endswith("listen") or name.startswith("tls_")


def _why_not(service: str, name: str, known: list[str]) -> str:
    if name in _FIXED:
        return "cannot be set here: Octavo sets it when it starts both services"
    others = [other for other in CONFIG_CLASSES if other.service != service and name in settable_names(other)]
    if others:
        return f"is not a setting of the {service}; it is {others[0].service}.{name}"
    gone = next(removed_hint(each, name) for each in CONFIG_CLASSES if each.service == service)
    return f"is not a setting{gone or did_you_mean(name, known, prefix=f'{service}.')}"


def _to_arguments(name: str, value: object) -> list[str]:
    """Return a setting as flags of its service."""
    flag = name.replace("_", "-")
    match value:
        case None:
            return []
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case tuple():
            return [f"--{flag}", ",".join(map(str, value))]
        case _:
            return [f"--{flag}", str(value)]
