"""Reads and checks PEM files: certificates, private keys, authorities. Errors are one sentence with the fix.

gRPC itself takes any bytes and later refuses every connection, without saying why. cryptography is imported only once
there is a file to read, so that a start without TLS is fast. Read next: `octavo_shared/grpc/tls.py`.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.exposure import warn_if_others_can_read

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

_NIST_CURVES = ("secp256r1", "secp384r1", "secp521r1")


class TlsFileError(OctavoServiceError):
    """A file of TLS cannot be used; the message names the setting, the file and the fix."""


@dataclass(frozen=True, slots=True)
class PemFile:
    """A file, and the flag that names it."""

    flag: str
    path: Path

    def read(self) -> bytes:
        """Return the content. Raises TlsFileError: the file cannot be read."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise TlsFileError(
                f"{self} cannot be read ({error.strerror}); give a PEM file that this process may read"
            ) from error

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A certificate with its chain and its private key, checked.

    Attributes:
        cert: PEM, the service's certificate first.
        key: PEM.
        not_after_s: When the service's certificate expires, in seconds of Unix time.
    """

    cert: bytes
    key: bytes
    not_after_s: float


def read_pair(cert_file: PemFile, key_file: PemFile) -> CertificatePair:
    """Read a certificate and its key.

    Raises: TlsFileError: a file is unreadable or no PEM, they do not belong together, or the
        certificate is not valid now.
    """
    cert, key = cert_file.read(), key_file.read()
    warn_if_others_can_read(key_file.flag, key_file.path)
    own = _certificates(cert_file, cert)[0]
    _check_key(key_file, key, cert_file, own)
    _check_validity(cert_file, own)
    return CertificatePair(cert, key, own.not_valid_after_utc.timestamp())


def first_dns_name(pair: CertificatePair) -> str | None:
    """Return the first DNS name of a service's certificate; None: it has none."""
    from cryptography.x509 import DNSName, ExtensionNotFound, SubjectAlternativeName, load_pem_x509_certificates

    try:
        names = load_pem_x509_certificates(pair.cert)[0].extensions.get_extension_for_class(SubjectAlternativeName)
    except ExtensionNotFound:
        return None
    return next(iter(names.value.get_values_for_type(DNSName)), None)


def read_authorities(ca_file: PemFile) -> bytes:
    """Read the certificates of authorities; return them as PEM.

    Raises: TlsFileError: the file is unreadable or no PEM, or none of them is valid now.
    """
    content = ca_file.read()
    certificates = _certificates(ca_file, content)
    now = datetime.now(UTC)
    if not any(one.not_valid_before_utc <= now <= one.not_valid_after_utc for one in certificates):
        _check_validity(ca_file, certificates[0])
    return content


def _certificates(file: PemFile, content: bytes) -> "list[Certificate]":
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(content)
    except ValueError as error:
        raise TlsFileError(
            f"{file} contains no certificate in PEM format; it must begin with -----BEGIN CERTIFICATE-----"
        ) from error


def _check_key(key_file: PemFile, content: bytes, cert_file: PemFile, own: "Certificate") -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(content, password=None)
    except TypeError as error:
        raise TlsFileError(
            f"{key_file} is encrypted; give a private key without a passphrase (openssl pkey can write one)"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsFileError(
            f"{key_file} contains no private key in PEM format; it must begin with -----BEGIN PRIVATE KEY-----"
        ) from error
    is_nist = isinstance(key, EllipticCurvePrivateKey) and key.curve.name in _NIST_CURVES
    if not (is_nist or isinstance(key, RSAPrivateKey)):
        raise TlsFileError(f"{key_file} is a key type that gRPC cannot use; use RSA or a NIST curve (P-256)")
    if key.public_key() != own.public_key():
        raise TlsFileError(
            f"{key_file} does not match the first certificate in {cert_file}; give that certificate's key"
        )


def _check_validity(file: PemFile, certificate: "Certificate") -> None:
    now = datetime.now(UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise TlsFileError(f"{file} expired at {end:%Y-%m-%d %H:%M:%S} UTC; renew the certificate")
    if now < begin:
        raise TlsFileError(f"{file} is not valid before {begin:%Y-%m-%d %H:%M:%S} UTC; check this machine's clock")
