"""`octavo chat` when somebody stops an answer, before and after its beginning."""

import signal

from tests.unit.octavo.stand_in import StandIn
from tests.unit.octavo.test_cli import started


async def test_ctrl_c_before_the_first_token_drops_the_turn(stand_in: StandIn) -> None:
    stand_in.has_chat_template = True
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
    stand_in.has_chat_template = True
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
