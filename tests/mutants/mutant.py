"""A mutant: one expression of one function replaced by another. `mutants.txt` has them all.

The expression is found by what it says: in Python as a syntax tree, in C with any whitespace. So a row goes stale when
its function gets another name or its expression changes, and not when lines move.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.fault import StaleError

TABLE = Path(__file__).with_name("mutants.txt")

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Mutant:
    """One row of the table.

    Attributes:
        name: The fault in words: what the code does wrong with it.
        place: Where it is: `package.module:Class.function`, or `folder/file.c:function`.
        old: An expression that the function has exactly once; in C any text of it.
        new: What stands in its place with the fault.
        suite: The tests that must fail, as pytest takes them. Seconds, not minutes.
    """

    name: str
    place: str
    old: str
    new: str
    suite: str

    @property
    def is_c(self) -> bool:
        """Whether the function is written in C."""
        return "/" in self.place

    @property
    def path(self) -> str:
        """The file, from the root of the repository."""
        module, _, _ = self.place.partition(":")
        if self.is_c:
            return module
        path = module.replace(".", "/") + ".py"
        return f"shared/{path}" if path.startswith("octavo_shared/") else path

    def plant(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises: StaleError: the function or the expression is not there exactly once, or `new` is no expression.
        """
        function = self.place.partition(":")[2]
        try:
            if self.is_c:
                spans, new = list(_find_in_c(text, function, self.old)), self.new
            else:
                ast.parse(self.new, mode="eval")
                spans, new = list(_find_in_python(text, function, self.old)), f"({self.new})"
        except SyntaxError as error:
            raise StaleError(f"{self.place}: {error}") from error
        if len(spans) != 1:
            raise StaleError(f"{self.place} has {self.old} {len(spans)} times; it must be there once")
        [(begin, end)] = spans
        return text[:begin] + new + text[end:]


def read_mutants() -> list[Mutant]:
    """Return all rows of the table. Raises: ValueError: a paragraph is no row."""
    paragraphs = TABLE.read_text(encoding="utf-8").strip().split("\n\n")
    return [_read_row(text) for text in paragraphs if not text.startswith("#")]


def _read_row(paragraph: str) -> Mutant:
    name, place, change, suite = map(str.strip, paragraph.splitlines())
    old, new = change.split("  =>  ")
    return Mutant(name, place, old, new, suite)


def _find_in_python(text: str, function: str, old: str) -> Iterator[tuple[int, int]]:
    """Yield where each expression like `old` begins and ends in a function."""
    lines = text.split("\n")
    wanted = ast.dump(ast.parse(old, mode="eval").body)

    def offset(line: int, column: int) -> int:  # `ast` counts bytes in a line
        before = sum(len(text) + 1 for text in lines[: line - 1])
        return before + len(lines[line - 1].encode()[:column].decode())

    definitions: list[ast.AST] = [ast.parse(text)]
    for name in function.split("."):
        inner = [node for definition in definitions for node in ast.iter_child_nodes(definition)]
        definitions = [node for node in inner if isinstance(node, _Definition) and node.name == name]
    for definition in definitions:
        for node in ast.walk(definition):
            if isinstance(node, ast.expr) and ast.dump(node) == wanted:
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                yield offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def _find_in_c(text: str, function: str, old: str) -> Iterator[tuple[int, int]]:
    """Yield where each text like `old` begins and ends in a function, whatever whitespace is between tokens."""
    tokens = re.findall(r"\w+|[^\w\s]", old)
    pattern = r"\s*".join(rf"\b{token}\b" if token.isidentifier() else re.escape(token) for token in tokens)
    for head in re.finditer(rf"^\w[^\n]*\b{function}\([^;{{}}]*\)\s*\{{", text, re.MULTILINE):
        body = text[: text.index("\n}", head.start())]
        for found in re.compile(pattern).finditer(body, head.start()):
            yield found.span()
