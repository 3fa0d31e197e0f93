"""The answers of a batch: a file that a crash leaves so that the batch can go on."""

import fcntl
import os
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

from octavo.batch.batch_file import BatchError, json_object
from octavo.values.wording import json_line, printable


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request got.

    Attributes:
        response: `status_code`, `request_id` and `body`; None: there was no response.
        error: `code` and `message` of why there was none; None: there was one.
    """

    response: dict[str, Any] | None = None
    error: dict[str, str] | None = None

    @property
    def is_good(self) -> bool:
        """Whether the request succeeded."""
        return self.response is not None and self.response["status_code"] == HTTPStatus.OK

    @property
    def trouble(self) -> str:
        """What kind of failure it is."""
        return self.error["code"] if self.error else f"HTTP {(self.response or {}).get('status_code')}"


class AnswerFile:
    """Appends each answer as a whole line. Use it as a context manager.

    Attributes:
        done: The requests that have their answers; failed ones are asked again.

    Args:
        path: The file.
        custom_ids: The ids of the batch's requests.
        resume: Whether a file of an earlier run may be there.

    Raises: BatchError: the file is not empty, without `resume`; it belongs to another batch; it cannot be written.
    """

    def __init__(self, path: Path, custom_ids: Collection[str], *, resume: bool) -> None:
        self.done: set[str] = set()
        self._path = path
        try:
            self._fd = self._open(path)
        except OSError as error:
            raise self._cannot_write(error) from error
        try:
            if os.fstat(self._fd).st_size:
                if not resume:
                    raise BatchError(f"{path} has answers already; to go on with them, use --resume")
                self._take_up(custom_ids)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def add(self, custom_id: str, answer: Answer) -> None:
        """Write an answer. Raises BatchError: it cannot be written."""
        names = {"id": f"batch_req_{custom_id}", "custom_id": custom_id}
        line = {**names, "response": answer.response, "error": answer.error}
        try:
            _write(self._fd, f"{json_line(line)}\n".encode())
        except OSError as error:
            raise self._cannot_write(error) from error

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise BatchError(f"another octavo batch writes to {path}") from None
        return fd

    def _take_up(self, custom_ids: Collection[str]) -> None:
        """Learn what is done. A line that was torn by a crash is dropped, and so are failures."""
        new = self._path.with_name(f"{self._path.name}.new")
        fd = self._open(new)
        try:
            os.truncate(fd, 0)
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n") and self._is_good(number, line, custom_ids):
                        _write(fd, line)
            os.fsync(fd)
            new.replace(self._path)
        except BaseException as error:
            new.unlink()
            os.close(fd)
            if isinstance(error, OSError):
                raise self._cannot_write(error) from error
            raise
        os.close(self._fd)
        self._fd = fd

    def _is_good(self, number: int, line: bytes, custom_ids: Collection[str]) -> bool:
        where = f"{self._path}:{number}"
        parsed = json_object(line)
        if parsed is None or not isinstance(custom_id := parsed.get("custom_id"), str) or "response" not in parsed:
            raise BatchError(f"{where} is not an answer of a batch; give another file")
        if custom_id not in custom_ids:
            raise BatchError(
                f"{where} answers {printable(custom_id)!r}, which the batch does not ask; give another file"
            )
        response = parsed["response"]
        is_good = isinstance(response, dict) and response.get("status_code") == HTTPStatus.OK
        if is_good:
            self.done.add(custom_id)
        return is_good

    def _cannot_write(self, error: OSError) -> BatchError:
        return BatchError(f"{self._path} cannot be written: {error.strerror}")


def _write(fd: int, content: bytes) -> None:
    """Write all of the data; mostly the system takes it in one piece."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
