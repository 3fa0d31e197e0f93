"""TLS between scheduler and executor, and what an operator reads when it fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from octavo.client import Client
from octavo.values.sampling_params import SamplingParams
from octavo_shared.grpc.certificates import TlsFileError
from tests.support.certificates import DAY, HOUR, Authority, PairFiles, replace
from tests.support.patience import PATIENCE_S
from tests.tls.services import Scheduler, running_executor, running_scheduler, server_tls

CERTIFICATE_HINT = "name one with --executor-tls-cert and --executor-tls-key"


@asynccontextmanager
async def scheduler_of(executor: str, **settings: object) -> AsyncIterator[Scheduler]:
    named = {f"executor_tls_{name}": value for name, value in settings.items()}
    async with running_scheduler(executor=(executor,), **named) as scheduler:
        yield scheduler


async def test_requests_run_over_mutual_tls(server_files: PairFiles, client_files: PairFiles, ca: Path) -> None:
    async with (
        running_executor(server_tls(server_files, client_ca=ca)) as executor,
        scheduler_of(executor, ca=ca, cert=client_files.cert, key=client_files.key) as scheduler,
        Client(scheduler.address) as client,
    ):
        await scheduler.attached()
        output = await client.generate([65, 66], SamplingParams(temperature=0.0, max_tokens=5))
    assert len(output.outputs[0].token_ids) == 5


async def test_a_name_is_given_to_executors_that_are_dialled_by_address(
    authority: Authority, ca: Path, tmp_path: Path
) -> None:
    named = server_tls(authority.issue("executor.octavo.svc").write(tmp_path / "named"))
    async with running_executor(named) as executor:
        async with scheduler_of(executor, ca=ca) as scheduler:
            assert await scheduler.last_error() == (
                "its certificate is not valid for the name used to connect; give a name from the certificate with "
                "--executor-tls-server-name"
            )
        async with scheduler_of(executor, ca=ca, server_name="elsewhere") as scheduler:
            assert await scheduler.last_error() == (
                "its certificate is not valid for the name elsewhere; give a name from the certificate with "
                "--executor-tls-server-name"
            )
        async with scheduler_of(executor, ca=ca, server_name="executor.octavo.svc") as scheduler:
            await scheduler.attached()


async def test_plaintext_to_an_executor_with_tls(server_files: PairFiles, caplog: pytest.LogCaptureFixture) -> None:
    sentence = "it closed the connection at once; if it uses TLS, name its certificate authority with --executor-tls-ca"
    async with running_executor(server_tls(server_files)) as executor, scheduler_of(executor) as scheduler:
        assert await scheduler.last_error() == sentence
    (line,) = [record for record in caplog.records if "no_executor" in record.getMessage()]
    assert sentence in line.getMessage()


async def test_tls_to_an_executor_without(ca: Path) -> None:
    async with running_executor() as executor, scheduler_of(executor, ca=ca) as scheduler:
        assert await scheduler.last_error() == (
            "it does not use TLS; start it with --tls-cert and --tls-key, or connect without TLS"
        )


async def test_an_authority_that_did_not_sign(server_files: PairFiles, other_ca: Path) -> None:
    async with (
        running_executor(server_tls(server_files)) as executor,
        scheduler_of(executor, ca=other_ca) as scheduler,
    ):
        assert await scheduler.last_error() == (
            f"its certificate is not signed by an authority in {other_ca}; name its authority with --executor-tls-ca"
        )


@pytest.mark.parametrize(
    ("begin", "end", "sentence"),
    [
        (-2 * DAY, -HOUR, "its certificate has expired; renew it there"),
        (HOUR, DAY, "its certificate is not valid yet; check the clocks of both machines"),
    ],
)
async def test_a_certificate_outside_its_time(
    authority: Authority,
    server_files: PairFiles,
    ca: Path,
    monkeypatch: pytest.MonkeyPatch,
    begin: object,
    end: object,
    sentence: str,
) -> None:
    monkeypatch.setattr("octavo_shared.grpc.certificates._check_validity", lambda file, certificate: None)
    authority.issue("127.0.0.1", validity=(begin, end)).write(server_files.cert.parent)  # type: ignore[arg-type]
    async with running_executor(server_tls(server_files)) as executor, scheduler_of(executor, ca=ca) as scheduler:
        assert await scheduler.last_error() == sentence


async def test_no_client_certificate_where_one_is_demanded(server_files: PairFiles, ca: Path) -> None:
    async with (
        running_executor(server_tls(server_files, client_ca=ca)) as executor,
        scheduler_of(executor, ca=ca) as scheduler,
    ):
        assert await scheduler.last_error() == (
            f"it closed the connection after the TLS handshake; if it requires a client certificate, {CERTIFICATE_HINT}"
        )


async def test_a_client_certificate_of_another_authority(
    other_authority: Authority, server_files: PairFiles, ca: Path, tmp_path: Path
) -> None:
    foreign = other_authority.issue().write(tmp_path / "foreign")
    async with (
        running_executor(server_tls(server_files, client_ca=ca)) as executor,
        scheduler_of(executor, ca=ca, cert=foreign.cert, key=foreign.key) as scheduler,
    ):
        assert await scheduler.last_error() == (
            "it closed the connection after the TLS handshake; it may have rejected the client certificate "
            f"{foreign.cert}, which must be valid and signed by an authority in its --tls-client-ca"
        )


async def test_the_scheduler_reads_its_certificate_anew_for_each_connection(
    authority: Authority, other_authority: Authority, server_files: PairFiles, ca: Path, tmp_path: Path
) -> None:
    files = other_authority.issue().write(tmp_path / "renewed")
    async with (
        running_executor(server_tls(server_files, client_ca=ca)) as executor,
        scheduler_of(executor, ca=ca, cert=files.cert, key=files.key) as scheduler,
    ):
        assert "may have rejected the client certificate" in await scheduler.last_error()

        authority.issue().write(tmp_path / "renewed")

        await scheduler.attached()


async def test_a_certificate_that_became_unusable_is_named(
    server_files: PairFiles, client_files: PairFiles, ca: Path
) -> None:
    async with scheduler_of("127.0.0.1:1", ca=ca, cert=client_files.cert, key=client_files.key) as scheduler:
        replace(client_files.key, b"broken")
        async with asyncio.timeout(PATIENCE_S):
            while "PEM" not in (error := await scheduler.last_error()):
                pass
    assert error.startswith(f"--executor-tls-key {client_files.key} contains no private key in PEM format")


async def test_files_of_the_scheduler_are_checked_at_the_start(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(TlsFileError) as caught:
        async with scheduler_of("127.0.0.1:1", ca=missing):
            pass
    assert str(caught.value) == (
        f"--executor-tls-ca {missing} cannot be read (No such file or directory); give a PEM file that this process "
        "may read"
    )
