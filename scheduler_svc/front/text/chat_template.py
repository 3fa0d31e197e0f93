"""A model's chat template, rendered as transformers renders it: a conversation becomes the prompt of a turn.

What a template supports is found by rendering small conversations, once. What it leaves out of a conversation shows
when the conversation is rendered again with other words. template_sandbox.py has the functions and limits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text.conversation import Conversation
from scheduler_svc.front.text.template_habits import HELLO, PROBE, PROBE_NAME, TemplateHabits, changed_calls
from scheduler_svc.front.text.template_sandbox import RENDER_ERRORS, SandboxedTemplate

# Every template supports the first two roles, and leaves out the others or fails if it does not support them.
_TURNS = ("user", "assistant")
_COMMON_ROLES = frozenset({*_TURNS, "system", "tool"})

_DEVELOPER = "developer"
_NOBODYS = "octavorole"
_WORDS = "octavowords"

# No template has a longer role.
_MAX_ROLE_LENGTH = 64

# How many roles are remembered; a template names a handful.
_MAX_KEPT_ROLES = 64

_ANSWER = {"role": "assistant", "content": "Hi"}

# The names of the tools in templates; SmolLM3's has a name of its own.
_TOOL_VARIABLES = ("tools", "xml_tools")


class ChatTemplate:
    """A compiled chat template. Rendering changes nothing, so threads may share one.

    Args:
        special_tokens: The variables `bos_token`, `eos_token` and so on, as far as the model has them.

    Attributes:
        knows_tools: Whether the prompt includes the tools of a request.

    Raises: jinja2.TemplateError: the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = SandboxedTemplate(source)
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.variables = self._template.variables
        self._roles = _Roles(lambda messages: self._probe(messages, None))
        shown_by = [name for name in _TOOL_VARIABLES if PROBE_NAME in self._probe([HELLO], name)]
        self.knows_tools = bool(shown_by)
        self._tools_variable = shown_by[0] if shown_by else "tools"
        self._habits = TemplateHabits(
            lambda messages, tools: self._probe(messages, self._tools_variable, tools) if self.knows_tools else ""
        )

    def render(self, conversation: Conversation) -> str:
        """Return the prompt for the assistant's next turn.

        Raises: InvalidFieldError: the template refuses these messages, does not support a role, leaves out a message
            with a role of its own, names that tell speakers apart, or the tools; or it fails, or passes a limit.
        """
        if conversation.tools and not self.knows_tools:
            rule = "unset: this model's chat template does not support tools, so the model would not see them"
            raise InvalidFieldError("messages.tools_json", "set", rule)
        conversation = replace(conversation, messages=self._roles.in_known_roles(conversation.messages))
        text = self._render(conversation, conversation.messages)
        self._refuse_ignored(conversation, text)
        return text

    def _render(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]]) -> str:
        messages, tools = self._habits.messages(messages), self._habits.tools(conversation.tools)
        variables = {
            **self._special_tokens,
            "documents": None,
            **conversation.template_kwargs,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        if tools:
            variables[self._tools_variable] = tools
        try:
            return self._template.render(variables)
        except RENDER_ERRORS as error:
            roles = ", ".join(turn["role"][:32] for turn in messages[:8]) + (", ..." if len(messages) > 8 else "")
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            limit = f"a conversation that the model's chat template accepts; it says: {reason}"
            raise InvalidFieldError("messages", f"a conversation of roles {roles}", limit) from error

    def _probe(
        self, messages: Sequence[Mapping[str, Any]], tools_variable: str | None, tools: Sequence[Any] = (PROBE,)
    ) -> str:
        """Return the prompt of a small conversation, with a tool in a variable; empty: the template fails on it."""
        variables = {
            **self._special_tokens,
            "documents": None,
            "messages": messages,
            "tools": None,
            "add_generation_prompt": True,
        }
        if tools_variable is not None:
            variables[tools_variable] = list(tools)
        try:
            return self._template.render(variables)
        except RENDER_ERRORS:
            return ""

    def _refuse_ignored(self, conversation: Conversation, text: str) -> None:
        """Refuse a message that the template drops because it does not support its role, its tool calls or its name.

        What a template does with a message shows when it renders the conversation again with other words. Turns of
        user and assistant may lose text: a template may drop reasoning from them.
        """
        messages = conversation.messages
        words = {place: f"octavo{place}words" for place, turn in enumerate(messages) if _may_be_left_out(turn, text)}
        calls = {place: f"octavo{place}calls" for place, turn in enumerate(messages) if turn.get("tool_calls")}
        names = {place: f"octavo{place}name" for place in _telling_names(messages)}
        if not words and not calls and not names:
            return
        try:
            others = [
                _reworded(turn, words.get(place), calls.get(place), names.get(place))
                for place, turn in enumerate(messages)
            ]
            probe = self._render(conversation, others)
        except InvalidFieldError:  # the template reads the content, so it supports the role
            return
        for place, word in words.items():
            if word not in probe:
                limit = "a role that the model's chat template uses, such as user"
                shown = repr(messages[place]["role"][:32])
                raise InvalidFieldError(f"messages[{place}].role", shown, f"{limit}: it drops this message")
        for place, word in calls.items():
            if word not in probe:
                rule = (
                    "unset: the model's chat template does not support tool calls; write the call as text in `content`"
                )
                raise InvalidFieldError(f"messages[{place}].tool_calls_json", "set", rule)
        for place, word in names.items():
            if word not in probe:
                shown = f"a conversation with several names of the role {messages[place]['role'][:32]!r}"
                rule = "with one name for each role, or none: the model's chat template drops names"
                raise InvalidFieldError("messages", shown, f"{rule}; put names into the message texts")


class _Roles:
    """The roles that a template supports, found by rendering small conversations. Threads may share one.

    Many templates write any role into the header of a turn, though the model was trained with a few only. So a role
    counts as supported if the template treats it in another way than a made-up role.

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
        if all(turn["role"] in _COMMON_ROLES for turn in messages):
            return messages
        return [self._in_known_role(turn, place) for place, turn in enumerate(messages)]

    def _in_known_role(self, turn: Mapping[str, Any], place: int) -> Mapping[str, Any]:
        role = turn["role"]
        if role in _COMMON_ROLES or self._knows(role):
            return turn
        if role == _DEVELOPER:
            return {**turn, "role": "system"}
        limit = "a role that the model's chat template supports, such as user, assistant, system or tool"
        raise InvalidFieldError(f"messages[{place}].role", repr(role[:32]), limit)

    def _knows(self, role: str) -> bool:
        if not 1 <= len(role) <= _MAX_ROLE_LENGTH:
            return False
        if role not in self._kept:
            known = any(self._differs(role, *turns) for turns in ((0, HELLO), (1, HELLO), (2, HELLO, _ANSWER)))
            if len(self._kept) >= _MAX_KEPT_ROLES:
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


def _telling_names(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the places of messages whose name tells two speakers with one role apart.

    Tool results are told apart by their order, and if a role has a single name, it adds nothing.
    """
    names: dict[str, set[str]] = {}
    for turn in messages:
        if turn.get("name"):
            names.setdefault(turn["role"], set()).add(turn["name"])
    return [
        place
        for place, turn in enumerate(messages)
        if turn.get("name") and turn["role"] != "tool" and len(names[turn["role"]]) > 1
    ]


def _reworded(turn: Mapping[str, Any], content: str | None, function: str | None, name: str | None) -> dict[str, Any]:
    """Return a turn with another content, other names of the tools it calls, and another name; None: unchanged."""
    reworded = dict(turn) if content is None else {**turn, "content": content}
    if function is not None:
        reworded["tool_calls"] = changed_calls(turn["tool_calls"], lambda called: {**called, "name": function})
    if name is not None:
        reworded["name"] = name
    return reworded


def _may_be_left_out(turn: Mapping[str, Any], prompt: str) -> bool:
    """Return whether the template may have left a turn out of a prompt."""
    role, content = turn["role"], turn["content"].strip()
    return role not in _TURNS and not (role == "system" and content and content in prompt)
