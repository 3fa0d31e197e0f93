"""Which roles a chat template supports, found by rendering small conversations.

Many templates write any role into the header of a turn, though the model was trained with a few only. So a role counts
as supported if the template treats it in another way than a made-up role.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo_shared.errors import InvalidFieldError

# Every template supports the first two, and leaves out the others or fails if it does not support them.
_COMMON = frozenset({"user", "assistant", "system", "tool"})

_DEVELOPER = "developer"
_NOBODYS = "octavorole"
_WORDS = "octavowords"

# No template has a longer role.
_MAX_LENGTH = 64

# How many roles are remembered; a template names a handful.
_MAX_KEPT = 64

_HELLO = {"role": "user", "content": "Hello"}
_ANSWER = {"role": "assistant", "content": "Hi"}


class TemplateRoles:
    """The roles of one template. Threads may share one.

    Args:
        render: Returns the prompt of a small conversation; empty: the template fails on it.
    """

    def __init__(self, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
        self._render = render
        self._kept: dict[str, bool] = {}

    def in_known_roles(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return messages with supported roles: a developer becomes the system where the template has no developer.

        Raises: InvalidFieldError: the template does not support another role.
        """
        if all(turn["role"] in _COMMON for turn in messages):
            return messages
        return [self._in_known_role(turn, place) for place, turn in enumerate(messages)]

    def _in_known_role(self, turn: Mapping[str, Any], place: int) -> Mapping[str, Any]:
        role = turn["role"]
        if role in _COMMON or self._knows(role):
            return turn
        if role == _DEVELOPER:
            return {**turn, "role": "system"}
        limit = "a role that the model's chat template supports, such as user, assistant, system or tool"
        raise InvalidFieldError(f"messages[{place}].role", repr(role[:32]), limit)

    def _knows(self, role: str) -> bool:
        if not 1 <= len(role) <= _MAX_LENGTH:
            return False
        if role not in self._kept:
            known = any(self._differs(role, *turns) for turns in ((0, _HELLO), (1, _HELLO), (2, _HELLO, _ANSWER)))
            if len(self._kept) >= _MAX_KEPT:
                return known
            self._kept[role] = known
        return self._kept[role]

    def _differs(self, role: str, place: int, *others: Mapping[str, Any]) -> bool:
        """Return whether the prompt includes a turn of a role, and in another way than a turn of a made-up role."""

        def prompt(name: str) -> str:
            turn = {"role": name, "content": _WORDS}
            return self._render([*others[:place], turn, *others[place:]]).lower()

        own = prompt(role)
        return _WORDS in own and own != prompt(_NOBODYS).replace(_NOBODYS, role.lower())
