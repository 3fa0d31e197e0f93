"""How model families write tool calls and reasoning: one row each. A new family is a new row.

The names are those of vLLM's `--tool-call-parser` and `--reasoning-parser`; vLLM has none for `json`. The sources are
the chat templates of the families: they show the model its own earlier calls.
"""

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

AUTO = "auto"  # as the chat template shows


def openai_call_id() -> str:
    """Return an id as OpenAI writes them."""
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Return an id of nine letters and digits; Mistral's templates refuse all others."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model family writes tool calls.

    Attributes:
        name: What `--tool-call-parser` calls it.
        body: json: an object with `name` and `arguments` (or `parameters`), or a list of such objects.
            named: the name, then `[ARGS]` or nothing, then the object of the arguments; or a list as above.
            xml: `<function=NAME>` with a `<parameter=KEY>` for each argument.
        begin: The markers in front of a call; none is the beginning of another one.
        end: The marker behind a call, which may be missing; empty: there is none.
        may_be_bare: Whether calls also come without a marker: at the beginning of the output, and behind another call
            after a `;` or `,`.
        template_marks: A chat template with all strings of one of these groups teaches this format.
        new_call_id: Makes the id of a call.
    """

    name: str
    body: Literal["json", "named", "xml"]
    begin: tuple[str, ...] = ()
    end: str = ""
    may_be_bare: bool = False
    template_marks: tuple[tuple[str, ...], ...] = ()
    new_call_id: Callable[[], str] = field(default=openai_call_id)

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers around calls; some tokenizers have special tokens for them."""
        return (*self.begin, self.end) if self.end else self.begin


# A template may fit several rows; the first one counts.
TOOL_CALL_FORMATS = (
    ToolCallFormat(
        "qwen3_coder",
        "xml",
        ("<tool_call>",),
        "</tool_call>",
        template_marks=(("<tool_call>", "<function=", "<parameter="),),
    ),
    ToolCallFormat(
        "mistral", "named", ("[TOOL_CALLS]",), template_marks=(("[TOOL_CALLS]",),), new_call_id=mistral_call_id
    ),
    ToolCallFormat("hermes", "json", ("<tool_call>",), "</tool_call>", template_marks=(("<tool_call>",),)),
    ToolCallFormat(
        "llama3_json",
        "json",
        ("<|python_tag|>",),
        may_be_bare=True,
        template_marks=(("<|python_tag|>",), ("dictionary of argument name and its value",)),
    ),
    ToolCallFormat("json", "json", may_be_bare=True),
)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model family marks its reasoning, which comes first in an output.

    Attributes:
        name: What `--reasoning-parser` calls it.
        begin: The marker in front; many chat templates put it into the prompt.
        end: The marker behind.
    """

    name: str
    begin: str
    end: str


# A template with the marker `end` uses the format; the first row counts.
REASONING_FORMATS = (
    ReasoningFormat("deepseek_r1", "<think>", "</think>"),
    ReasoningFormat("qwen3", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
)


def tool_call_format(name: str, template: str) -> ToolCallFormat | None:
    """Return the format with this name; auto: the one that the chat template teaches, None: none that is known."""
    if name == AUTO:
        fitting = (row for row in TOOL_CALL_FORMATS if any(_has_all(template, marks) for marks in row.template_marks))
        return next(fitting, None)
    return next((row for row in TOOL_CALL_FORMATS if row.name == name), None)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the format with this name; auto: the one that the chat template uses, None: none that is known."""
    if name == AUTO:
        return next((row for row in REASONING_FORMATS if row.end in template), None)
    return next((row for row in REASONING_FORMATS if row.name == name), None)


def _has_all(text: str, marks: tuple[str, ...]) -> bool:
    return all(mark in text for mark in marks)
