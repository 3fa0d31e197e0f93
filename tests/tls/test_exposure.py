"""Who listens where others can reach it, without TLS or without asking who calls, says so."""

import logging

import pytest

from shared.exposure import warn_if_exposed

PLAIN = (
    "octavo: warning: the scheduler at --listen {} speaks no TLS: anybody on the way can read along, and change what "
    "is sent; set --tls-cert and --tls-key, or --listen to an address of this machine only, such as 127.0.0.1\n"
)
OPEN = (
    "octavo: warning: the scheduler at --listen {} does not ask who calls: anybody who reaches it may use it; set "
    "--tokens-file\n"
)


def warn(address: str, *, is_encrypted: bool, knows_clients: bool) -> None:
    warn_if_exposed(
        "scheduler",
        {"--listen": address},
        is_encrypted=is_encrypted,
        knows_clients=knows_clients,
        how_to_know_clients="set --tokens-file",
    )


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "[::]:50051", "10.1.2.3:0", "octavo.example:50051"])
@pytest.mark.parametrize("knows_clients", [False, True])
def test_plaintext_that_others_reach_is_warned_of(
    address: str, knows_clients: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn(address, is_encrypted=False, knows_clients=knows_clients)

    assert capsys.readouterr().err == PLAIN.format(address)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("event=listens_without_tls flag=--listen address=")


def test_tls_that_asks_nobody_is_warned_of(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn("0.0.0.0:50051", is_encrypted=True, knows_clients=False)

    assert capsys.readouterr().err == OPEN.format("0.0.0.0:50051")
    assert [record.getMessage().split()[0] for record in caplog.records] == ["event=listens_without_authentication"]


@pytest.mark.parametrize(
    ("address", "is_encrypted", "knows_clients"),
    [("127.0.0.1:1", False, False), ("[::1]:1", False, False), ("localhost:1", True, False), ("0.0.0.0:1", True, True)],
)
def test_others_are_silent(
    address: str,
    is_encrypted: bool,
    knows_clients: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn(address, is_encrypted=is_encrypted, knows_clients=knows_clients)

    assert (capsys.readouterr().err, caplog.records) == ("", [])
