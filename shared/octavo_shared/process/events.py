"""Log lines with fields: `log.info(Event("attached", executor=address, epoch=3))`.

An `Event` is a message of the standard library's logging, so that modules which run where nothing else is
installed can log, and every handler can read its text:

    event=attached executor=10.0.0.7:50061 epoch=3

`configure_logging` chooses how a process writes them: as such text, or as one JSON object a line. Then every other line
that the process prints becomes such an object, too, as log collectors read nothing else. A line is for a change of
state, of the service or of one request; never for a token, and never with a prompt.
"""

import io
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO, TypeAlias

from octavo.values.wording import json_line

LogFormat: TypeAlias = Literal["text", "json"]
FieldValue: TypeAlias = str | int | float | bool | None


# The event that `octavo up` shows to people.
SLOW_STEP = "slow_step"


class Event:
    """An event's name and fields; `str` gives key=value pairs.

    Args:
        name: What happened, in snake_case, for searches.
        fields: What it happened to; None: left out.
    """

    __slots__ = ("fields", "name")

    def __init__(self, name: str, /, **fields: FieldValue) -> None:
        self.name = name
        self.fields = {key: value for key, value in fields.items() if value is not None}

    def __str__(self) -> str:
        return " ".join([f"event={self.name}", *(f"{key}={_shown(value)}" for key, value in self.fields.items())])


class TextFormatter(logging.Formatter):
    """Time, level, logger, then the message: key=value pairs in one line."""

    def __init__(self) -> None:
        super().__init__("time=%(asctime)s.%(msecs)03d level=%(levelname)s logger=%(name)s %(message)s")
        self.datefmt = "%Y-%m-%dT%H:%M:%S"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, RFC 3339), level, logger, event and its fields, or the message of others."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, FieldValue] = {
            "time": _rfc3339(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, Event):
            line |= {"event": record.msg.name, **record.msg.fields}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_line(line, default=str)


class JsonLines(io.TextIOBase):
    """A stream of lines for people: each becomes a JSON object with the line as its `message`.

    Args:
        stream: Where the objects go.
        level: The level of all lines.
    """

    def __init__(self, stream: TextIO, level: str) -> None:
        self._stream = stream
        self._level = level
        self._begun = ""  # the line that has no end yet

    def write(self, text: str) -> int:
        """Write the lines that end in `text`; of a line that begins anew, as in a progress bar, its last state."""
        *ended, begun = (self._begun + text).split("\n")
        self._begun = begun[max(0, begun.rstrip("\r").rfind("\r") + 1) :]
        lines = (line.rstrip("\r").rpartition("\r")[2] for line in ended)
        for line in filter(None, lines):
            time = _rfc3339(datetime.now(UTC))
            self._stream.write(json_line({"time": time, "level": self._level, "message": line}) + "\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the file descriptor of the stream."""
        return self._stream.fileno()


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Write the log lines of this process to stderr, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        sys.stdout, sys.stderr = JsonLines(sys.stdout, "info"), JsonLines(sys.stderr, "error")
    else:
        handler.setFormatter(TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _rfc3339(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds")


def _shown(value: FieldValue) -> str:
    """Return a value such that the pairs of a line can be told apart."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and (not value or not value.isprintable() or any(char in " ='\"" for char in value)):
        return repr(value)
    return str(value)
