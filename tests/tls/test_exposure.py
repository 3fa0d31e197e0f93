"""Who listens where others can reach it, without TLS or without asking who calls, says so; so do readable secrets."""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo_shared.grpc.certificates import PemFile, read_pair
from octavo_shared.grpc.exposure import warn_if_exposed
from scheduler_svc.config.prefix_key import prefix_key
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.front.access.token_table import read_tokens
from tests.support.certificates import PairFiles

PLAIN = (
    "octavo: warning: the scheduler at --listen {} does not use TLS: anyone on the network path can read and change "
    "the traffic; set --tls-cert and --tls-key, or --listen to a loopback address, such as 127.0.0.1\n"
)
OPEN = (
    "octavo: warning: the scheduler at --listen {} has no authentication: anyone who can reach it can use it; set "
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


SECRETS: dict[str, Callable[[Path, Path], object]] = {
    "--tokens-file": lambda path, _: read_tokens(path),
    "--prefix-key-file": lambda path, _: prefix_key(SchedulerConfig(executor=("a:1",), prefix_key_file=path)),
    "--tls-key": lambda path, cert: read_pair(PemFile("--tls-cert", cert), PemFile("--tls-key", path)),
}


@pytest.mark.parametrize("flag", SECRETS)
def test_a_secret_that_every_user_can_read_is_warned_of(
    flag: str, server_files: PairFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = server_files.key if flag == "--tls-key" else tmp_path / "secret"
    if flag != "--tls-key":
        path.write_text(f"blue {secrets.token_hex(32)}\n")
    for mode in (0o600, 0o640, 0o440):  # a group may: in Kubernetes it is the pod's
        path.chmod(mode)
        SECRETS[flag](path, server_files.cert)
    assert caplog.messages == []

    path.chmod(0o644)
    SECRETS[flag](path, server_files.cert)

    assert caplog.messages == [
        f"event=secret_readable_by_others flag={flag} file={path} fix='chmod o-r {path}'",
    ]
