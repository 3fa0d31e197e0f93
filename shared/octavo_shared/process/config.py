"""One configuration scheme for all services: flags, environment, TOML file, defaults, in this order.

A service derives a class from `ServiceConfig` (`service_config.py`), names itself in `service` and declares fields:

    class SchedulerConfig(ServiceConfig):
        service: ClassVar[str] = "scheduler"
        program: ClassVar[str] = "python -m scheduler_svc"
        max_num_waiting: int = Field(1024, ge=1, description="Requests that may wait; ...")

and its `__main__` calls `load_config_or_exit(SchedulerConfig, sys.argv[1:], os.environ)`. The field
above is then the flag `--max-num-waiting`, the variable `OCTAVO_SCHEDULER_MAX_NUM_WAITING` and the
key `max_num_waiting` in the table `[scheduler]` of the file that `--config` or OCTAVO_CONFIG names.
Its description (what it does, unit, what happens without it) is the help text. Rules over several fields are a
`model_validator(mode="after")` that raises ValueError with one sentence.

An unknown key is a mistake in any of the three. All mistakes are reported together, one
line each, with the place where the value came from. Field types: str, int, float, bool,
Literal, Path, each also `| None`, and tuples of them (comma-separated in flags and environment; such a flag may also be
given several times).
"""

import argparse
import difflib
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

import octavo
from octavo.values.wording import did_you_mean
from octavo_shared.process.service_config import ADDRESS_PATTERN, ServiceConfig

TABLES = ("scheduler", "front", "executor", "fake")
CONFIG_VARIABLE = "OCTAVO_CONFIG"
# Variables of the commands; some have the name of a setting.
_VARIABLES_OF_COMMANDS = frozenset({"tls_ca", "tls_cert", "tls_key", "token_file"})

# Kubernetes sets these for a Service that is named like one of ours; they are no settings.
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_.+)?)")


ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


class ConfigError(Exception):
    """The configuration is wrong; `mistakes` has one sentence for each mistake."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("; ".join(mistakes))


def load_config_or_exit(config_class: type[ConfigT], argv: Sequence[str], environ: Mapping[str, str]) -> ConfigT:
    """Return the configuration, or print the mistakes to stderr, one a line, and exit with code 2."""
    try:
        return load_config(config_class, argv, environ)
    except ConfigError as error:
        for mistake in error.mistakes:
            print(f"octavo {config_class.service}: {mistake}", file=sys.stderr)
        sys.exit(2)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, and the name of its place for people: a flag, a variable, a key."""

    value: object
    origin: str


def load_config(
    config_class: type[ConfigT],
    argv: Sequence[str],
    environ: Mapping[str, str],
    given: Mapping[str, Setting] = MappingProxyType({}),
) -> ConfigT:
    """Read the three sources and return the configuration; `given` settings, by name, win over all of them.

    `--help` prints the fields, `--version` the version of Octavo; both exit with code 0.

    Raises: ConfigError: a source is unreadable, a key is unknown, or a value breaks its rule.
    """
    mistakes: list[str] = []
    flags, config_path = _read_flags(config_class, argv, mistakes)
    variables = _read_environment(config_class, environ, mistakes)
    file_keys = _read_file(config_class, config_path or environ.get(CONFIG_VARIABLE), mistakes)
    splitted = {
        name: Setting(_split(config_class, name, setting.value), setting.origin) for name, setting in given.items()
    }
    settings = {**file_keys, **variables, **flags, **splitted}
    try:
        config = config_class.model_validate({name: setting.value for name, setting in settings.items()})
    except ValidationError as error:
        mistakes += [_sentence(config_class, settings, details) for details in _findings(error)]
    if mistakes:
        raise ConfigError(mistakes)
    return config


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def _read_flags(
    config_class: type[ServiceConfig], argv: Sequence[str], mistakes: list[str]
) -> tuple[dict[str, Setting], str | None]:
    parser = _parser(config_class)
    known, unknown = parser.parse_known_args(list(argv))
    values = vars(known)
    config_path = values.pop("config", None)
    all_flags = [flag for action in parser._actions for flag in action.option_strings]
    wrong_flags = [argument.split("=")[0] for argument in unknown if argument.startswith("-")]
    mistakes += [
        f"{flag} is not a flag{removed_flag_hint(config_class, flag) or _hint(flag, all_flags, prefix='--')}"
        for flag in wrong_flags
    ]
    if not wrong_flags:  # what follows a wrong flag is probably its value
        mistakes += [f"unexpected argument {argument!r}" for argument in unknown]
    return {
        name: Setting(_split(config_class, name, ",".join(value) if isinstance(value, list) else value), _flag(name))
        for name, value in values.items()
    }, config_path


