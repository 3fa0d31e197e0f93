"""The sandbox of chat templates: the functions and filters that they may use, and limits on their cost.

A template comes with the model, so it is a foreign program. Jinja's sandbox keeps it away
from Python's internals, and from ranges of more than 100,000 numbers. The limits here add:

- text: at most `MAX_TEXT_CHARS` in the result and in anything built by an operator, a filter, a call or a
  `{% set %}` block; what would be longer is not begun (`template_sizes.py`). At most `MAX_BUILT_CHARS` in all of them;
- time: at most `MAX_RENDER_CPU_S`, looked at in each turn of a loop, each call, filter and operator.

What remains: one rendering may take some hundred MB for a moment, such as for a list of 16 million characters. Source
of the conventions: `apply_chat_template` of transformers 5.
"""

import functools
import json
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace, _PassArg, pass_context
from markupsafe import Markup

from scheduler_svc.front.text.template_sizes import (
    FILTERS,
    MAX_TEXT_CHARS,
    METHODS,
    percent_size,
    repeated_size,
    text_size,
)

MAX_BUILT_CHARS = 16 * MAX_TEXT_CHARS
MAX_INT_BITS = 4096
MAX_RENDER_CPU_S = 2.0
_MAX_DATE_FORMAT_CHARS = 1000

# Enough digits for a field width that does harm.
_WIDE_FIELD = re.compile(r"\d{5}")

# No template can set a name with a space in it.
_LIMITS = "render limits"

# What a template can make Python raise; anything else is a fault of ours.
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
    """The template passed a limit of this module."""


class SandboxedTemplate:
    """A compiled template. Rendering changes nothing, so threads may share one.

    Attributes:
        variables: The names that it reads and does not set itself.

    Raises: jinja2.TemplateError: the source is not a template.
    """

    def __init__(self, source: str) -> None:
        environment = _ChatEnvironment()
        try:
            tree = _guarded(environment.parse(source))
            code = environment.compile(tree)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (MemoryError, RecursionError, SyntaxError) as error:  # Python's own limits on nesting
            raise jinja2.TemplateError(f"it cannot be compiled: {error}") from error
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: Mapping[str, object]) -> str:
        """Return the text. Raises one of RENDER_ERRORS: the template fails, or passes a limit."""
        context = self._template.new_context({**variables, _LIMITS: _Limits()})
        try:
            return "".join(_limited(self._template.root_render_func(context)))
        except RENDER_ERRORS as error:
            # Free what the template has built now, before the next garbage collection.
            traceback.clear_frames(error.__traceback__)
            context.vars.clear()
            raise


