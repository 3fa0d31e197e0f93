"""How model families write tool calls and reasoning: one row each. A new family is a new row.

The names are those of vLLM's `--tool-call-parser` and `--reasoning-parser`; vLLM has none for `json`. The sources are
the families' chat templates: they show the model its own earlier calls.
"""

import hashlib
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class JsonBody:
    """An object with `name` and `arguments` (or `parameters`), or a list of such objects (json_calls.py)."""


class Slot(Enum):
    """What stands between the fixed texts of a header."""

    NAME = "the name of a tool"
    ID = "letters and digits that tell calls apart"


@dataclass(frozen=True, slots=True)
class NamedBody:
    """A header with the tool's name, then the object of the arguments (named_call.py).

    Attributes:
        headers: What may stand in front of the object.
        may_be_list: Whether a list of objects as in `JsonBody` may stand there instead of the header.
        call_id: Makes the call's id of `name` and `id`, the texts of the slots. Empty: the server makes one.
    """

    headers: tuple[tuple[str | Slot, ...], ...]
    may_be_list: bool = False
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class XmlBody:
    """The name and each argument between tags (xml_call.py).

    Attributes:
        function: In front of the name; empty: nothing.
        name_end: Behind the name; empty: whitespace, or the next tag.
        key, key_end: Around the name of an argument.
        value: In front of its value; empty: nothing.
        value_end: Behind it.
        function_end: Behind the arguments.
        breaks_lines: Whether a line break next to the tags of a value belongs to them.
    """

    function: str = "<function="
    name_end: str = ">"
    key: str = "<parameter="
    key_end: str = ">"
    value: str = ""
    value_end: str = "</parameter>"
    function_end: str = "</function>"
    breaks_lines: bool = True


@dataclass(frozen=True, slots=True)
class PythonicBody:
    """A call as in Python, with named arguments, or a list of such calls (pythonic_calls.py)."""


@dataclass(frozen=True, slots=True)
class HarmonyBody:
    """A message to `functions.NAME`, whose text is the object of the arguments (harmony.py)."""


Body = JsonBody | NamedBody | XmlBody | PythonicBody | HarmonyBody


NAME, ID = Slot.NAME, Slot.ID

AUTO = "auto"  # as the chat template shows


def openai_call_id(output_id: str, index: int) -> str:
    """Return the id of a call of an output, in OpenAI's form; it follows from the arguments alone."""
    return f"call_{_digest(output_id, index).hex()[:24]}"


def mistral_call_id(output_id: str, index: int) -> str:
    """Return an id of nine letters and digits; Mistral's templates refuse all others."""
    characters = string.ascii_letters + string.digits
    return "".join(characters[byte % len(characters)] for byte in _digest(output_id, index)[:9])


def _digest(output_id: str, index: int) -> bytes:
    return hashlib.sha256(f"{output_id} {index}".encode()).digest()


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model family writes tool calls.

    Attributes:
        name: Its name in `--tool-call-parser`.
        body: How one call is written.
        begin: The markers in front of a call; none is the beginning of another one.
        ends: The markers behind a call, in their order; each may be missing. Further calls may come before the last.
        may_be_bare: Whether calls also come without a marker: at the beginning of the output, and behind another call
            after a `;` or `,`.
        template_marks: A chat template with all strings of one of these groups teaches this format.
        call_id: Makes the id of a call from the id of its output and its index there.
    """

    name: str
    body: Body
    begin: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    may_be_bare: bool = False
    template_marks: tuple[tuple[str, ...], ...] = ()
    call_id: Callable[[str, int], str] = field(default=openai_call_id)

    @property
    def openings(self) -> tuple[str, ...]:
        """How a call may begin anywhere. Models forget the marker, but a call between tags is found without it."""
        tag = self.body.function if isinstance(self.body, XmlBody) else ""
        return (*self.begin, tag) if tag else self.begin

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers around calls; some tokenizers have special tokens for them."""
        return (*self.begin, *self.ends)


_DEEPSEEK_BEGIN = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

