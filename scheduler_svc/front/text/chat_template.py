"""A model's chat template: Jinja, rendered as transformers renders it, inside limits.

The template comes with the model, so it is somebody else's program. Jinja's sandbox keeps it away
from Python's internals, and from ranges of more than 100,000 numbers. The limits here add:

- text: at most `MAX_TEXT_CHARS` in the result and in anything built by an operator, a call or a
  `{% set %}` block, so that doubling a string forty times ends with an error, not with the memory;
- time: at most `MAX_RENDER_CPU_S`, looked at in each turn of a loop, each call and each operator.

What remains: one single filter or method that is itself expensive (`replace`, `join`, `indent` with
huge arguments) runs to its end before the next look. A memory limit on the process is the guard
against that. Source of the conventions: `apply_chat_template` of transformers 5.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from scheduler_svc.front.text.conversation import Conversation
from shared.errors import InvalidFieldError

MAX_TEXT_CHARS = 16 * 1024 * 1024
MAX_INT_BITS = 4096
MAX_RENDER_CPU_S = 2.0

# A width in a `%` format that is long enough to hurt, or one taken from the arguments.
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")

# The roles that every template knows.
_TURNS = ("user", "assistant")

# No template can set a name with a space in it.
_DEADLINE = "render deadline"

# A tool that no template knows by itself.
_PROBE_NAME = "octavo_probe"
_PROBE = {
    "type": "function",
    "function": {"name": _PROBE_NAME, "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}


class _LimitError(jinja2.TemplateError):
    """The template went past a limit of this module."""


class ChatTemplate:
    """A compiled chat template. Rendering changes nothing, so threads may share one.

    Args:
        source: The Jinja source.
        special_tokens: The variables `bos_token`, `eos_token` and so on, as far as the model has them.

    Attributes:
        source: As above.
        knows_tools: Whether the tools of a request come into the prompt.

    Raises: jinja2.TemplateError: the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _ChatEnvironment()
        try:
            tree = _guarded(environment.parse(source))
            code = environment.compile(tree)
        except (MemoryError, RecursionError, SyntaxError) as error:  # Python's own limits on nesting
            raise jinja2.TemplateError(f"it cannot be compiled: {error}") from error
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.knows_tools = _shows_tools(self._template, self._special_tokens)

    def render(self, conversation: Conversation) -> str:
        """Return the prompt for the assistant's next turn.

        Raises: InvalidFieldError: the template refuses these messages, leaves one with a role of its own or the tools
            out of the prompt, fails, or passes a limit.
        """
        if conversation.tools and not self.knows_tools:
            shown = f"{len(conversation.tools)} tools long"
            rule = "unset: the chat template of this model knows no tools, so the model would not see them"
            raise InvalidFieldError("messages.tools_json", shown, rule)
        text = self._render(conversation, conversation.messages)
        self._refuse_ignored(conversation, text)
        return text

    def _render(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]]) -> str:
        variables: dict[str, object] = {
            **self._special_tokens,
            "documents": None,
            **conversation.template_kwargs,
            "messages": messages,
            "tools": conversation.tools or None,
            "add_generation_prompt": conversation.add_generation_prompt,
            _DEADLINE: time.thread_time() + MAX_RENDER_CPU_S,
        }
        try:
            return "".join(_limited(self._template.generate(variables)))
        except _RENDER_ERRORS as error:
            roles = ", ".join(turn["role"][:32] for turn in messages[:8]) + (", ..." if len(messages) > 8 else "")
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            limit = f"a conversation that the model's chat template accepts; it says: {reason}"
            raise InvalidFieldError("messages", f"a conversation of roles {roles}", limit) from error

    def _refuse_ignored(self, conversation: Conversation, text: str) -> None:
        """Refuse a message that is not in the prompt because the template knows neither its role nor its tool calls.

        What a template does with a message shows when it renders the conversation again, with other words in it. The
        turns of user and assistant may lose text: a template may drop reasoning from them.
        """
        messages = conversation.messages
        words = {place: f"octavo{place}words" for place, turn in enumerate(messages) if _may_be_left_out(turn, text)}
        calls = {place: f"octavo{place}calls" for place, turn in enumerate(messages) if turn.get("tool_calls")}
        if not words and not calls:
            return
        try:
            others = [_reworded(turn, words.get(place), calls.get(place)) for place, turn in enumerate(messages)]
            probe = self._render(conversation, others)
        except InvalidFieldError:  # it looks into the content, so it knows the role
            return
        for place, word in words.items():
            if word not in probe:
                shown = f"a conversation with the role {messages[place]['role'][:32]!r} in message {place}, from 0"
                limit = "of roles that the model's chat template puts into the prompt, such as user"
                raise InvalidFieldError("messages", shown, f"{limit}: it leaves this message out")
        for place, word in calls.items():
            if word not in probe:
                shown = f"a conversation with tool calls in message {place}, from 0"
                raise InvalidFieldError("messages", shown, "without them: the model's chat template leaves them out")


