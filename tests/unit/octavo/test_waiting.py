"""What a person at a terminal sees while nothing comes, and of an answer that did not fit."""

import asyncio
import io
import os
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rich.console import Console

from octavo.commands import waiting as waiting_module
from octavo.commands.answer import say_if_cut_short
from octavo.commands.waiting import WaitingStatus
from octavo.values.outputs import FinishReason, Output, Usage
from tests.support.each_row import each_row
from tests.unit.octavo.stand_in import StandIn
from tests.unit.octavo.test_cli import Ended, run

UP, TO_COLUMN_3 = "\x1b[A", "\x1b[3C"


class Screen(io.StringIO):
    """What a terminal is sent, and an event for the moment when it holds a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._loop = asyncio.get_running_loop()
        self.shows_text = asyncio.Event()

    def write(self, text: str) -> int:
        length = super().write(text)
        if self._text in self.getvalue():
            self._loop.call_soon_threadsafe(self.shows_text.set)  # rich draws in a thread of its own
        return length


def terminal(screen: Screen, *, width: int = 80) -> Console:
    return Console(file=screen, force_terminal=True, width=width, height=20, legacy_windows=False, _environ={})


async def test_after_a_silence_it_says_what_it_waits_for_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(waiting_module, "monotonic", lambda: now_s)
    screen, later = Screen("no token yet, 0 s; why"), Screen("no token yet, 72 s; why")
    with WaitingStatus(terminal(screen), silence_s=0.01) as waiting:
        waiting.expect("no token yet", "; why")
        await screen.shows_text.wait()
    with WaitingStatus(terminal(later), silence_s=0.01) as waiting:
        waiting.expect("no token yet", "; why")
        now_s = 172.4
        await later.shows_text.wait()


async def test_what_comes_in_time_is_not_waited_for() -> None:
    screen = Screen("the second")
    with WaitingStatus(terminal(screen), silence_s=0.01) as waiting:
        waiting.expect("the first")
        waiting.hide()
        waiting.expect("the second")
        await screen.shows_text.wait()
    assert "the first" not in screen.getvalue()


async def passed() -> None:
    """Return after the time within which a status with no patience is due."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, over.set)
    await over.wait()


async def test_a_file_or_a_pipe_is_told_once_after_a_longer_silence() -> None:
    file = io.StringIO()
    with WaitingStatus(Console(file=file), silence_s=0, log_silence_s=60) as waiting:
        waiting.expect("no token yet")
        await passed()
    assert file.getvalue() == ""
    with WaitingStatus(Console(file=file), log_silence_s=0) as waiting:
        waiting.expect("the outputs are not complete yet", is_usual=True)
        await passed()
        assert file.getvalue() == ""
        for what in ("no token yet", "no new token yet"):
            waiting.expect(what, "; why")
            await passed()
    assert file.getvalue() == "octavo: no token yet after 0 s; why\n"


async def test_below_a_line_of_the_answer_it_leaves_the_cursor_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    screen = Screen("more")
    with WaitingStatus(terminal(screen), silence_s=0.01) as waiting:
        waiting.saw("a line\nThe")
        waiting.expect("more")
        await screen.shows_text.wait()
        assert screen.getvalue().startswith("\n")
        waiting.hide()
    assert screen.getvalue().endswith(UP + TO_COLUMN_3)


@pytest.mark.parametrize("line", ["", "x" * 20, "a line\n"])
async def test_where_text_goes_on_in_a_new_line_the_cursor_stays(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    screen = Screen("more")
    with WaitingStatus(terminal(screen, width=20), silence_s=0.01) as waiting:
        waiting.saw(line)
        waiting.expect("more")
        await screen.shows_text.wait()
        waiting.hide()
    assert UP not in screen.getvalue()


@asynccontextmanager
async def on_terminal(*args: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """Run a command whose stderr is a terminal and whose stdout is not; yield it and what the terminal is sent."""
    master, slave = os.openpty()
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.OPOST  # as it was written, without carriage returns
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "octavo.cli", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=slave,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(slave)
    reader = asyncio.StreamReader()
    with os.fdopen(master, "rb", buffering=0) as screen:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), screen
        )
        try:
            yield process, reader
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            transport.close()


async def test_generate_shows_it_on_stderr_of_a_terminal_and_keeps_stdout_clean(stand_in: StandIn) -> None:
    async with on_terminal("generate", "silent", "--address", stand_in.address) as (process, stderr):
        shown = b""
        while b"no new token yet, 2 s; why: `octavo explain made-by-server`" not in shown:
            shown += await stderr.read(1024)
        stand_in.go_on.set()
        assert process.stdout is not None
        assert await process.stdout.read() == b"The sky is blue\n"
    assert process.returncode == 0


@each_row(
    (
        ["--max-tokens", "9"],
        "octavo: only 4 of --max-tokens 9 fit: prompt and answer together have at most 11 tokens here",
    ),
    (["--max-tokens", "9", "--no-stream"], "octavo: only 4 of --max-tokens 9 fit: "),
    (["--max-tokens", "9", "--json"], "octavo: only 4 of --max-tokens 9 fit: "),
    (["--max-tokens", "4"], "octavo: stopped at 4 tokens; --max-tokens N allows more\n"),
    ([], "octavo: stopped at 4 tokens: prompt and answer together have at most 11 tokens here"),
)
async def test_max_tokens_that_do_not_fit_are_named_once(flags: list[str], said: str, *, stand_in: StandIn) -> None:
    ended = await run("generate", "long", *flags, "--address", stand_in.address)
    assert ended.status == 0
    assert ended.stderr.startswith(said)
    assert ended.stderr.count("\n") == 1


@each_row(
    (512, None, "octavo: stopped at 512 tokens; --max-tokens N allows more\n"),
    (600, None, "octavo: stopped at 600 tokens; --max-tokens N allows more\n"),  # --min-tokens 600
    (512, 512, "octavo: stopped at 512 tokens; --max-tokens N allows more\n"),
)
def test_an_answer_that_its_limit_ends_is_said_to_be_cut(
    num_tokens: int, max_tokens: int | None, said: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Output(0, "", tuple(range(num_tokens)), (), FinishReason.LENGTH, None)

    say_if_cut_short([output], Usage(7, num_tokens, 0), max_tokens)

    assert capsys.readouterr().err == said


async def test_an_answer_that_ends_by_itself_is_not_said_to_be_cut(stand_in: StandIn) -> None:
    ended = await run("generate", "Why?", "--max-tokens", "9", "--address", stand_in.address)
    assert ended == Ended(0, "The sky is blue\n", "")
