"""`octavo top` and `octavo explain` against a real scheduler and its fake executor, over gRPC.

As in test_admin_service.py the executor stands still in the middle of its work, so that all that is said can be
compared with what is.
"""

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from octavo import Client, __version__
from octavo.admin_client import AdminClient, AdminPortError
from octavo.calls.tls import TlsOptions
from octavo.commands.explain import explain_request
from octavo.errors import (
    NotConnectedError,
    OctavoError,
    PermissionDeniedError,
    TlsHandshakeError,
    UnauthenticatedError,
    UnavailableError,
)
from octavo.top.app import TopApp
from octavo.top.polling import Poller
from octavo.top.rates import Picture, RateMeter
from octavo.top.report import UnknownRequestError
from octavo.top.rows import ended_rows, live_rows
from octavo.top.snapshot import snapshot_text
from tests.contract.test_admin_service import still_stack
from tests.support.certificates import Authority
from tests.support.patience import PATIENCE_S
from tests.support.stack import Stack, collect, running_stack, token_request, until
from tests.unit.octavo.top.terminal import Terminal, terminal


def admin_client(stack: Stack) -> AdminClient:
    return AdminClient(stack.service.other_addresses["admin"])


async def explained(stack: Stack, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command prints."""
    capsys.readouterr()
    await explain_request(admin_client(stack), text)
    return capsys.readouterr().out


# explain -----------------------------------------------------------------------------------------


async def test_a_request_that_waits_and_one_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    head = token_request(190, 10, request_id="head", first_id=9)
    async with still_stack(token_request(100, 100, request_id="runs"), head, page_listen="127.0.0.1:0") as still:
        await still.step_until(lambda core: bool(core.batch.running))
        address = still.stack.executor.address
        out = await explained(still.stack, "head", capsys)
        assert out.startswith(f"head   waiting\nwaits: next in the queue; on {address}, needs 12 blocks, 8 free\n")
        assert f"\n{address}  12 needed, 8 free  1 needed, 255 free  needs 12 blocks, 8 free\n" in out
        out = await explained(still.stack, "ru", capsys)
        assert out.startswith(f"runs   running on {address}\nruns on {address}: 0 output tokens so far\n")
        assert "\nblocks    7 on the device\n" in out
        assert f"admitted; of 100 tokens, 0 came from the prefix cache  ({address}, step 1)\n" in out
        assert out.endswith(f"live page http://{still.stack.service.other_addresses['page']}/#request=runs\n")


async def test_a_swapped_request(capsys: pytest.CaptureFixture[str]) -> None:
    stays = token_request(100, 150, request_id="stays")
    goes = token_request(90, 100, request_id="goes", first_id=3)
    async with still_stack(stays, goes, preemption_mode="swap") as still:
        await still.step_until(lambda core: len(core.swapped) > 0)
        out = await explained(still.stack, "goes", capsys)
        assert out.startswith(f"goes   swapped on {still.stack.executor.address}\nswapped out of ")
        assert " in the host cache\n" in out
        assert "trouble   preempted 1 time\n" in out
        (row,) = [row for row in live_rows(await picture(still.stack)) if row.state.request_id == "goes"]
        assert (row.status, row.state.num_preemptions) == ("swapped", 1)


async def test_a_preempted_request_that_has_a_token_on_its_way(capsys: pytest.CaptureFixture[str]) -> None:
    stays = token_request(100, 150, request_id="stays")
    goes = token_request(90, 100, request_id="goes", first_id=3)
    async with still_stack(stays, goes, preemption_mode="recompute", steps_in_flight=2) as still:
        core = still.core
        while not core.preempted.groups:
            num_processed = core.last_processed_step_id
            still.turnstile.let_one_through()
            await until(
                lambda: (
                    core.last_processed_step_id > num_processed  # noqa: B023 (called before the next turn)
                    and (len(core.in_flight) == 2 or bool(core.preempted.groups))
                )
            )
        out = await explained(still.stack, "goes", capsys)
        assert out.startswith(f"goes   preempted on {still.stack.executor.address}\npreempted on ")
        assert "still in flight; then it goes back to the queue" in out


async def test_a_parked_request(capsys: pytest.CaptureFixture[str]) -> None:
    head = token_request(190, 10, request_id="lost", first_id=9)
    async with still_stack(token_request(100, 100, request_id="runs"), head) as still:
        await still.step_until(lambda core: bool(core.batch.running))
        engine = still.stack.engine
        lost = engine.requests["", "lost"]
        engine.queue.remove(lost.group)
        engine.requests.suspects.parked.append(lost)
        out = await explained(still.stack, "lost", capsys)
        assert out.startswith("lost   quarantined\nquarantined: it may have crashed an executor")
        (row,) = [row for row in live_rows(await picture(still.stack)) if row.state.request_id == "lost"]
        assert (row.status, row.place) == ("quarantined", "it may crash executors; others go first")


async def test_a_request_that_has_ended_and_one_that_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_stack() as stack:
        await collect(stack, token_request(20, 5, request_id="chat-17"))
        out = await explained(stack, "chat", capsys)
        assert re.match(r"chat-17   finished\n[\d.]+ s ago it finished with 5 output tokens: length\n", out)
        with pytest.raises(UnknownRequestError, match=r"no live request has request_id 'at-17'.* did you mean chat-17"):
            await explained(stack, "at-17", capsys)


async def test_watch_ends_with_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    async with still_stack(token_request(40, 3, request_id="runs"), page_listen="127.0.0.1:0") as still:
        await still.step_until(lambda core: bool(core.batch.running))
        watch = asyncio.create_task(
            explain_request(admin_client(still.stack), "runs", is_watching=True, interval_s=0.01, is_json=True)
        )
        seen = ""
        while not seen:
            await asyncio.sleep(0)
            seen = capsys.readouterr().out
        still.turnstile.open()
        async with asyncio.timeout(PATIENCE_S):
            await watch
        seen += capsys.readouterr().out
    reports = [json.loads(line) for line in seen.splitlines()]
    assert reports[0]["explanation"]["status"] == "running"
    assert reports[-1]["explanation"]["status"] == "ended"
    assert [event["kind"] for event in reports[-1]["request"]["events"]] == [
        "arrived",
        "admitted",
        "first_token",
        "finished",
    ]


async def test_watch_prints_only_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    async with still_stack(token_request(40, 3, request_id="runs"), page_listen="127.0.0.1:0") as still:
        await still.step_until(lambda core: bool(core.batch.running))
        watch = asyncio.create_task(
            explain_request(admin_client(still.stack), "runs", is_watching=True, interval_s=0.01)
        )
        seen = ""
        while "live page" not in seen:
            await asyncio.sleep(0)
            seen += capsys.readouterr().out
        await still.step_until(lambda core: core.last_processed_step_id >= 1)
        while "1 output token so far" not in seen:
            await asyncio.sleep(0)
            seen += capsys.readouterr().out
        still.turnstile.open()
        async with asyncio.timeout(PATIENCE_S):
            await watch
        seen += capsys.readouterr().out
    assert seen.count("arrived with 40 prompt tokens") == 2  # at the beginning and in the last report
    assert seen.count("runs   finished") == 1


# top ---------------------------------------------------------------------------------------------


async def picture(stack: Stack) -> Picture:
    async with admin_client(stack) as client:
        return RateMeter().add(await Poller(client).take(wants_ended=True))


async def test_a_picture_has_the_true_numbers() -> None:
    head = token_request(190, 10, request_id="head", first_id=9)
    async with still_stack(token_request(100, 100, request_id="runs"), head) as still:
        await still.step_until(lambda core: core.last_processed_step_id >= 3)
        shown = await picture(still.stack)
        (executor,) = shown.answers.state.executors
        allocator = still.core.blocks.allocator
        assert (executor.num_used_blocks, executor.num_blocks) == (allocator.num_used_blocks, 16)
        assert (executor.num_running_requests, executor.num_steps_in_flight) == (1, 1)
        runs, waits = live_rows(shown)
        assert (runs.state.request_id, runs.state.num_output_tokens, runs.state.num_blocks) == ("runs", 3, 7)
        assert (waits.state.request_id, waits.status) == ("head", "waiting")
        assert waits.place == f"on {still.stack.executor.address}, needs 12 blocks, 8 free"
        text = snapshot_text(shown, "admin", 120)
        limit = shown.answers.state.max_waiting_requests
        assert f"1 of at most {limit:,} waiting   1 running" in text
        assert executor.num_slots == still.core.limits.max_num_seqs
        (line,) = [line.split() for line in text.splitlines() if " attached " in line]
        assert line[:5] == [still.stack.executor.address, "attached", "1", f"1/{executor.num_slots}", "0"]


async def test_a_scheduler_that_drains_says_so_and_what_has_ended_stays() -> None:
    async with running_stack() as stack:
        await collect(stack, token_request(20, 5, request_id="done"))
        await stack.engine.start_draining()
        shown = await picture(stack)
        assert "not ready: the scheduler is draining" in snapshot_text(shown, "admin", 120)
        assert [row.state.request_id for row in ended_rows(shown)] == ["done"]


async def test_a_screen_that_lost_its_scheduler_finds_the_next_one_at_its_address() -> None:
    async with running_stack() as stack:
        address = stack.service.other_addresses["admin"]
        client = AdminClient(address)
        app = TopApp(Poller(client), 3600.0)
        async with client, app.run_test(size=(100, 30)):
            await app.refresh_picture()
            await stack.service.stop("the test wants it gone")
            await app.refresh_picture()
            assert "no response since " in notice(app)
            async with running_stack(admin_listen=address):
                async with asyncio.timeout(PATIENCE_S):
                    while notice(app):
                        await app.refresh_picture()


def notice(app: TopApp) -> str:
    from textual.widgets import Static

    return str(app.query_one("#notice", Static).content)


# What does not answer as it should ---------------------------------------------------------------


async def refused(client: AdminClient) -> OctavoError:
    async with client:
        with pytest.raises(OctavoError) as caught:
            await client.get_state()
    return caught.value


async def test_the_port_of_clients_is_told_from_that_of_operators() -> None:
    async with running_stack(page_listen="127.0.0.1:0") as stack:
        error = await refused(AdminClient(stack.address))
        assert isinstance(error, AdminPortError)
        assert str(error) == (
            f"{stack.address} is not the port for operators; give the scheduler's --admin-listen, "
            "by default 127.0.0.1:50052"
        )
        assert isinstance(await refused(AdminClient(stack.executor.address)), AdminPortError)
        page = stack.service.other_addresses["page"]  # for HTTP
        assert isinstance(await refused(AdminClient(page)), AdminPortError)
        async with Client(page) as client:
            with pytest.raises(UnavailableError, match=f"^the server at {page} does not speak gRPC"):
                await client.get_model()
    assert isinstance(await refused(AdminClient("127.0.0.1:1")), NotConnectedError)


async def test_tokens_are_asked_for_and_only_an_operator_sees_all(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("* operator-secret-of-the-test\nred red-secret-of-the-test\n")
    tokens.chmod(0o600)
    async with running_stack(tokens_file=tokens) as stack:
        address = stack.service.other_addresses["admin"]
        assert isinstance(await refused(AdminClient(address)), UnauthenticatedError)
        assert isinstance(await refused(AdminClient(address, token="unknown")), UnauthenticatedError)
        error = await refused(AdminClient(address, token="red-secret-of-the-test"))
        assert isinstance(error, PermissionDeniedError)
        assert "the token belongs to tenant 'red'" in str(error)
        async with AdminClient(address, token="operator-secret-of-the-test") as client:
            assert (await client.get_state()).version


async def test_tls_on_one_side_only_is_said_and_on_both_it_works(tmp_path: Path) -> None:
    authority = Authority()
    files, ca = authority.issue("127.0.0.1").write(tmp_path / "server"), authority.write(tmp_path / "ca.crt")
    async with running_stack(tls_cert=files.cert, tls_key=files.key) as stack:
        address = stack.service.other_addresses["admin"]
        error = await refused(AdminClient(address))
        assert isinstance(error, TlsHandshakeError)
        assert "name its certificate authority with --tls-ca" in str(error)
        async with AdminClient(address, tls=TlsOptions(ca=ca)) as client:
            assert (await client.get_state()).version
            assert client.page_url(50055) == "https://127.0.0.1:50055/"
    async with running_stack() as stack:
        error = await refused(AdminClient(stack.service.other_addresses["admin"], tls=TlsOptions(ca=ca)))
        assert "it does not use TLS" in str(error)


# A real terminal ---------------------------------------------------------------------------------


async def start_top(at: Terminal, stack: Stack) -> asyncio.subprocess.Process:
    """Run `octavo top` in a terminal."""
    command = (sys.executable, "-m", "octavo.cli", "top", "--address", stack.service.other_addresses["admin"])
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=at.theirs,
        stdout=at.theirs,
        stderr=at.theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    )


async def ended(process: asyncio.subprocess.Process) -> int:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.parametrize("way", ["q", "SIGTERM"])
async def test_quitting_leaves_the_terminal_as_it_was(way: str) -> None:
    async with running_stack() as stack, terminal() as at:
        before = at.modes
        process = await start_top(at, stack)
        await at.shows(b"no live requests")
        assert at.modes != before  # keys come one at a time, and are not shown
        if way == "q":
            at.type("q")
        else:
            process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0
        assert at.modes == before
        assert b"\x1b[?1049h" in at.seen  # the other screen
        assert at.seen.rindex(b"\x1b[?1049l") > at.seen.rindex(b"\x1b[?1049h")  # and back
        assert at.seen.rindex(b"\x1b[?25h") > at.seen.rindex(b"\x1b[?25l")  # the cursor


async def test_a_pipe_gets_a_picture_as_text() -> None:
    async with running_stack() as stack:
        command = ("top", "--interval", "0.1", "--address", stack.service.other_addresses["admin"])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "octavo.cli", *command),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "COLUMNS": "120"},
        )
        assert process.stdout is not None
        out = (await process.stdout.read()).decode()
        assert await ended(process) == 0
    assert out.startswith(f"octavo {__version__}   fake   ready   up ")
    assert "per second  0.0 finished   0.0 failed   0.0 preemptions (0 in all)" in out
    assert out.endswith("\nno live requests\n")
