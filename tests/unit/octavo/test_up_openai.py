"""Where `octavo up` serves OpenAI's API, and what it says if it cannot."""

import socket
from collections.abc import Iterator

import pytest

from octavo.commands import up
from octavo.commands.command_line import run
from octavo.errors import LocalServiceError
from octavo.local.options import LocalOptions
from octavo.local.services import LocalServices

EXPOSED = (
    "octavo: warning: the scheduler at {} 0.0.0.0:0 uses neither TLS nor authentication: anyone who can reach it can "
    "use it, and anyone on the network path can read the traffic; set {} to a loopback address, such as "
    "127.0.0.1"
)


@pytest.fixture
def busy_address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LocalOptions]:
    """What would be started; nothing is."""
    options: list[LocalOptions] = []

    def from_options(given: LocalOptions, **_: object) -> LocalServices:
        options.append(given)
        raise LocalServiceError("nothing starts here")

    monkeypatch.setattr(LocalServices, "from_options", from_options)
    return options


@pytest.mark.parametrize(
    ("flags", "openai_listen"),
    [
        ((), "127.0.0.1:0"),
        (("--openai-listen", "localhost:0"), "localhost:0"),
        (("--set", "scheduler.openai_listen=[::1]:0"), "[::1]:0"),
        (("--openai-listen", "off"), None),
        (("--set", "scheduler.openai_listen=off"), None),
    ],
)
def test_it_listens_where_it_is_told(
    started: list[LocalOptions], flags: tuple[str, ...], openai_listen: str | None
) -> None:
    assert run(["up", "some/model", "--listen", "127.0.0.1:0", *flags]) == 1
    assert [options.scheduler.config.openai_listen for options in started] == [openai_listen]


def test_what_is_neither_an_address_nor_off_is_refused(
    started: list[LocalOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "some/model", "--openai-listen", "no"]) == 2
    assert "'no' is not HOST:PORT with a port from 0 to 65535, or the word off" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("flag", ["--openai-listen", "--page-listen"])
def test_a_port_that_was_asked_for_and_is_taken_ends_the_start(
    flag: str, busy_address: str, started: list[LocalOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "some/model", "--listen", "127.0.0.1:0", flag, busy_address]) == 1
    assert capsys.readouterr().err == (
        f"octavo: {flag} {busy_address} is in use by another program; choose another port, or 0 for any free one\n"
    )
    assert started == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_if_the_default_port_is_taken_the_rest_is_served(
    busy_address: str,
    is_taken: bool,
    started: list[LocalOptions],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert up.DEFAULT_OPENAI_ADDRESS == "127.0.0.1:8080"
    default = busy_address if is_taken else "127.0.0.1:00"
    monkeypatch.setattr(up, "DEFAULT_OPENAI_ADDRESS", default)
    assert run(["up", "some/model", "--listen", "localhost:00", "--admin-listen", "localhost:0"]) == 1
    assert [options.scheduler.config.openai_listen for options in started] == [None if is_taken else default]
    said = (
        f"octavo: {busy_address} is in use by another program, so the OpenAI-compatible API is disabled; to use "
        "another port: --openai-listen 127.0.0.1:8081\n"
    )
    assert capsys.readouterr().err.startswith(said) is is_taken


FLAGS = ("--listen", "--admin-listen", "--page-listen", "--openai-listen")


@pytest.mark.parametrize("exposed", [(), ("--openai-listen",), ("--page-listen",), FLAGS])
def test_up_warns_of_each_address_that_others_can_reach(
    exposed: tuple[str, ...], started: list[LocalOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for flag in FLAGS for word in (flag, "0.0.0.0:0" if flag in exposed else "localhost:0")]
    assert run(["up", "some/model", *words]) == 1
    *warnings, _ = capsys.readouterr().err.splitlines()
    assert warnings == [EXPOSED.format(flag, flag) for flag in exposed]