def _parser(config_class: type[ServiceConfig]) -> _FlagParser:
    parser = _FlagParser(
        prog=config_class.program,
        description=(config_class.__doc__ or "").partition("\n")[0],
        epilog="Each flag is also an environment variable (in brackets) and a key in the table "
        f"[{config_class.service}] of a TOML file. Flags override variables, and variables override the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--version", action="version", version=f"octavo {octavo.__version__}", help="Show the version and exit."
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings. [{CONFIG_VARIABLE}]")
    for name, info in config_class.model_fields.items():
        text = f"{info.description}{_default(info)} [{_variable(config_class, name)}]".replace("%", "%%")
        if info.annotation is bool:
            parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=text)
        else:
            choices = [str(choice) for choice in get_args(info.annotation) if get_origin(info.annotation) is Literal]
            action = "append" if _is_tuple(config_class, name) else "store"
            parser.add_argument(_flag(name), metavar="|".join(choices) or "VALUE", help=text, action=action)
    return parser


def _default(info: FieldInfo) -> str:
    """Return the default for the help; empty if the description says what happens without a value."""
    if info.is_required():
        return " (required)"
    if info.default in (None, (), ""):
        return ""
    text = ",".join(map(str, info.default)) if isinstance(info.default, tuple) else str(info.default)
    return f" (default: {text.lower() if isinstance(info.default, bool) else text})"


def _read_environment(
    config_class: type[ServiceConfig], environ: Mapping[str, str], mistakes: list[str]
) -> dict[str, Setting]:
    names = {_variable(config_class, name): name for name in config_class.model_fields}
    prefix = _variable(config_class, "")
    settings = {}
    for variable in sorted(environ):
        if variable in names:
            name = names[variable]
            settings[name] = Setting(_split(config_class, name, environ[variable]), variable)
        elif variable.startswith(prefix) and not _SERVICE_LINK.fullmatch(variable.removeprefix(prefix)):
            gone = removed_hint(config_class, variable.removeprefix(prefix).lower())
            mistakes.append(f"{variable} is not a setting{gone or _hint(variable, names, prefix=prefix)}")
        elif meant := _setting_without_service(config_class, variable):
            mistakes.append(f"{variable} is not a setting; did you mean {_variable(config_class, meant)}?")
    return settings


def _setting_without_service(config_class: type[ServiceConfig], variable: str) -> str | None:
    """Return the setting that a variable such as OCTAVO_POLICY seems to mean; None: none of this service."""
    name = variable.removeprefix("OCTAVO_").lower()
    if name == variable.lower() or name in _VARIABLES_OF_COMMANDS or name.partition("_")[0] in TABLES:
        return None
    return next(iter(difflib.get_close_matches(name, config_class.model_fields, n=1, cutoff=0.9)), None)


def _read_file(config_class: type[ServiceConfig], path: str | None, mistakes: list[str]) -> dict[str, Setting]:
    if path is None:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"cannot read the configuration file {path}: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} is not a TOML file: {error}"]) from error
    unknown = [table for table in tables if table not in TABLES]
    mistakes += [f"[{table}] in {path} is not a known table{did_you_mean(table, TABLES)}" for table in unknown]
    own = tables.get(config_class.service, {})
    if not isinstance(own, dict):
        raise ConfigError([f"{config_class.service} in {path} is not a table"])
    settings = {}
    for key, value in own.items():
        if key in config_class.model_fields:
            settings[key] = Setting(value, f"{config_class.service}.{key} in {path}")
        else:
            hint = removed_hint(config_class, key) or _hint(key, config_class.model_fields)
            mistakes.append(f"{config_class.service}.{key} in {path} is not a setting{hint}")
    return settings


