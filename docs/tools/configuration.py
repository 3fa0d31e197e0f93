"""docs/reference/configuration.md: every setting of the services, from the classes that read them."""

import re
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from executor_svc.config import ExecutorConfig, FakeConfig
from octavo_shared.process.config import CONFIG_VARIABLE
from octavo_shared.process.service_config import ADDRESS_PATTERN, ServiceConfig
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig

CONFIG_CLASSES: tuple[type[ServiceConfig], ...] = (SchedulerConfig, FrontConfig, ExecutorConfig, FakeConfig)

_TITLES = {"scheduler": "Scheduler", "front": "Front of its own", "executor": "Executor", "fake": "Fake executor"}

# A flag in a description, which is plain text.
_FLAG = re.compile(r"(?<![\w`-])--([a-z][a-z-]+[a-z])")

_INTRODUCTION = f"""\
<!-- Written by `make docs-reference` from the code; changes here are lost. -->
# Configuration

Each setting is a flag, an environment variable, and a key in a table of a TOML file. Flags override variables, and
variables override the file. The file is given by `--config FILE` or `{CONFIG_VARIABLE}`; one file may contain the
tables of all services. With an unknown name or an invalid value a service does not start, and its
message names the setting.
`--help` of a service prints the same list.

```toml
# --config octavo.toml
[scheduler]
listen = "127.0.0.1:50051"                       # --listen, OCTAVO_SCHEDULER_LISTEN
executor = ["10.0.0.1:50061", "10.0.0.2:50061"]  # --executor 10.0.0.1:50061,10.0.0.2:50061

[executor]
model = "/models/llama"                          # --model, OCTAVO_EXECUTOR_MODEL
```

A list is an array in the file, and separated by commas in flags and variables. A setting that is true or false has two
flags, such as `--x` and `--no-x`.

`octavo up` and `octavo.LLM`, which start both services, take every setting too
([how they tell the services apart](../python-client.md#settings)).
"""


def page(_: str) -> str:
    """Return the whole page."""
    sections = [_INTRODUCTION]
    common = [name for name in ServiceConfig.model_fields if _is_common(name)]
    for config_class in CONFIG_CLASSES:
        own = [name for name in config_class.model_fields if name not in common]
        sections.append(_section(config_class, own))
    sections.append(
        "## Every service\n\n"
        "The scheduler, a standalone front, the executor and the fake executor have these, each in its own table and "
        "with its own variables: for `SERVICE` put `SCHEDULER`, `FRONT`, `EXECUTOR` or `FAKE`.\n"
    )
    sections += [_setting(ServiceConfig, name, "service") for name in common]
    return "\n".join(sections)


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(service: str, name: str) -> str:
    """Return the environment variable of a setting; `service` is the name of the table."""
    return f"OCTAVO_{service}_{name}".upper()


def _is_common(name: str) -> bool:
    """Return whether a setting is the same in every service."""
    fields = [config_class.model_fields[name] for config_class in CONFIG_CLASSES]
    return all(repr(field) == repr(ServiceConfig.model_fields[name]) for field in fields)


def _section(config_class: type[ServiceConfig], names: Iterable[str]) -> str:
    service = config_class.service
    summary = (config_class.__doc__ or "").partition("\n")[0]
    head = (
        f"## {_TITLES[service]}\n\n`{config_class.program}`, table `[{service}]`. "
        f"{summary} What [every service](#every-service) has comes with it.\n"
    )
    return "\n".join([head, *(_setting(config_class, name, service) for name in names)])


def _setting(config_class: type[ServiceConfig], name: str, service: str) -> str:
    field = config_class.model_fields[name]
    flags = f"`{flag(name)}`" + (f" or `--no-{flag(name)[2:]}`" if field.annotation is bool else "")
    description = _FLAG.sub(r"`--\1`", field.description or "")
    rules = ", ".join([_kind(field), *_limits(field)])
    return (
        f"### {service}.{name}\n\n{description}\n\n"
        f"- {flags}, `{variable(service, name)}`\n- {rules}\n- {_default(field)}\n"
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value == () or value == "":
        return "not set by default"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"default: `{text.lower() if isinstance(value, bool) else text}`"


def _kind(field: FieldInfo) -> str:
    """Return the type of a setting in words."""
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        [annotation] = [part for part in get_args(annotation) if part is not NoneType]
    if any(getattr(rule, "pattern", None) == ADDRESS_PATTERN for rule in field.metadata):
        return "`host:port`"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "a list"
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false", "Path": "a path", "str": "text"}
    return kinds[annotation.__name__]


def _limits(field: FieldInfo) -> list[str]:
    """Return the range of a setting in words."""
    unit = "items" if get_origin(field.annotation) is tuple else "characters"
    limits = []
    for rule in field.metadata:
        match rule:
            case annotated_types.Ge(ge=bound):
                limits.append(f"at least {_number(bound)}")
            case annotated_types.Gt(gt=bound):
                limits.append(f"more than {_number(bound)}")
            case annotated_types.Le(le=bound):
                limits.append(f"at most {_number(bound)}")
            case annotated_types.Lt(lt=bound):
                limits.append(f"less than {_number(bound)}")
            case annotated_types.MinLen(min_length=length):
                limits.append("not empty" if length == 1 else f"at least {length} {unit}")
            case annotated_types.MaxLen(max_length=length):
                limits.append(f"at most {length} {unit}")
    return limits


def _number(value: Any) -> str:
    return f"{value:,}"
