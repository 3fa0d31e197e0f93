"""Each check bites: a mistake planted into what is rendered is found, and named."""

from typing import Any

from tests.k8s.checks import CHECKS
from tests.k8s.manifests import OVERLAYS, Manifests, components, overlay
from tests.k8s.planted_mistakes import MISTAKES, REMOVED
from tests.support.each_row import each_row


@each_row(*MISTAKES)
def test_a_planted_mistake_is_found(check: str, name: str, target: str, place: str, value: object, words: str) -> None:
    manifests = overlay(name) if name in OVERLAYS else components(*name.split("+"))

    _plant(manifests, target, place, value)

    findings = CHECKS[check](manifests)
    assert any(words in finding for finding in findings), findings


def test_every_check_has_a_planted_mistake() -> None:
    assert {check for check, *_ in MISTAKES} == set(CHECKS)


def _plant(manifests: Manifests, target: str, place: str, value: object) -> None:
    """Change one place; its parts are keys, indices of lists, and names of variables. Keys may hold dots."""
    kind, _, name = target.partition("/")
    node: Any = next(item for item in manifests.of_kind(kind) if item["metadata"]["name"].startswith(name))
    rest = place
    while True:
        key, rest = _first_key(node, rest)
        if not rest:
            break
        node = node[key]
    if isinstance(key, str) and isinstance(node, list):  # a variable that is not there yet
        node.append({"name": key, "value": value})
    elif value is REMOVED:
        del node[key]
    elif isinstance(key, int) and isinstance(value, str) and _name(node[key]):  # a variable
        node[key] = {"name": _name(node[key]), "value": value}
    else:
        node[key] = value


def _first_key(node: Any, place: str) -> tuple[str | int, str]:
    if isinstance(node, list):
        part, _, rest = place.partition(".")
        index = next((number for number, item in enumerate(node) if _name(item) == part), None)
        if index is not None:
            return index, rest
        return (int(part), rest) if part.isdecimal() else (part, rest)
    known = [key for key in node if place == key or place.startswith(f"{key}.")]
    if known:
        key = max(known, key=len)
        return key, place[len(key) + 1 :]
    return place, ""


def _name(item: Any) -> object:
    return item.get("name") if isinstance(item, dict) else None
