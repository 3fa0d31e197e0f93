"""A terminal's bytes become what a person saw."""

from tests.page.terminal_text import terminal_text
from tests.support.each_row import each_row


@each_row(
    (b"one\r\ntwo\r\n", "one\ntwo"),
    (b"\x1b[1mbold\x1b[0m, \x1b[?25lplain", "bold, plain"),
    (b"to the last\r\nline", "to the last\nline"),
    (b"longer than that", "longer than\nthat"),
    (b"wrong\rright", "right"),
    (b"text\r\n\x1b[32m*\x1b[0m waits\r\x1b[2K* still\r\n\r\x1b[1A\x1b[2K\x1b[A\x1b[4C goes on", "text goes on"),
)
def test_what_was_written_is_shown_as_a_terminal_would(written: bytes, text: str) -> None:
    assert terminal_text(written, 12) == text
