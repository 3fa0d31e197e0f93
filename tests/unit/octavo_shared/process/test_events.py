"""Log lines: fields that a person reads and a program parses."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from octavo_shared.process.events import Event, FieldValue, JsonFormatter, JsonLines, TextFormatter
from tests.support.each_row import each_row


@pytest.fixture
def written() -> Iterator[tuple[logging.Logger, io.StringIO, logging.Handler]]:
    logger = logging.Logger("a.logger")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    yield logger, stream, handler
    logger.removeHandler(handler)


@each_row(
    ("10.0.0.7:50061", "10.0.0.7:50061"),
    ("two words", "'two words'"),
    ("", "''"),
    ("a=b", "'a=b'"),
    ("it's", '"it\'s"'),
    ("line\nbreak", "'line\\nbreak'"),
    ("\x1b[31mred", "'\\x1b[31mred'"),
    (3, "3"),
    (0.25, "0.25"),
    (1 / 3, "0.333333"),
    (True, "True"),
)
def test_values_are_shown_so_that_pairs_can_be_told_apart(value: FieldValue, shown: str) -> None:
    assert str(Event("x", key=value)) == f"event=x key={shown}"


def test_what_is_absent_is_left_out() -> None:
    assert str(Event("attached", executor=None, epoch=1)) == "event=attached epoch=1"


def test_a_text_line_is_one_line_of_pairs(written: tuple[logging.Logger, io.StringIO, logging.Handler]) -> None:
    logger, stream, handler = written
    handler.setFormatter(TextFormatter())
    logger.warning(Event("no_executor", cause="it\nhides"))
    [line] = stream.getvalue().splitlines()
    assert line.endswith(" level=WARNING logger=a.logger event=no_executor cause='it\\nhides'")


def test_a_json_line_has_the_fields_with_their_types(
    written: tuple[logging.Logger, io.StringIO, logging.Handler],
) -> None:
    logger, stream, handler = written
    handler.setFormatter(JsonFormatter())
    logger.info(Event("attached", executor="é\x7f\x9b\u2028", epoch=3, share=0.5))
    assert stream.getvalue().rstrip("\n").isprintable()
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "a.logger",
        "event": "attached",
        "executor": "é\x7f\x9b\u2028",
        "epoch": 3,
        "share": 0.5,
    }


def test_a_json_line_of_a_library_has_its_message(written: tuple[logging.Logger, io.StringIO, logging.Handler]) -> None:
    logger, stream, handler = written
    handler.setFormatter(JsonFormatter())
    logger.info("%d of %d", 1, 2)
    assert json.loads(stream.getvalue())["message"] == "1 of 2"


def test_a_traceback_stays_in_the_line(written: tuple[logging.Logger, io.StringIO, logging.Handler]) -> None:
    logger, stream, handler = written
    handler.setFormatter(JsonFormatter())
    try:
        raise KeyError("gone")
    except KeyError:
        logger.exception(Event("rpc_failed", method="/a/B"))
    [line] = stream.getvalue().splitlines()
    assert "KeyError: 'gone'" in json.loads(line)["traceback"]


def test_of_a_progress_bar_a_json_line_has_what_a_terminal_shows_and_nothing_piles_up() -> None:
    stream = io.StringIO()
    lines = JsonLines(stream, "error")
    for number in range(1000):
        lines.write(f"\r{number} of 1000")
        assert len(lines._begun) < 20
    lines.write("\nnext\r\n")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["999 of 1000", "next"]
