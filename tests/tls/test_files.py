"""What is wrong with a file of TLS is said at the start, in one sentence with the setting, the file and the fix."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from executor_svc.config import FakeConfig
from octavo.calls.tls import TlsOptions, channel_credentials
from octavo.errors import ConnectionOptionsError
from octavo_shared.grpc.certificates import PemFile, TlsFileError, read_authorities, read_pair
from octavo_shared.process.config import ConfigError, load_config
from scheduler_svc.config.scheduler_config import SchedulerConfig
from tests.support.certificates import DAY, HOUR, Authority, Pair, PairFiles
from tests.support.each_row import each_row
from tests.tls.services import server_tls


def complaint(pair: PairFiles, client_ca: Path | None = None) -> str:
    with pytest.raises(TlsFileError) as caught:
        server_tls(pair, client_ca)
    return str(caught.value)


def encrypted_key() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )


def test_a_missing_file_is_named(server_files: PairFiles) -> None:
    server_files.cert.unlink()

    assert complaint(server_files) == (
        f"--tls-cert {server_files.cert} cannot be read (No such file or directory); give a PEM file that this process "
        "may read"
    )


def test_a_directory_is_no_file(server_files: PairFiles) -> None:
    server_files.key.unlink()
    server_files.key.mkdir()

    assert complaint(server_files).startswith(f"--tls-key {server_files.key} cannot be read (Is a directory)")


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"-----BEGIN CERTIFICATE-----\nhalf"], ids=["empty", "text", "half"]
)
def test_what_is_no_certificate_is_refused(server_files: PairFiles, content: bytes) -> None:
    server_files.cert.write_bytes(content)

    assert complaint(server_files) == (
        f"--tls-cert {server_files.cert} contains no certificate in PEM format; it must begin with "
        "-----BEGIN CERTIFICATE-----"
    )


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\nhalf"], ids=["empty", "half"])
def test_what_is_no_key_is_refused(server_files: PairFiles, content: bytes) -> None:
    server_files.key.write_bytes(content)

    assert complaint(server_files) == (
        f"--tls-key {server_files.key} contains no private key in PEM format; it must begin with "
        "-----BEGIN PRIVATE KEY-----"
    )


def test_an_encrypted_key_is_refused(server_files: PairFiles) -> None:
    server_files.key.write_bytes(encrypted_key())

    assert complaint(server_files) == (
        f"--tls-key {server_files.key} is encrypted; give a private key without a passphrase (openssl pkey can write "
        "one)"
    )


def test_a_key_of_another_certificate_is_refused(authority: Authority, server_files: PairFiles) -> None:
    server_files.key.write_bytes(authority.issue("localhost").key)

    assert complaint(server_files) == (
        f"--tls-key {server_files.key} does not match the first certificate in --tls-cert {server_files.cert}; give "
        "that certificate's key"
    )


@pytest.mark.parametrize("key", [ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256K1())])
def test_a_key_that_grpc_cannot_use_is_refused(
    key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey, server_files: PairFiles
) -> None:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    server_files.key.write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    assert complaint(server_files) == (
        f"--tls-key {server_files.key} is a key type that gRPC cannot use; use RSA or a NIST curve (P-256)"
    )


def test_an_expired_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("localhost", validity=(-DAY, -HOUR)).write(tmp_path)

    text = complaint(files)

    assert text.startswith(f"--tls-cert {files.cert} expired at 20")
    assert text.endswith(" UTC; renew the certificate")


def test_a_certificate_of_the_future_is_refused(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("localhost", validity=(HOUR, DAY)).write(tmp_path)

    text = complaint(files)

    assert text.startswith(f"--tls-cert {files.cert} is not valid before 20")
    assert text.endswith(" UTC; check this machine's clock")


def test_authorities_that_are_none_are_refused(server_files: PairFiles, tmp_path: Path) -> None:
    (tmp_path / "ca").write_bytes(b"nothing")

    assert complaint(server_files, tmp_path / "ca").startswith(
        f"--tls-client-ca {tmp_path / 'ca'} contains no certificate in PEM format"
    )


def test_one_valid_authority_among_expired_ones_is_enough(
    authority: Authority, other_authority: Authority, tmp_path: Path
) -> None:
    expired = other_authority.issue("old", validity=(-2 * DAY, -DAY)).cert
    file = PemFile("--tls-client-ca", tmp_path / "ca")
    file.path.write_bytes(expired + authority.pem)
    assert read_authorities(file) == expired + authority.pem

    file.path.write_bytes(expired)
    with pytest.raises(TlsFileError, match="expired at"):
        read_authorities(file)


def test_a_chain_behind_the_certificate_is_fine(authority: Authority, server_pair: Pair, tmp_path: Path) -> None:
    files = Pair(server_pair.cert + authority.pem, server_pair.key).write(tmp_path)

    pair = read_pair(PemFile("--tls-cert", files.cert), PemFile("--tls-key", files.key))

    assert pair.cert == server_pair.cert + authority.pem


RULES = [
    (["--tls-cert", "c"], "--tls-cert and --tls-key must be set together: a certificate and its private key"),
    (["--tls-key", "k"], "--tls-cert and --tls-key must be set together: a certificate and its private key"),
    (
        ["--tls-client-ca", "ca"],
        ("--tls-client-ca requires --tls-cert and --tls-key: without TLS clients present no certificate"),
    ),
]
SCHEDULER_RULES = [
    (
        ["--trusted-clients", "gateway"],
        ("--trusted-clients requires --tls-client-ca: without it clients present no certificate"),
    ),
    (
        ["--executor-tls-ca", "ca", "--executor-tls-cert", "c"],
        "--executor-tls-cert and --executor-tls-key must be set together: a certificate and its private key",
    ),
    (
        ["--executor-tls-server-name", "executor"],
        "--executor-tls-cert and --executor-tls-server-name require --executor-tls-ca: without it the scheduler uses "
        "plaintext to its executors",
    ),
]


@each_row(*RULES)
def test_rules_of_every_service(flags: list[str], sentence: str) -> None:
    for config_class in (SchedulerConfig, FakeConfig):
        with pytest.raises(ConfigError) as caught:
            load_config(config_class, flags, {})
        assert caught.value.mistakes == (sentence,)


@each_row(*SCHEDULER_RULES)
def test_rules_of_the_scheduler(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SchedulerConfig, flags, {})
    assert caught.value.mistakes == (sentence,)


# A client has no package for certificates, and checks with Python's own.


def client_complaint(ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> str:
    with pytest.raises(ConnectionOptionsError) as caught:
        channel_credentials(TlsOptions(ca, cert, key))
    return str(caught.value)


def test_a_client_names_the_file_too(ca: Path, client_files: PairFiles, tmp_path: Path) -> None:
    missing, nonsense = tmp_path / "missing", tmp_path / "nonsense"
    nonsense.write_bytes(b"nothing")
    pem = "it must begin with -----BEGIN CERTIFICATE-----"

    assert [
        client_complaint(ca=missing),
        client_complaint(ca=nonsense),
        client_complaint(ca=ca, cert=client_files.cert),
        client_complaint(ca=ca, cert=client_files.cert, key=missing),
    ] == [
        f"--tls-ca {missing} cannot be read (No such file or directory); give an existing PEM file",
        f"--tls-ca {nonsense} contains no certificate in PEM format; {pem}",
        "--tls-cert and --tls-key must be set together: a certificate and its private key",
        f"--tls-key {missing} cannot be read (No such file or directory); give an existing PEM file",
    ]


def test_a_client_compares_key_and_certificate(
    server_files: PairFiles, client_files: PairFiles, tmp_path: Path
) -> None:
    assert client_complaint(cert=client_files.cert, key=server_files.key) == (
        f"--tls-key {server_files.key} does not match the first certificate in --tls-cert {client_files.cert}; give "
        "that certificate's key"
    )
    (tmp_path / "encrypted").write_bytes(encrypted_key())
    assert client_complaint(cert=client_files.cert, key=tmp_path / "encrypted") == (
        f"--tls-cert {client_files.cert} and --tls-key {tmp_path / 'encrypted'} must be a certificate and its private "
        "key without a passphrase, both in PEM format"
    )
