"""The sandbox of chat templates: the functions and filters that they find, and limits on what they may cost.

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
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

MAX_TEXT_CHARS = 16 * 1024 * 1024
MAX_INT_BITS = 4096
MAX_RENDER_CPU_S = 2.0

# A width in a `%` format that is long enough to hurt, or one taken from the arguments.
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")

# No template can set a name with a space in it.
_DEADLINE = "render deadline"

# What a template can make Python raise; anything else is a mistake of ours.
RENDER_ERRORS = (
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


class _LimitError(jinja2.TemplateError):
    """The template went past a limit of this module."""


class SandboxedTemplate:
    """A compiled template. Rendering changes nothing, so threads may share one.

    Args:
        source: The Jinja source.

    Raises: jinja2.TemplateError: the source is not a template.
    """

    def __init__(self, source: str) -> None:
        environment = _ChatEnvironment()
        try:
            tree = _guarded(environment.parse(source))
            code = environment.compile(tree)
        except (MemoryError, RecursionError, SyntaxError) as error:  # Python's own limits on nesting
            raise jinja2.TemplateError(f"it cannot be compiled: {error}") from error
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: Mapping[str, object]) -> str:
        """Return the text. Raises one of RENDER_ERRORS: the template fails, or passes a limit."""
        deadline = {_DEADLINE: time.thread_time() + MAX_RENDER_CPU_S}
        return "".join(_limited(self._template.generate({**variables, **deadline})))


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
