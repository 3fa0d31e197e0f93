"""Files, rooms and methods that the pages name are there."""

import re
from fnmatch import fnmatch
from functools import cache

from tests.docs.pages import REPOSITORY, pages, snippets, tokens
from tests.support.each_row import each_row

TREES = ("benchmarks", "docs", "executor_svc", "images", "k8s", "octavo", "protos", "scheduler_svc", "shared", "tests")
TOLD = [page for page in pages() if page != "CHANGELOG.md"]  # what was is in the past
FILE = re.compile(r"(?P<path>[\w./*-]+\.(?:py|c|h|js|proto|toml))(?:::\w+)?")
METHOD = re.compile(r"(?P<owner>[A-Z]+[a-z]\w*)\.(?P<method>_?[a-z]\w*)(?:\(\))?")


@cache
def files() -> list[str]:
    found = [path for tree in TREES for path in (REPOSITORY / tree).rglob("*") if path.is_file()]
    return [str(path.relative_to(REPOSITORY)) for path in [*found, *REPOSITORY.glob("*")] if "_build" not in path.parts]


@cache
def code() -> str:
    """All of our Python and protos, the tests left out."""
    sources = [name for name in files() if name.endswith((".py", ".proto")) and not name.startswith("tests/")]
    return "\n".join((REPOSITORY / name).read_text(encoding="utf-8") for name in sources)


def is_there(path: str) -> bool:
    """Return whether a file has this path, or one that ends with it."""
    return any(fnmatch(name, path) or fnmatch(name, f"*/{path}") for name in files())


@each_row(*TOLD)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    paths = [match["path"] for snippet in snippets(page) if (match := FILE.fullmatch(snippet))]
    assert [path for path in paths if not is_there(path)] == []


@each_row("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/executor.md")
def test_every_method_that_a_page_names_is_there(page: str) -> None:
    named = [match for snippet in snippets(page) if (match := METHOD.fullmatch(snippet))]
    assert [
        match[0]
        for match in named
        if not re.search(rf"\b(class|message|service) {match['owner']}\b", code())
        or not re.search(rf"\b{match['method']}\b", code())
    ] == []


def test_the_tree_of_the_services_has_every_room() -> None:
    [tree] = [token.content for token in tokens("ARCHITECTURE.md") if token.content.startswith("scheduler_svc/ ")]
    rooms = [
        str(path.parent.relative_to(REPOSITORY))
        for service in ("scheduler_svc", "executor_svc")
        for path in (REPOSITORY / service).rglob("__init__.py")
    ]
    told = [line.split()[0].rstrip("/") for line in tree.splitlines()]
    assert sorted(told) == sorted(rooms)
    assert len(told) <= 42
