"""Spoils JSON: one value somewhere in it becomes another one."""

import copy
import json
import random
from typing import Any

HOSTILE: list[Any] = [
    *(-1, 0, 1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63, -(2**63), 2**64, 10**30, True, False, None),
    *(0.5, -0.0, 1e-300, 1e308, -1e308, float("nan"), float("inf")),
    *("", "x", "__class__", "\x00", "\ud800", "word " * 1000, [], [[]], {}, [0, 1], [0, 2**40], {"x": None}),
]


def hostile(chance: random.Random) -> Any:
    """Return a value that somebody may choose to do harm."""
    return copy.deepcopy(chance.choice(HOSTILE))


def change_a_value(value: list[Any] | dict[str, Any], chance: random.Random) -> None:
    """Change one value somewhere in lists and objects."""
    while value:
        place: Any = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        if not isinstance(value[place], list | dict) or chance.random() > 0.95:
            break
        value = value[place]
    else:
        if isinstance(value, dict):
            value["x"] = hostile(chance)
        else:
            value.append(hostile(chance))
        return
    action = chance.random()
    if action < 0.5:
        value[place] = hostile(chance)
    elif action < 0.8 and isinstance(value[place], int):
        value[place] += chance.choice([-2, -1, 1, 2, 100])
    elif action < 0.9:
        value[place] = copy.deepcopy(chance.choice([*value.values()] if isinstance(value, dict) else value))
    else:
        del value[place]


def changed_json(content: bytes, chance: random.Random) -> bytes:
    """Return JSON with some other values, or nested too deeply."""
    if chance.random() < 0.01:
        return b"[" * 10**5
    value = json.loads(content)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        change_a_value(value, chance)
    return json.dumps(value).encode()