class _Limits:
    """What one rendering has used so far."""

    def __init__(self) -> None:
        # The thread's CPU time: a busy or paused machine must not refuse a harmless template.
        self._deadline_s = time.thread_time() + MAX_RENDER_CPU_S
        self._num_built_chars = 0

    def check_deadline(self) -> None:
        """Raises: _LimitError: rendering takes too long."""
        if time.thread_time() > self._deadline_s:
            raise _LimitError(f"rendering took longer than {MAX_RENDER_CPU_S:g} s")

    def fitting(self, value: Any) -> Any:
        """Return what an operation has made. Raises: _LimitError: it, or all of them together, are too long."""
        if isinstance(value, str | bytes | list | tuple):
            _require(len(value))
            self._num_built_chars += len(value)
            if self._num_built_chars > MAX_BUILT_CHARS:
                raise _LimitError(f"it builds strings of more than {MAX_BUILT_CHARS} characters")
        return value


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
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, ext.loopcontrols],
            finalize=_limited_output,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _limited_filter(name, function) for name, function in self.filters.items()}
        self.filters["limited items"] = _limited_items
        self.filters["limited join"] = _limited_join
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _TemplateNamespace
        self.globals["dict"] = _make_dict
        del self.globals["lipsum"]

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join what a macro or a `{% set %}` block has written."""
        pieces = list(pieces)
        _require(sum(map(len, pieces)))
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator whose result fits the limits."""
        limits = context.parent[_LIMITS]
        limits.check_deadline()
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and left.bit_length() * max(right, 0) > MAX_INT_BITS:
            raise _LimitError("a number gets too large")
        if operator == "*" and numbers and left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise _LimitError("a number gets too large")
        if operator == "*" and not numbers:
            _require(repeated_size(left, right))
        if operator == "%" and isinstance(left, str | bytes):
            _require(percent_size(left, right))
        return limits.fitting(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the template, if its result fits the limits, and its numbers are not absurd."""
        limits = context.parent[_LIMITS]
        limits.check_deadline()
        if isinstance(function, Macro):
            return limits.fitting(super().call(context, function, *args, **kwargs))
        _refuse_absurd_numbers((*args, *kwargs.values()))
        owner = function.__self__ if isinstance(function, BuiltinMethodType | MethodType) else None
        if isinstance(owner, str | bytes) and function.__name__ in METHODS:
            args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            _require(METHODS[function.__name__](owner, *args, **kwargs))
        return limits.fitting(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` with the sandbox's rules and these limits; None: `value` is something else."""
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__

        def format_text(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,) = args
                args = ()
            if isinstance(text, Markup):
                return Markup(_LimitedEscapeFormatter(self, escape=text.escape).vformat(text, args, kwargs))
            return _LimitedFormatter(self).vformat(text, args, kwargs)

        return format_text


class _LimitedFormatter(SandboxedFormatter):
    """Formats one text."""

    _num_chars = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Apply `!r` or `!s`."""
        _require(text_size(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Return the text of a field."""
        if _WIDE_FIELD.search(format_spec):
            raise _LimitError("a field of a format is too wide")
        text = super().format_field(value, format_spec)
        self._num_chars += len(text)
        _require(self._num_chars)
        return text


class _LimitedEscapeFormatter(_LimitedFormatter, SandboxedEscapeFormatter):
    """The same for texts that are marked as safe."""


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that keeps the limits. As it takes the context, none runs when the template is compiled."""
    wanted = _PassArg.from_obj(function)

    @pass_context
    @functools.wraps(function)
    def limited(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        limits = context.parent[_LIMITS]
        limits.check_deadline()
        _refuse_absurd_numbers((*args, *kwargs.values()))
        if name in FILTERS:
            value = list(value) if isinstance(value, Iterator) else value
            _require(FILTERS[name](value, *args, **kwargs))
        first: dict[_PassArg | None, list[object]] = {
            _PassArg.context: [context],
            _PassArg.eval_context: [context.eval_ctx],
            _PassArg.environment: [context.environment],
            None: [],
        }
        return limits.fitting(function(*first[wanted], value, *args, **kwargs))

    return limited


def _guarded(tree: nodes.Template) -> nodes.Template:
    """Put the limits around loops and `~`, which no hook of the sandbox sees."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered(loop.iter, "limited items", loop)
    for joined in list(tree.find_all(nodes.Concat)):
        # The node keeps its place in the tree; all of its operands become one.
        operands = nodes.List(joined.nodes, lineno=joined.lineno, environment=joined.environment)
        joined.nodes = [_filtered(operands, "limited join", joined)]
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
            raise _LimitError(f"the rendered text is longer than {MAX_TEXT_CHARS} characters")
        yield piece


@pass_context
def _limited_items(context: Context, items: Iterable[object]) -> Iterator[object]:
    limits = context.parent[_LIMITS]
    for item in items:
        limits.check_deadline()
        yield item


@pass_context
def _limited_join(context: Context, operands: list[object]) -> str:
    limits = context.parent[_LIMITS]
    limits.check_deadline()
    _require(text_size(operands))
    text: str = limits.fitting("".join(map(str, operands)))
    return text


def _limited_output(value: object) -> object:
    if not isinstance(value, str):
        _require(text_size(value))
    return value


def _require(num_chars: float) -> None:
    if num_chars > MAX_TEXT_CHARS:
        raise _LimitError(f"a value is longer than {MAX_TEXT_CHARS} characters")


def _refuse_absurd_numbers(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_TEXT_CHARS:
            raise _LimitError(f"a number above {MAX_TEXT_CHARS} in a call or a filter")


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
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return encoder.encode(value) if indent is None else "".join(_limited(encoder.iterencode(value)))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by name
    if len(format) > _MAX_DATE_FORMAT_CHARS or _WIDE_FIELD.search(format):
        raise _LimitError("the format of a date is too long")
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