def _findings(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's findings, except a list that is too short only because an item of it is wrong."""
    wrong_items = {details["loc"][0] for details in error.errors() if len(details["loc"]) > 1}
    return [
        details
        for details in error.errors()
        if not (details["type"] == "too_short" and details["loc"] and details["loc"][0] in wrong_items)
    ]


def _sentence(config_class: type[ServiceConfig], settings: Mapping[str, Setting], details: ErrorDetails) -> str:
    """Turn one finding of pydantic into a sentence that names the place and the rule."""
    if not details["loc"]:  # a rule over several fields
        return details["msg"].removeprefix("Value error, ")
    name = str(details["loc"][0])
    if details["type"] == "missing":
        return f"{_flag(name)} is required (or {_variable(config_class, name)}, or {name} in the file)"
    origin = settings[name].origin if name in settings else _flag(name)
    return f"{origin} is {details['input']}; it must be {_limit(details)}"


def _limit(details: ErrorDetails) -> str:
    bounds: dict[str, Any] = details.get("ctx", {})
    match details["type"]:
        case "greater_than_equal":
            return f"at least {_number(bounds['ge'])}"
        case "greater_than":
            return f"more than {_number(bounds['gt'])}"
        case "less_than_equal":
            return f"at most {_number(bounds['le'])}"
        case "less_than":
            return f"less than {_number(bounds['lt'])}"
        case "int_parsing" | "int_type" | "int_from_float":
            return "a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "a number"
        case "bool_parsing" | "bool_type":
            return "true or false"
        case "string_type":
            return "a string"
        case "tuple_type":
            return "a list"
        case "path_type":
            return "a path"
        case "literal_error":
            return f"one of {bounds['expected']}"
        case "string_pattern_mismatch" if bounds["pattern"] == ADDRESS_PATTERN:
            return "host:port, with a port from 0 to 65535"
        case "string_pattern_mismatch":
            return "in the format that --help describes"
        case "too_short":
            return f"at least {bounds['min_length']}"
        case "string_too_short":
            return f"at least {bounds['min_length']} characters long"
        case "string_too_long":
            return f"at most {bounds['max_length']} characters long"
        case "value_error":
            return str(bounds["error"])
        case _:
            return f"right ({details['msg']})"


def _number(value: float) -> str:
    return str(int(value) if value == int(value) else value)


def _split(config_class: type[ServiceConfig], name: str, value: object) -> object:
    """Split the text of a tuple field at its commas."""
    if isinstance(value, str) and _is_tuple(config_class, name):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _is_tuple(config_class: type[ServiceConfig], name: str) -> bool:
    annotation = config_class.model_fields[name].annotation
    alternatives = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return any(get_origin(alternative) is tuple for alternative in alternatives)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(config_class: type[ServiceConfig], name: str) -> str:
    return f"OCTAVO_{config_class.service}_{name}".upper()


def removed_flag_hint(config_class: type[ServiceConfig], flag: str) -> str:
    """Return `removed_hint` of the setting of a flag."""
    return removed_hint(config_class, flag.removeprefix("--").removeprefix("no-").replace("-", "_"))


def removed_hint(config_class: type[ServiceConfig], name: str) -> str:
    """Return " any more: SENTENCE" for a setting of an earlier release; "" for another name."""
    sentence = config_class.removed.get(name)
    return f" any more: {sentence}" if sentence else ""


def _hint(name: str, candidates: Iterable[str], *, prefix: str = "") -> str:
    own_parts = [candidate.removeprefix(prefix) for candidate in candidates]  # a common prefix makes all similar
    return did_you_mean(name.removeprefix(prefix), own_parts, prefix=prefix) or "; --help lists all"
