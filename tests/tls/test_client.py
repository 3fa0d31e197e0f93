"""TLS and tokens as `octavo.Client` and the command line see them."""

from pathlib import Path

import pytest

from octavo.calls.scheduler_channel import read_token, token_metadata
from octavo.calls.tls import TlsOptions, handshake_trouble
from octavo.client import Client
from octavo.errors import (
    ConnectionOptionsError,
    DeadlineError,
    NotConnectedError,
    PermissionDeniedError,
    TlsHandshakeError,
    UnauthenticatedError,
)
from octavo.values.address import is_loopback
from octavo.values.sampling_params import SamplingParams
from tests.support.certificates import Authority, PairFiles
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S
from tests.tls.services import running_pair, running_scheduler, tls_settings

TOKEN = "a-token-of-blue-00"
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


async def handshake_failure(address: str, tls: TlsOptions | None) -> str:
    async with Client(address, tls=tls) as client:
        with pytest.raises(TlsHandshakeError) as caught:
            await client.get_model()
    start = f"no connection to the scheduler at {address}: "
    assert str(caught.value).startswith(start)
    return str(caught.value).removeprefix(start)


async def test_requests_over_mutual_tls_with_a_token(
    server_files: PairFiles, client_files: PairFiles, ca: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text(f"blue {TOKEN}\n")
    tls = TlsOptions(ca=ca, cert=client_files.cert, key=client_files.key)
    settings = tls_settings(server_files, client_ca=ca) | {"tokens_file": tmp_path / "tokens"}
    async with running_pair(**settings) as scheduler, Client(scheduler.address, tls=tls, token=TOKEN) as client:
        await client.wait_until_ready(timeout_s=PATIENCE_S)
        output = await client.generate("hello", GREEDY)
        assert await client.abort("unknown") is False
    assert len(output.outputs[0].token_ids) == 3


async def test_each_failed_handshake_is_told_apart(
    authority: Authority, server_files: PairFiles, ca: Path, other_ca: Path
) -> None:
    async with running_scheduler() as plain:
        assert await handshake_failure(plain.address, TlsOptions(ca=ca)) == (
            "it does not use TLS; start it with --tls-cert and --tls-key, or connect without TLS"
        )
    async with running_scheduler(**tls_settings(server_files)) as tls:
        assert await handshake_failure(tls.address, None) == (
            "it closed the connection at once; if it uses TLS, name its certificate authority with --tls-ca"
        )
        assert await handshake_failure(tls.address, TlsOptions()) == (
            "its certificate is not signed by an authority that this system knows; name its authority with --tls-ca"
        )
        assert await handshake_failure(tls.address, TlsOptions(ca=other_ca)) == (
            f"its certificate is not signed by an authority in {other_ca}; name its authority with --tls-ca"
        )
        assert await handshake_failure(tls.address, TlsOptions(ca=ca, server_name="elsewhere")) == (
            "its certificate is not valid for the name elsewhere; give a name from the certificate with "
            "--tls-server-name"
        )
    async with running_scheduler(**tls_settings(server_files, client_ca=ca)) as mutual:
        assert await handshake_failure(mutual.address, TlsOptions(ca=ca)) == (
            "it closed the connection after the TLS handshake; if it requires a client certificate, name one with "
            "--tls-cert and --tls-key"
        )


async def test_who_waits_until_ready_learns_of_tls(server_files: PairFiles, other_ca: Path) -> None:
    async with (
        running_pair(**tls_settings(server_files)) as scheduler,
        Client(scheduler.address, tls=TlsOptions(ca=other_ca)) as client,
    ):
        with pytest.raises(DeadlineError, match=r"was not ready within 0\.5 s \(.*is not signed by an authority in"):
            await client.wait_until_ready(timeout_s=0.5)


async def test_nobody_at_the_address_is_no_failed_handshake(ca: Path) -> None:
    async with Client("127.0.0.1:1", tls=TlsOptions(ca=ca)) as client:
        with pytest.raises(NotConnectedError):
            await client.get_model()


async def test_errors_of_tokens_are_typed(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"blue {TOKEN}\n")
    async with running_pair(tokens_file=tmp_path / "tokens") as scheduler:
        async with Client(scheduler.address) as client:
            with pytest.raises(UnauthenticatedError, match="--token-file, or OCTAVO_TOKEN"):
                await client.get_model()
        async with Client(scheduler.address, token=TOKEN) as client:
            with pytest.raises(PermissionDeniedError, match="the token belongs to tenant 'blue'"):
                await client.generate("hello", GREEDY, tenant="green")


def test_a_token_travels_in_plaintext_on_this_machine_only() -> None:
    with pytest.raises(ConnectionOptionsError) as caught:
        Client("scheduler.example:50051", token=TOKEN)
    assert str(caught.value) == (
        "the token would be sent to scheduler.example:50051 in plaintext; use TLS (--tls-ca or --tls), or send no token"
    )
    assert Client("scheduler.example:50051", tls=TlsOptions(), token=TOKEN).address == "scheduler.example:50051"
    assert token_metadata("localhost:1", TOKEN, is_encrypted=False) == (("authorization", f"Bearer {TOKEN}"),)


@each_row("", "two words", "new\nline", "tökèn")
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(ConnectionOptionsError, match="the token must be one word of ASCII characters"):
        Client("127.0.0.1:1", token=token)


def test_a_token_file_holds_one_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(tmp_path / "token") == TOKEN
    with pytest.raises(ConnectionOptionsError, match=r"--token-file .*missing cannot be read \(No such file"):
        read_token(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConnectionOptionsError, match="is not a text file"):
        read_token(tmp_path / "binary")


LOOPBACK = [
    *("127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1", "LOCALHOST:1", "unix:/run/octavo", "dns:///localhost:1"),
    *("ipv4:127.0.0.1:1", "[::ffff:127.0.0.1]:1"),
]
ELSEWHERE = [
    *("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "localhost.example.org:1", "127.0.0.1.example.org:1"),
    *("dns:///example.org:1", "dns://10.0.0.1/localhost:1", "[::ffff:10.0.0.1]:1", "nothing", ":1"),
]


@each_row(*LOOPBACK)
def test_addresses_of_this_machine(address: str) -> None:
    assert is_loopback(address)


@each_row(*ELSEWHERE)
def test_addresses_that_may_be_elsewhere(address: str) -> None:
    assert not is_loopback(address)


CONNECTING = "failed to connect to all addresses; last error: "


@each_row(
    ("Socket closed", None, None),  # a connection that had been there
    (f"{CONNECTING}UNKNOWN: ipv4:1.2.3.4:5: Connection refused", None, None),
    (f"{CONNECTING}UNKNOWN: ipv4:1.2.3.4:5: Connection refused", TlsOptions(), None),
    (
        f"{CONNECTING}UNAVAILABLE: ipv4:1.2.3.4:5: Handshake read failed (Socket closed)",
        TlsOptions(),
        "the TLS handshake failed (UNAVAILABLE: ipv4:1.2.3.4:5: Handshake read failed (Socket closed))",
    ),
    (
        f"{CONNECTING}Tls handshake failed: CERTIFICATE_VERIFY_FAILED: unsuitable purpose: OK",
        TlsOptions(),
        "its certificate is refused (unsuitable purpose)",
    ),
)
def test_other_failures_keep_their_meaning(details: str, tls: TlsOptions | None, trouble: str | None) -> None:
    assert handshake_trouble(details, tls) == trouble
