"""The Markdown of the repository: its pages, their headings and links, and the commands that they type."""

import functools
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.support.sessions import console_sessions

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a page.

    Attributes:
        target: As it is written; empty: the page itself.
        anchor: Behind the `#`; empty: there is none.
    """

    target: str
    anchor: str


def pages() -> list[str]:
    """Return all pages, relative to the repository."""
    docs = [path for path in (REPOSITORY / "docs").rglob("*.md") if "_build" not in path.parts]
    return sorted(str(path.relative_to(REPOSITORY)) for path in [*REPOSITORY.glob("*.md"), *docs])


@functools.cache
def tokens(page: str) -> list[Token]:
    """Return a page as its parser sees it."""
    return MarkdownIt().enable("table").parse((REPOSITORY / page).read_text(encoding="utf-8"))


@functools.cache
def anchors(page: str) -> set[str]:
    """Return the anchors of a page: those that forges make of its headings, and those that it sets itself."""
    found: dict[str, int] = {}
    parsed = tokens(page)
    for opening, inline in itertools.pairwise(parsed):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
    repeated = {f"{slug}-{number}" for slug, last in found.items() for number in range(1, last + 1)}
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    own = [*re.findall(r'<a (?:id|name)="([^"]+)"', text), *re.findall(r"^\((\S+)\)=$", text, re.MULTILINE)]
    return {*found, *repeated, *own}


def links(page: str) -> Iterator[Link]:
    """Yield the links and images of a page that lead into the repository."""
    for token in tokens(page):
        for child in token.children or ():
            url = child.attrs.get("href") or child.attrs.get("src")
            if isinstance(url, str) and not re.match(r"[a-z]+:", url):
                target, _, anchor = url.partition("#")
                yield Link(target, anchor)


def commands(page: str) -> list[str]:
    """Return what a page types in its `console` and `bash` blocks; comments are left out."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found = [typed.command for session in console_sessions(text) for typed in session]
    for token in tokens(page):
        if token.type == "fence" and token.info.split()[:1] == ["bash"]:
            found += _bash_commands(token.content)
    return [re.sub(r"\s+#\s.*$", "", command) for command in found]


def _bash_commands(script: str) -> Iterator[str]:
    """Yield the commands of a script: lines, with those behind a backslash or a pipe, and whole functions."""
    lines: list[str] = []
    for line in script.splitlines():
        if not lines and (not line.strip() or line.startswith("#")):
            continue
        lines.append(line)
        is_open = line.rstrip().endswith(("\\", "|"))
        is_function = lines[0].split("#")[0].rstrip().endswith("{")
        if not is_open and (not is_function or line == "}"):
            yield "\n".join(lines)
            lines = []
    assert not lines, f"the last command is not complete: {lines}"


def snippets(page: str) -> Iterator[str]:
    """Yield what a page has as code in a sentence or in an indented block, a line at a time."""
    for token in tokens(page):
        if token.type == "code_block":
            yield from token.content.splitlines()
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content


def simple_commands(command: str) -> Iterator[list[str]]:
    """Yield the words of each program that a command runs, without what it sets for it."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("|&;()"):
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words
            words = []
        else:
            words.append(word)
