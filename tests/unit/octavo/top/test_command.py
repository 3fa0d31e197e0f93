"""`octavo top` and the terminal: one sentence if it does not do, before anybody is asked; else it is its own."""

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from octavo.commands.command_line import run
from octavo.top.terminal import own_stderr


@contextmanager
def terminal_of(num_columns: int, num_lines: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a terminal of a size stand for standard input and output; what is said of errors is captured."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", num_lines, num_columns, 0, 0))
    with os.fdopen(os.dup(theirs), "w") as stdout, os.fdopen(theirs) as stdin, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", stdout)
        patched.setattr("sys.stdin", stdin)
        patched.setattr("sys.stderr.isatty", lambda: True)
        yield
    os.close(ours)


@pytest.mark.parametrize("size", [(79, 30), (100, 19), (1, 1)])
def test_a_terminal_that_is_too_small_is_told_which_size_is_needed(
    size: tuple[int, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with terminal_of(*size, monkeypatch):
        assert run(["top", "--address", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == (
        f"octavo: octavo top needs a terminal of 80 columns and 20 lines; this one has {size[0]} and {size[1]}: "
        'enlarge it, or print a snapshot with "octavo top --once"\n'
    )


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_dumb_terminal_is_told_of_once(
    term: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    with terminal_of(100, 30, monkeypatch):
        assert run(["top", "--address", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == (
        'octavo: this terminal (TERM=dumb) cannot show a live view; print a snapshot with "octavo top --once"\n'
    )


def test_a_terminal_that_does_is_told_that_nobody_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with terminal_of(80, 20, monkeypatch):
        assert run(["top", "--address", "127.0.0.1:1"]) == 1
    assert "no scheduler is reachable at 127.0.0.1:1" in capsys.readouterr().err


def test_the_log_of_c_code_does_not_get_into_the_screen(capfd: pytest.CaptureFixture[str]) -> None:
    with own_stderr():
        os.write(2, b"I0000 chttp2_transport.cc")
        assert sys.__stderr__ is not None
        sys.__stderr__.write("the screen; ")
    os.write(2, b"after it")
    assert capfd.readouterr().err == "the screen; after it"
