"""A file of requests, as OpenAI's batches have them: one JSON object a line."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from octavo.errors import OctavoError
from octavo.values.wording import printable

_EMBEDDINGS = "/v1/embeddings"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", _EMBEDDINGS)

# Of a line that is nested too deeply for a parser.
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
TOO_DEEP = "the line is nested too deeply"


class BatchError(OctavoError):
    """The batch cannot begin or go on; one sentence for a person."""


class InvalidLineError(OctavoError):
    """One line asks for what cannot be asked."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one line asks.

    Attributes:
        path: Of the API.
        body: What is sent there.
    """

    path: str
    body: dict[str, Any]


class BatchFile:
    """The requests of a file; they stay there until they are asked for. A pipe is read once, into memory.

    Args:
        path: The file.

    Raises: BatchError: it cannot be read, or a line has no custom_id of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: dict[str, int] = {}  # by custom_id
        try:
            self._piped = None if path.is_file() or path.is_dir() else path.read_bytes()
            with self._open() as file:
                offset = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._add(number, offset, line)
                    offset += len(line)
        except OSError as error:
            raise BatchError(f"{path} cannot be read: {error.strerror}") from error
        if not self._offsets:
            raise BatchError(f"{path} has no requests")

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[str]:
        """Yield the custom_id of each request, in the order of the file."""
        return iter(self._offsets)

    def __contains__(self, custom_id: object) -> bool:
        return custom_id in self._offsets

    def read(self, custom_id: str, model: str | None) -> Request:
        """Return a request, with a seed of its own unless it has one.

        Args:
            custom_id: The id of the request.
            model: Replaces the model that the request names; None: nothing does.

        Raises: InvalidLineError: it cannot be sent; the message says why.
        """
        with self._open() as file:
            file.seek(self._offsets[custom_id])
            try:
                line = json.loads(file.readline())
            except RecursionError:
                raise InvalidLineError(TOO_DEEP) from None
        if line.get("method") != "POST":
            raise InvalidLineError(f"method must be POST, not {_shown(line.get('method'))}")
        if (path := line.get("url")) not in PATHS:
            raise InvalidLineError(f"url must be one of {', '.join(PATHS)}, not {_shown(path)}")
        if not isinstance(body := line.get("body"), dict):
            raise InvalidLineError("body must be a JSON object")
        if body.get("stream"):
            raise InvalidLineError("body.stream must be false or absent: a line has one whole answer")
        if model is not None:
            body["model"] = model
        if body.get("seed") is None and path != _EMBEDDINGS:
            body["seed"] = seed_of(custom_id)
        return Request(path, body)

    def _open(self) -> BinaryIO:
        return self.path.open("rb") if self._piped is None else BytesIO(self._piped)

    def _add(self, number: int, offset: int, line: bytes) -> None:
        where = f"{self.path}:{number}"
        parsed = json_object(line)
        if parsed is None:
            raise BatchError(f"{where} is not a JSON object")
        custom_id = parsed.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise BatchError(f"{where} needs a custom_id, a string that names the request")
        if custom_id in self._offsets:
            raise BatchError(f"{where} has the custom_id {_shown(custom_id)} of a line before it")
        self._offsets[custom_id] = offset


def seed_of(custom_id: str) -> int:
    """Return the seed of a request that has none: the first four bytes of the SHA-256 of its custom_id."""
    return int.from_bytes(hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).digest()[:4])


def json_object(line: bytes) -> Mapping[str, Any] | None:
    """Return the JSON object in a line; None: it has none."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    except RecursionError:  # only this request fails, if its id can be found
        found = _CUSTOM_ID.search(line)
        return {"custom_id": json.loads(found[1])} if found else None
    return parsed if isinstance(parsed, dict) else None


def _shown(value: object) -> str:
    return printable(json.dumps(value, ensure_ascii=False))[:80]
