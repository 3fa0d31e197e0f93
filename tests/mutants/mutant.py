"""A mutant: one expression of one function replaced by another.

The expression is found by what it says: in Python as a syntax tree, in C with any whitespace. So a row goes stale when
its function gets another name or its expression changes, and not when lines move.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.mutants.fault import StaleError

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
        return module if self.is_c else module.replace(".", "/") + ".py"

    def plant(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises: StaleError: the function or the expression is not there exactly once, or `new` is no expression.
        """
        function = self.place.partition(":")[2]
        if self.is_c:
            begin, end = self._only(_find_in_c(text, function, self.old))
            return text[:begin] + self.new + text[end:]
        content = text.encode()  # the offsets of `ast` are bytes
        begin, end = self._only(_find_in_python(text, function, self.old))
        try:
            ast.parse(self.new, mode="eval")
        except SyntaxError as error:
            raise StaleError(f"{self.new} is no expression") from error
        return (content[:begin] + f"({self.new})".encode() + content[end:]).decode()

    def _only(self, spans: Iterator[tuple[int, int]]) -> tuple[int, int]:
        found = list(spans)
        if len(found) != 1:
            raise StaleError(f"{self.place} has {self.old} {len(found)} times; it must be there once")
        return found[0]


def _find_in_python(text: str, function: str, old: str) -> Iterator[tuple[int, int]]:
    """Yield where each expression like `old` begins and ends in a function, in bytes."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    wanted = ast.dump(ast.parse(old, mode="eval").body)
    definitions: list[ast.AST] = [ast.parse(text)]
    for name in function.split("."):
        inner = [node for definition in definitions for node in ast.iter_child_nodes(definition)]
        definitions = [node for node in inner if isinstance(node, _Definition) and node.name == name]
    for definition in definitions:
        for node in ast.walk(definition):
            if isinstance(node, ast.expr) and ast.dump(node) == wanted:
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                yield starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _find_in_c(text: str, function: str, old: str) -> Iterator[tuple[int, int]]:
    """Yield where each text like `old` begins and ends in a function, whatever whitespace is between tokens."""
    pattern = r"\s*".join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", old))
    for head in re.finditer(rf"^\w[^\n]*\b{function}\([^;{{}}]*\)\s*\{{", text, re.MULTILINE):
        end = text.index("\n}", head.start())
        for found in re.finditer(rf"(?<!\w){pattern}(?!\w)", text[head.start() : end]):
            yield head.start() + found.start(), head.start() + found.end()
