"""Certificates for tests: authorities that sign, and the PEM files that services and clients read."""

import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM."""

    cert: bytes
    key: bytes

    def write(self, directory: Path) -> "PairFiles":
        """Write both files into a directory and return their paths; each file is replaced at once."""
        directory.mkdir(parents=True, exist_ok=True)
        files = PairFiles(directory / "tls.crt", directory / "tls.key")
        replace(files.key, self.key)
        replace(files.cert, self.cert)
        return files


@dataclass(frozen=True, slots=True)
class PairFiles:
    """Where a certificate and its key are."""

    cert: Path
    key: Path


_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """A certificate authority with a certificate of its own."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(name)
        self._cert = (
            _builder(self._name, self._name, self._key.public_key(), (-DAY, DAY))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_SIGNS_CERTIFICATES, critical=True)  # this and the next two: Python 3.13 insists (RFC 5280)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        """The certificate of the authority."""
        return self._cert.public_bytes(serialization.Encoding.PEM)

    def write(self, path: Path) -> Path:
        """Write the certificate of the authority to a file and return its path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, self.pem)
        return path

    def issue(
        self,
        *names: str,
        common_name: str = "octavo test",
        validity: tuple[timedelta, timedelta] = (-DAY, DAY),
        uris: tuple[str, ...] = (),
    ) -> Pair:
        """Return a new certificate and its key, for servers and clients.

        Args:
            names: DNS names and IP addresses of the subject.
            common_name: Of the subject.
            validity: Begin and end, from now on.
            uris: More names of the subject, such as SPIFFE ids.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_common_name(common_name), self._name, key.public_key(), validity).add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
        )
        alternatives = [*map(_general_name, names), *map(x509.UniformResourceIdentifier, uris)]
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        cert = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False).sign(self._key, hashes.SHA256())
        return Pair(
            cert.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )


def replace(path: Path, content: bytes) -> None:
    """Give a file new content at once, as the tools do that renew certificates."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    os.replace(beside, path)


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, validity: tuple[timedelta, timedelta]
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + validity[0])
        .not_valid_after(now + validity[1])
    )
