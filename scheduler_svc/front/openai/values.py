"""Values inside a request that are checked by hand, since their types depend on others; errors name their paths."""

from collections.abc import Mapping
from typing import Any, TypeVar

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text.json_text import shown_json

_T = TypeVar("_T")


def shown(value: object) -> str:
    """Return the beginning of a value, for a sentence about it."""
    return "absent" if value is None else shown_json(value)


def object_at(value: Any, path: str) -> Mapping[str, Any]:
    """Return a value that is an object. Raises InvalidFieldError: it is none."""
    if not isinstance(value, Mapping):
        raise InvalidFieldError(path, shown(value), "an object")
    return value


def object_or_empty(value: Any, path: str) -> Mapping[str, Any]:
    """Return a value that is an object, or an empty one for None. Raises InvalidFieldError: it is none."""
    return {} if value is None else object_at(value, path)


def member(owner: Mapping[str, Any], path: str, name: str, kind: type[_T], rule: str) -> _T:
    """Return the field `name` of the object at `path`. Raises InvalidFieldError: it is absent, or of another type."""
    value = owner.get(name)
    if not isinstance(value, kind):
        raise InvalidFieldError(f"{path}.{name}", shown(value), rule)
    return value


def optional(owner: Mapping[str, Any], path: str, name: str, kind: type[_T], rule: str) -> _T | None:
    """Return a field that may be absent. Raises InvalidFieldError: it is of another type."""
    return None if owner.get(name) is None else member(owner, path, name, kind, f"{rule}, or unset")


def text_of(owner: Mapping[str, Any], path: str, name: str) -> str:
    """Return a field that is a text. Raises InvalidFieldError: it is none."""
    return member(owner, path, name, str, "a text")
