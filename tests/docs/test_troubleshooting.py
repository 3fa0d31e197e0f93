"""Every message of docs/troubleshooting.md is one that the code prints."""

import functools
import re
from collections.abc import Iterator
from types import CodeType

from tests.docs.pages import REPOSITORY
from tests.support.each_row import each_row

_PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# What stands between the parts that the code makes a sentence of.
_JOINTS = re.compile(r"\.\.\.|, and |[;:,()]|it must be|did you mean| is (?=set|a file|a pointer)")
_LIBRARIES = {
    "No such option ...",
    "--top-p is 1.5; it must be above 0 and at most 1",
    "Received message larger than max",
    "An attempt has been made to start a new process",
}


def messages() -> list[str]:
    """Return what the first cells of the tables quote, without commands, flags and names."""
    cells = [line.split("|")[1] for line in _PAGE.splitlines() if line.startswith("| ")]
    quoted = {message for cell in cells for message in re.findall(r"`([^`]+)`", cell) if " " in message}
    return sorted(message for message in quoted - _LIBRARIES if not message.startswith("octavo "))


@functools.cache
def strings() -> str:
    """Return all texts of the code, a line each; of one with values, each part between them."""
    found: list[str] = []
    for folder in ("octavo", "scheduler_svc", "executor_svc", "shared"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                found += _texts(compile(path.read_text(encoding="utf-8"), path, "exec", dont_inherit=True))
    return "\n".join(found)


def _texts(constant: object) -> Iterator[str]:
    match constant:
        case str():
            yield constant
        case CodeType(co_consts=constants) | (tuple() | frozenset() as constants):
            for inner in constants:
                yield from _texts(inner)


@each_row(*messages())
def test_a_message_of_the_page_is_printed_by_the_code(message: str) -> None:
    parts = [part.strip() for part in _JOINTS.split(message)]
    assert [part for part in parts if len(part) > 3 and part not in strings()] == []
