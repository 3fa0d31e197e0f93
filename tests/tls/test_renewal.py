"""Certificates and tokens are renewed while a service runs."""

import asyncio
import logging
import os
import ssl
import urllib.request
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509

from octavo.calls.tls import TlsOptions
from octavo.client import Client
from octavo.errors import TlsHandshakeError
from octavo.values.outputs import Finished
from octavo.values.sampling_params import SamplingParams
from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.watched_files import RETRY_INTERVAL_S, WatchedFiles
from tests.support.certificates import DAY, HOUR, Authority, Pair, PairFiles, replace
from tests.support.patience import PATIENCE_S
from tests.tls.services import running_pair, running_scheduler, server_tls, tls_settings


async def shown_certificate(address: str) -> bytes:
    """Return the certificate that a service shows at a new handshake."""
    host, _, port = address.rpartition(":")
    pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=PATIENCE_S)
    return pem.encode()


async def test_new_connections_get_the_new_certificate_and_streams_go_on(
    authority: Authority, other_authority: Authority, server_files: PairFiles, ca: Path, other_ca: Path
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=600)
    async with (
        running_pair(**tls_settings(server_files)) as scheduler,
        Client(scheduler.address, tls=TlsOptions(ca=ca)) as old,
        aclosing(old.stream([65, 66], params)) as events,
    ):
        await anext(events)
        other_authority.issue("localhost", "127.0.0.1").write(server_files.cert.parent)

        async with Client(scheduler.address, tls=TlsOptions(ca=other_ca)) as new:
            assert (await new.get_model()).vocab_size > 0
        async with Client(scheduler.address, tls=TlsOptions(ca=ca)) as late:
            with pytest.raises(TlsHandshakeError, match="is not signed by an authority in"):
                await late.get_model()
        assert scheduler.service.engine.requests, "the stream must outlive the renewal"
        finished = [event async for event in events][-1]
        assert isinstance(finished, Finished)
        assert finished.usage.num_output_tokens == 600


async def test_every_port_shows_the_new_certificate(authority: Authority, server_files: PairFiles) -> None:
    async with running_scheduler(**tls_settings(server_files)) as scheduler:
        ports = [scheduler.address, scheduler.admin_address]
        old = server_files.cert.read_bytes()
        assert [await shown_certificate(port) for port in ports] == [old, old]

        new = authority.issue("localhost", validity=(-DAY, HOUR))
        new.write(server_files.cert.parent)

        assert [await shown_certificate(port) for port in ports] == [new.cert, new.cert]
        assert scheduler.service.tls is not None
        assert 0 < scheduler.service.tls.not_after_s - datetime.now(UTC).timestamp() <= HOUR.total_seconds()


async def test_the_metric_follows_the_certificate(authority: Authority, server_files: PairFiles) -> None:
    settings = tls_settings(server_files) | {"metrics_listen": "127.0.0.1:0"}
    async with running_scheduler(**settings) as scheduler:
        url = f"http://{scheduler.service.other_addresses['metrics']}/metrics"

        async def expiry_s() -> float:
            with await asyncio.to_thread(urllib.request.urlopen, url, timeout=PATIENCE_S) as answer:
                lines = answer.read().decode().splitlines()
            (line,) = [line for line in lines if line.startswith("octavo_tls_certificate_expiry_seconds ")]
            return float(line.split()[1])

        def certificate_expiry_s() -> float:
            return x509.load_pem_x509_certificate(server_files.cert.read_bytes()).not_valid_after_utc.timestamp()

        before = certificate_expiry_s()
        assert await expiry_s() == before
        authority.issue("localhost", validity=(-DAY, HOUR)).write(server_files.cert.parent)
        assert await expiry_s() == certificate_expiry_s() < before


async def test_a_broken_renewal_keeps_the_old_one_and_warns_once(
    authority: Authority, server_files: PairFiles, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = server_files.cert.read_bytes(), authority.issue("localhost")
    async with running_scheduler(**tls_settings(server_files)) as scheduler:
        replace(server_files.cert, new.cert)  # the key does not match it yet
        assert [await shown_certificate(scheduler.address) for _ in range(3)] == [old] * 3
        (warning,) = [record for record in caplog.records if "files_not_reloaded" in record.getMessage()]
        assert warning.levelno == logging.WARNING
        assert f"--tls-key {server_files.key} does not match" in warning.getMessage()

        replace(server_files.key, new.key)
        assert await shown_certificate(scheduler.address) == new.cert


def test_an_expired_renewal_is_not_taken(authority: Authority, server_files: PairFiles) -> None:
    tls = server_tls(server_files)
    before = tls.not_after_s

    authority.issue("localhost", validity=(-DAY, -HOUR)).write(server_files.cert.parent)

    assert tls.not_after_s == before


def test_a_volume_of_kubernetes_is_followed(authority: Authority, server_pair: Pair, tmp_path: Path) -> None:
    """Its files are links into a directory that is itself a link, and only that one is replaced."""
    server_pair.write(tmp_path / "first")
    (tmp_path / "..data").symlink_to("first")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(Path("..data") / name)
    tls = server_tls(PairFiles(tmp_path / "tls.crt", tmp_path / "tls.key"))
    before = tls.not_after_s

    authority.issue("localhost", validity=(-DAY, HOUR)).write(tmp_path / "second")
    (tmp_path / "..data_tmp").symlink_to("second")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")

    assert tls.not_after_s < before


def test_files_are_read_only_when_they_changed(tmp_path: Path) -> None:
    path, reads = tmp_path / "file", []

    def load() -> str:
        reads.append(path.read_text())
        if "bad" in reads[-1]:
            raise OctavoServiceError("it is bad")
        return reads[-1]

    path.write_text("one")
    watched = WatchedFiles("words", [path], load)
    assert [watched.current(), watched.current()] == ["one", "one"]
    replace(path, b"bad")
    assert [watched.current(), watched.current()] == ["one", "one"]
    replace(path, b"two")
    assert [watched.current(), watched.current()] == ["two", "two"]
    assert reads == ["one", "bad", "two"]


def test_what_was_refused_is_tried_again_since_a_certificate_becomes_valid_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now_s, is_valid = tmp_path / "file", 100.0, False

    def load() -> str:
        if path.read_text() == "two" and not is_valid:
            raise OctavoServiceError("its time has not come")
        return path.read_text()

    path.write_text("one")
    watched = WatchedFiles("words", [path], load, lambda: now_s)
    replace(path, b"two")
    assert watched.current() == "one"
    now_s += RETRY_INTERVAL_S
    assert watched.current() == "one"
    is_valid = True
    assert watched.current() == "one"
    now_s += RETRY_INTERVAL_S
    assert watched.current() == "two"
    assert sum("its time has not come" in message for message in caplog.messages) == 1


def test_new_permissions_are_a_change(tmp_path: Path) -> None:
    path, reads = tmp_path / "file", 0

    def load() -> None:
        nonlocal reads
        reads += 1

    path.touch(mode=0o600)
    watched = WatchedFiles("words", [path], load)
    path.chmod(0o644)
    watched.current()
    assert reads == 2


def test_a_file_that_is_gone_for_a_moment_keeps_its_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"

    def load() -> str:
        try:
            return path.read_text()
        except OSError as error:
            raise OctavoServiceError("it cannot be read") from error

    path.write_text("one")
    watched = WatchedFiles("words", [path], load)
    path.unlink()
    assert watched.current() == "one"
    path.write_text("two")
    assert watched.current() == "two"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
