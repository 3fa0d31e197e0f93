"""`octavo chat` for a person at a terminal, and with its input from a pipe."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from octavo.commands.command_line import run as run_here
from tests.unit.octavo.stand_in import StandIn
from tests.unit.octavo.test_cli import Ended, run, started
from tests.unit.octavo.top.terminal import Terminal, terminal

UP, DOWN, CTRL_D = "\x1b[A", "\x1b[B", "\x04"
ANSWER = "The sky is blue"


@pytest.fixture
def stand_in(stand_in: StandIn) -> StandIn:
    stand_in.has_chat_template = True
    return stand_in


# A client that waits less long for a scheduler that was there.
IMPATIENT = (
    "from octavo.calls import resumption; resumption.DEFAULT_RESUME_TIMEOUT_S = 1.0; import octavo.cli as it; it.main()"
)


@asynccontextmanager
async def chatting(*flags: str) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    """Run a chat in a terminal, and end it with Ctrl-D."""
    async with terminal() as screen:
        command = (sys.executable, "-c", IMPATIENT, "chat", *flags)
        environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=screen.theirs, stdout=screen.theirs, stderr=screen.theirs, env=environment
        )
        try:
            await screen.shows(b"> ")
            yield screen, process
            screen.type(CTRL_D)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def typed(screen: Terminal, line: str, *shown: str) -> None:
    """Type a line and return once what it brings is there, and the next prompt."""
    screen.seen = b""
    screen.type(line + "\n")
    for text in shown:
        await screen.shows(text.encode())
    await screen.shows(b"> ")


def contents(stand_in: StandIn) -> list[list[str]]:
    return [[turn.content for turn in request.messages.messages] for request in stand_in.requests]


async def test_a_person_has_commands_and_a_history(stand_in: StandIn) -> None:
    async with chatting("--address", stand_in.address, "--system", "Be brief.") as (screen, _):
        assert b"tiny at " in screen.seen
        await typed(screen, "/help", "/clear ", "/quit ")
        await typed(screen, "Hi", ANSWER)
        await typed(screen, UP + UP + DOWN + "!", "Hi!", ANSWER)
        await typed(screen, "/clear", "the conversation is empty")
        await typed(screen, "/system Be kind.", "the system message is set")
        await typed(screen, " /etc", ANSWER)
        await typed(screen, "/system", "there is no system message")
        await typed(screen, "/new", "the conversation is empty")
        await typed(screen, "Bye", ANSWER)
        await typed(screen, "/etc", "octavo: unknown command /etc; /help lists the commands")
    assert contents(stand_in) == [
        ["Be brief.", "Hi"],
        ["Be brief.", "Hi", ANSWER, "Hi!"],
        ["Be kind.", "/etc"],
        ["Bye"],
    ]


async def test_sampling_params_are_set_and_unset(stand_in: StandIn) -> None:
    async with chatting("--address", stand_in.address, "--top-k", "5") as (screen, _):
        await typed(screen, "/set", "top_k 5")
        await typed(screen, "/set temperature 0.25", "temperature 0.25")
        await typed(screen, "/set stop a b", "stop ('a b',)")
        await typed(screen, "/set --top-k", "stop (")
        await typed(screen, "/set temprature 1", "unknown sampling parameter 'temprature'; did you mean temperature?")
        await typed(screen, "/set top_p much", "Invalid value for '--top-p': 'much' is not a valid float.")
        await typed(screen, "/set temperature 9999", "temperature is 9999; it must be from 0 to 100")
        await typed(screen, "Hi", ANSWER)
    params = stand_in.requests[0].sampling_params
    assert (params.temperature, params.HasField("top_p"), params.top_k, list(params.stop)) == (0.25, False, 0, ["a b"])


async def test_an_error_does_not_end_the_chat(stand_in: StandIn) -> None:
    async with chatting("--address", stand_in.address) as (screen, _):
        stand_in.chat_wish = "refuse"
        await typed(screen, "Hi", "octavo: --top-p is 2; it must be at most 1")
        stand_in.chat_wish = "break"
        await typed(screen, "And?", "The", "octavo: a broken invariant (INTERNAL)")
        stand_in.chat_wish = ""
        await typed(screen, "More", ANSWER)
        await stand_in.stop()
        await typed(screen, "Hi", "octavo: ")
        await typed(
            screen, "Hi", f'octavo: no scheduler is reachable at {stand_in.address}; start one with "octavo up"'
        )
    assert contents(stand_in) == [["Hi"], ["And?"], ["And?", "The", "More"]]


async def test_a_history_is_kept_in_a_file_if_somebody_names_one(stand_in: StandIn, tmp_path: Path) -> None:
    history = tmp_path / "history"
    async with chatting("--address", stand_in.address, "--history", str(history)) as (screen, _):
        await typed(screen, "Hi", ANSWER)
    assert (history.read_text(), history.stat().st_mode & 0o777) == ("Hi\n", 0o600)
    async with chatting("--address", stand_in.address, "--history", str(history)) as (screen, _):
        await typed(screen, UP, "Hi", ANSWER)


def test_a_history_that_cannot_be_kept_is_said_before_the_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(["chat", "--address", "127.0.0.1:1", "--history", str(tmp_path / "no" / "history")]) == 1
    sentence = f"octavo: --history {tmp_path}/no/history cannot be used: No such file or directory\n"
    assert capsys.readouterr().err == sentence


async def test_input_from_a_pipe_gives_answers_only(stand_in: StandIn) -> None:
    ended = await run("chat", "--address", stand_in.address, stdin="Hi\n/clear\n/set seed 1\n\nAnd?\n/quit\nNo\n")
    assert ended == Ended(0, f"{ANSWER}\n{ANSWER}\n", "")
    assert contents(stand_in) == [["Hi"], ["And?"]]


async def test_an_error_of_a_turn_from_a_pipe_is_the_exit_status(stand_in: StandIn) -> None:
    stand_in.chat_wish = "full"
    ended = await run("chat", "--address", stand_in.address, stdin="Hi\n/no\n")
    assert (ended.status, ended.stdout) == (1, "")
    assert ended.stderr.splitlines() == [
        "octavo: the waiting queue is full",
        "octavo: unknown command /no; /help lists the commands; to send this as text, start it with a space",
    ]


async def test_chat_sends_priority_and_tenant_with_each_turn(stand_in: StandIn) -> None:
    flags = ["--priority", "3", "--tenant", "red", "--beam-width", "2", "--no-speculate"]
    ended = await run("chat", *flags, "--address", stand_in.address, stdin="Hi\nAnd?\n")
    sent = [(request.priority, request.tenant, request.sampling_params.beam_width) for request in stand_in.requests]
    assert sent == [(3, "red", 2), (3, "red", 2)]
    assert all(request.HasField("speculate") for request in stand_in.requests)
    assert ended.stdout == f"{ANSWER}\n{ANSWER}\n"


async def test_chat_needs_a_chat_template(stand_in: StandIn) -> None:
    stand_in.has_chat_template = False
    ended = await run("chat", "--address", stand_in.address)
    assert ended == Ended(1, "", "octavo: tiny has no chat template; use `octavo generate --raw`\n")


async def test_ctrl_c_before_the_first_token_drops_the_turn(stand_in: StandIn) -> None:
    stand_in.is_silent_chat = True
    async with started("chat", "--address", stand_in.address) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hi\n")
        await stand_in.call_began.wait()
        process.send_signal(signal.SIGINT)
        await process.stdout.readuntil(b"[stopped]")
        stand_in.is_silent_chat = False
        stdout, stderr = await process.communicate(b"More\n")
    assert (process.returncode, stderr) == (0, b"")
    assert b"The sky is blue" in stdout
    assert [turn.content for turn in stand_in.requests[1].messages.messages] == ["More"]


async def test_ctrl_c_in_chat_stops_the_answer_and_not_the_program(stand_in: StandIn) -> None:
    stand_in.is_endless_chat = True
    async with started("chat", "--address", stand_in.address) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hi\n")
        await process.stdout.readuntil(b"again ")
        stand_in.is_endless_chat = False
        process.send_signal(signal.SIGINT)
        await process.stdout.readuntil(b"[stopped]")
        stdout, stderr = await process.communicate(b"More\n")  # and the end of input, as Ctrl-D
    assert (process.returncode, stderr) == (0, b"")
    assert b"The sky is blue" in stdout
    assert stand_in.requests[1].messages.messages[1].content.startswith("again ")