def _reworded(turn: Mapping[str, Any], content: str | None, name: str | None) -> dict[str, Any]:
    """Return a turn with another content and other names of the tools it calls; None: its own."""
    reworded = dict(turn) if content is None else {**turn, "content": content}
    if name is not None:
        reworded["tool_calls"] = [_renamed(call, name) for call in turn["tool_calls"]]
    return reworded


def _renamed(call: Any, name: str) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    return {**call, "function": {**call["function"], "name": name}}


def _may_be_left_out(turn: Mapping[str, Any], prompt: str) -> bool:
    """Return whether it is not yet sure that the template has put a turn into a prompt."""
    role, content = turn["role"], turn["content"].strip()
    return role not in _TURNS and not (role == "system" and content and content in prompt)


# What a template can make Python raise; anything else is a mistake of ours.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,  # jinja2 raises it for some misuses of its own filters
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class _GenerationBlock(ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that Python itself looks at."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may pass an attribute called self
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with transformers' settings, and limits on what operators and calls may cost."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters["limited items"] = _limited_items
        self.filters["limited value"] = _limited_value
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _TemplateNamespace
        self.globals["dict"] = _make_dict
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator whose result fits the limits."""
        _check_deadline(context)
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and left.bit_length() * max(right, 0) > MAX_INT_BITS:
            raise _LimitError("a number gets too large")
        if operator == "*" and numbers and left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise _LimitError("a number gets too large")
        if operator == "*" and not numbers and _repeated_size(left, right) > MAX_TEXT_CHARS:
            raise _LimitError(f"a value gets longer than {MAX_TEXT_CHARS} characters")
        if operator == "%" and isinstance(left, str) and _WIDE_FIELD.search(left):
            raise _LimitError("a field of a format is too wide")
        return _fitting(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, if its numbers are not absurd (`"".ljust(10 ** 9)`)."""
        _check_deadline(context)
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_TEXT_CHARS and not isinstance(function, Macro):
                raise _LimitError(f"a number above {MAX_TEXT_CHARS} in a call")
        return _fitting(super().call(context, function, *args, **kwargs))


def _guarded(tree: nodes.Template) -> nodes.Template:
    """Put the limits around loops, `~` and `{% set %}` blocks, which no hook of the sandbox sees."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered(loop.iter, "limited items", loop)
    for block in list(tree.find_all(nodes.AssignBlock)):
        block.filter = _filtered(block.filter, "limited value", block)
    for joined in list(tree.find_all(nodes.Concat)):
        # The node keeps its place in the tree; its old self becomes the only operand of a new one.
        operands = nodes.Concat(joined.nodes, lineno=joined.lineno, environment=joined.environment)
        joined.nodes = [_filtered(operands, "limited value", joined)]
    return tree


def _filtered(value: nodes.Node | None, name: str, near: nodes.Node) -> nodes.Filter:
    node = nodes.Filter(value, name, [], [], None, None, lineno=near.lineno)
    node.environment = near.environment
    return node


def _limited(pieces: Iterator[str]) -> Iterator[str]:
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_TEXT_CHARS:
            raise _LimitError(f"the rendered text gets longer than {MAX_TEXT_CHARS} characters")
        yield piece


def _shows_tools(template: jinja2.Template, special_tokens: Mapping[str, str]) -> bool:
    """Return whether a tool comes into the prompt; one that the template fails on does not."""
    variables: dict[str, object] = {
        **special_tokens,
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [_PROBE],
        "documents": None,
        "add_generation_prompt": True,
        _DEADLINE: time.thread_time() + MAX_RENDER_CPU_S,
    }
    try:
        return _PROBE_NAME in "".join(_limited(template.generate(variables)))
    except _RENDER_ERRORS:
        return False


@pass_context
def _limited_items(context: Context, items: Iterable[object]) -> Iterator[object]:
    for item in items:
        _check_deadline(context)
        yield item


@pass_context
def _limited_value(context: Context, value: object) -> object:
    _check_deadline(context)
    return _fitting(value)


def _check_deadline(context: Context) -> None:
    # The thread's CPU time: a busy or paused machine must not refuse a harmless template.
    if time.thread_time() > context.parent[_DEADLINE]:
        raise _LimitError(f"rendering takes longer than {MAX_RENDER_CPU_S:g} s")


def _fitting(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_TEXT_CHARS:
        raise _LimitError(f"a value gets longer than {MAX_TEXT_CHARS} characters")
    return value


def _repeated_size(left: object, right: object) -> int:
    if isinstance(left, int):
        left, right = right, left
    return len(left) * right if isinstance(left, str | list | tuple) and isinstance(right, int) else 0


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by name
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
