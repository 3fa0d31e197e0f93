"""The context of the HTTP server follows its files, and what a verified certificate calls its owner."""

import ssl
from pathlib import Path

import pytest

from octavo_shared.grpc.certificates import TlsFileError
from scheduler_svc.http.http_tls import HttpTls, certificate_names
from tests.support.certificates import Authority, replace


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_a_renewed_certificate_makes_a_new_context(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("localhost").write(tmp_path)
    tls = HttpTls(files.cert, files.key, None)
    first = tls.context()
    assert tls.context() is first
    assert first.verify_mode is ssl.CERT_NONE
    authority.issue("localhost").write(tmp_path)
    assert tls.context() is not first


def test_a_renewal_that_cannot_be_used_changes_nothing(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue("localhost").write(tmp_path)
    tls = HttpTls(files.cert, files.key, authority.write(tmp_path / "ca.crt"))
    first = tls.context()
    assert first.verify_mode is ssl.CERT_REQUIRED
    replace(files.key, authority.issue("localhost").key)
    assert tls.context() is first
    assert "does not match the first certificate" in caplog.text


def test_files_that_are_wrong_at_the_start_are_an_error(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("localhost").write(tmp_path)
    files.key.unlink()
    with pytest.raises(TlsFileError):
        HttpTls(files.cert, files.key, None)


def test_the_names_of_a_certificate_are_those_that_grpc_has() -> None:
    certificate = {
        "subject": ((("organizationName", "nobody"),), (("commonName", "client"),)),
        "subjectAltName": (("DNS", "client.svc"), ("URI", "spiffe://a/b"), ("email", "x@y"), ("IP Address", "::1")),
    }
    assert certificate_names(certificate) == {"client", "client.svc", "spiffe://a/b"}
    assert certificate_names({}) == frozenset()
