"""Files, rooms and methods that the pages name are there."""

import re
from collections import defaultdict
from fnmatch import fnmatch
from functools import cache

from tests.docs.pages import REPOSITORY, pages, snippets, tokens
from tests.support.each_row import each_row

TREES = ("benchmarks", "docs", "executor_svc", "images", "k8s", "octavo", "protos", "scheduler_svc", "shared", "tests")
TOLD = [page for page in pages() if page != "CHANGELOG.md"]  # what was is in the past
OF_SERVICES = ("docs/scheduler.md", "docs/executor.md")
TOLD_IN_CODE = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/fleet.md", "docs/fronts.md", *OF_SERVICES)
FILE = re.compile(r"(?P<path>[\w./*-]+\.(?:py|c|h|js|proto|toml))(?:::(?P<name>\w+))?")
METHOD = re.compile(r"(?P<owner>[A-Z]+[a-z]\w*)\.(?P<method>_?[a-z]\w*)(?:\(\))?")


@cache
def files() -> list[str]:
    found = [path for tree in TREES for path in (REPOSITORY / tree).rglob("*") if path.is_file()]
    return [str(path.relative_to(REPOSITORY)) for path in [*found, *REPOSITORY.glob("*")] if "_build" not in path.parts]


@cache
def names_in_code() -> tuple[set[str], set[str]]:
    """Return what has methods, and all words, of our Python and protos, the tests left out."""
    sources = [name for name in files() if name.endswith((".py", ".proto")) and not name.startswith("tests/")]
    code = "\n".join((REPOSITORY / name).read_text(encoding="utf-8") for name in sources)
    return set(re.findall(r"\b(?:class|message|service) (\w+)", code)), set(re.findall(r"\w+", code))


@cache
def files_by_end() -> dict[str, list[str]]:
    """Return the files by their paths, and by each end of these: a/b.py by `a/b.py` and by `b.py`."""
    found = defaultdict[str, list[str]](list)
    for name in files():
        parts = name.split("/")
        for place in range(len(parts)):
            found["/".join(parts[place:])].append(name)
    return dict(found)


def paths_of(path: str) -> list[str]:
    """Return the files that have this path, or one that ends with it."""
    if "*" not in path:
        return files_by_end().get(path, [])
    return [name for name in files() if fnmatch(name, path) or fnmatch(name, f"*/{path}")]


def is_there(path: str) -> bool:
    """Return whether there is such a file."""
    return bool(paths_of(path))


def defines(path: str, name: str) -> bool:
    """Return whether a file has a function or a class of a name."""
    source = (REPOSITORY / path).read_text(encoding="utf-8")
    return re.search(rf"^ *(?:async )?(?:def|class) {name}\b", source, re.MULTILINE) is not None


@each_row(*TOLD)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    paths = [match["path"] for snippet in snippets(page) if (match := FILE.fullmatch(snippet))]
    assert [path for path in paths if not is_there(path)] == []


@each_row(*TOLD)
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    named = [match for snippet in snippets(page) if (match := FILE.fullmatch(snippet)) and match["name"]]
    missing = [match[0] for match in named if not any(defines(path, match["name"]) for path in paths_of(match["path"]))]
    assert missing == []


def test_each_line_of_the_threat_model_names_a_test() -> None:
    page = (REPOSITORY / "docs/security.md").read_text(encoding="utf-8")
    model = page[page.index("### Untrusted parties") : page.index("What is not protected:")]
    lines = [line for line in model.splitlines() if line.startswith("| ") and not line.startswith("| who | w")]
    assert len(lines) > 30
    assert [line for line in lines if "::test_" not in line] == []


def test_each_promise_names_a_test_that_runs_without_a_card_or_a_cluster() -> None:
    page = (REPOSITORY / "docs/guarantees.md").read_text(encoding="utf-8")
    promises = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| promise |")]
    assert len(promises) > 15
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::\w+)?`", promise.rsplit(" | ", 1)[-1])
        assert named, promise
        for path in named:
            source = (REPOSITORY / path).read_text(encoding="utf-8")
            assert "mark.gpu" not in source, promise
            assert not path.startswith("tests/cluster"), promise


@each_row(*TOLD_IN_CODE)
def test_every_method_that_a_page_names_is_there(page: str) -> None:
    named = [match for snippet in snippets(page) if (match := METHOD.fullmatch(snippet))]
    owners, words = names_in_code()
    assert [match[0] for match in named if match["owner"] not in owners or match["method"] not in words] == []


def test_each_service_has_a_page_with_every_room() -> None:
    [tree] = [token.content for token in tokens("docs/scheduler.md") if token.content.startswith("scheduler_svc/ ")]
    assert sorted(line.split()[0].rstrip("/") for line in tree.splitlines()) == sorted(rooms("scheduler_svc"))
    told = set(snippets("docs/executor.md"))
    assert [
        room for room in rooms("executor_svc") if room != "executor_svc" and not {f"{room}/", told_room(room)} & told
    ] == []


def rooms(service: str) -> list[str]:
    """Return the packages of a service, as paths."""
    return [str(path.parent.relative_to(REPOSITORY)) for path in (REPOSITORY / service).rglob("__init__.py")]


def told_room(room: str) -> str:
    """Return a room of a service as the page of that service names it."""
    return f"{room.partition('/')[2]}/"