# A template may fit several rows; the first one counts.
TOOL_CALL_FORMATS = (
    ToolCallFormat(
        "deepseek_v3",
        NamedBody((("function<｜tool▁sep｜>", NAME, "\n```json\n"),)),
        _DEEPSEEK_BEGIN,
        ("```", *_DEEPSEEK_ENDS),
        template_marks=(("<｜tool▁call▁begin｜>", "```json"),),
    ),
    ToolCallFormat(
        "deepseek_v31",
        NamedBody(((NAME, "<｜tool▁sep｜>"),)),
        _DEEPSEEK_BEGIN,
        _DEEPSEEK_ENDS,
        template_marks=(("<｜tool▁call▁begin｜>",),),
    ),
    ToolCallFormat(
        "kimi_k2",
        NamedBody((("functions.", NAME, ":", ID, "<|tool_call_argument_begin|>"),), call_id="functions.{name}:{id}"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_begin|>"),
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        template_marks=(("<|tool_call_argument_begin|>",),),
    ),
    ToolCallFormat(
        "glm45",
        XmlBody("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", breaks_lines=False),
        ("<tool_call>",),
        template_marks=(("<tool_call>", "<arg_key>", "<arg_value>"),),
    ),
    ToolCallFormat(
        "minimax_m2",
        XmlBody('<invoke name="', '">', '<parameter name="', '">', function_end="</invoke>"),
        ("<minimax:tool_call>",),
        ("</minimax:tool_call>",),
        template_marks=(("<minimax:tool_call>", '<invoke name="', '<parameter name="'),),
    ),
    ToolCallFormat(
        "seed_oss",
        XmlBody(),
        ("<seed:tool_call>",),
        ("</seed:tool_call>",),
        template_marks=(("<seed:tool_call>", "<function=", "<parameter="),),
    ),
    ToolCallFormat(
        "qwen3_coder",
        XmlBody(),
        ("<tool_call>",),
        ("</tool_call>",),
        template_marks=(("<tool_call>", "<function=", "<parameter="),),
    ),
    ToolCallFormat(
        "mistral",
        NamedBody(((NAME,), (NAME, "[ARGS]"), (NAME, "[CALL_ID]", ID, "[ARGS]")), may_be_list=True),
        ("[TOOL_CALLS]",),
        template_marks=(("[TOOL_CALLS]",),),
        call_id=mistral_call_id,
    ),
    ToolCallFormat("granite", JsonBody(), ("<|tool_call|>",), template_marks=(("<|tool_call|>",),)),
    ToolCallFormat("phi4_mini_json", JsonBody(), ("functools",), template_marks=(("functools[",),)),
    ToolCallFormat(
        "hunyuan_a13b", JsonBody(), ("<tool_calls>",), ("</tool_calls>",), template_marks=(("<tool_calls>",),)
    ),
    ToolCallFormat(
        "hermes",
        JsonBody(),
        ("<tool_call>",),
        ("</tool_call>",),
        template_marks=(("<tool_call>", '"arguments'), ("<tool_call>", "'arguments':")),
    ),
    ToolCallFormat(
        "llama3_json",
        JsonBody(),
        ("<|python_tag|>", "<|python_start|>"),
        ("<|python_end|>",),
        may_be_bare=True,
        template_marks=(("dictionary of argument name and its value",),),
    ),
    ToolCallFormat(
        "pythonic",
        PythonicBody(),
        ("<|python_start|>",),
        ("<|python_end|>",),
        may_be_bare=True,
        template_marks=(("[func_name1(",),),
    ),
    ToolCallFormat(
        "olmo3",
        PythonicBody(),
        ("<function_calls>",),
        ("</function_calls>",),
        template_marks=(("<function_calls>", "<functions>"),),
    ),
    ToolCallFormat("json", JsonBody(), may_be_bare=True),
)

# The special tokens of OpenAI's harmony; the last three end a message.
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

# All of an output is in messages, and harmony.py reads both reasoning and calls; parser.py reads calls of the others.
HARMONY = ToolCallFormat(
    "openai", HarmonyBody(), ("<|channel|>",), ("<|call|>",), template_marks=(("<|channel|>", "<|call|>"),)
)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model family marks its reasoning, which comes first in an output.

    Attributes:
        name: Its name in `--reasoning-parser`.
        begin: The marker in front; many chat templates put it into the prompt.
        end: The marker behind.
        template_mark: A chat template with this uses the format; empty: with `end`.
        efforts: The values of `reasoning_effort` that the model knows; empty: the template decides.
    """

    name: str
    begin: str
    end: str
    template_mark: str = ""
    efforts: tuple[str, ...] = ()


HARMONY_REASONING = ReasoningFormat(
    "openai_gptoss",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    template_mark="<|channel|>analysis<|message|>",
    efforts=("low", "medium", "high"),
)

# A template may fit several rows; the first one counts.
REASONING_FORMATS = (
    ReasoningFormat("deepseek_r1", "<think>", "</think>"),
    ReasoningFormat("qwen3", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    HARMONY_REASONING,
)


def tool_call_format(name: str, template: str) -> ToolCallFormat | None:
    """Return the format with this name; auto: the one that the chat template teaches, None: no known one."""
    rows = (*TOOL_CALL_FORMATS, HARMONY)
    if name == AUTO:
        fitting = (row for row in rows if any(_has_all(template, marks) for marks in row.template_marks))
        return next(fitting, None)
    return next((row for row in rows if row.name == name), None)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the format with this name; auto: the one that the chat template uses, None: no known one."""
    if name == AUTO:
        return next((row for row in REASONING_FORMATS if (row.template_mark or row.end) in template), None)
    return next((row for row in REASONING_FORMATS if row.name == name), None)


def _has_all(text: str, marks: tuple[str, ...]) -> bool:
    return all(mark in text for mark in marks)
