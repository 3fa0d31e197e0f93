"""TLS of the HTTP server: the certificate files of the gRPC server, read again when they change.

gRPC speaks TLS itself and takes its files as they are read; Python's ssl wants a context made of them.
"""

import ssl
from collections.abc import Mapping
from pathlib import Path

from octavo_shared.grpc.certificates import PemFile, TlsFileError, read_authorities, read_pair
from octavo_shared.grpc.watched_files import WatchedFiles
from octavo_shared.process.service_config import ServiceConfig


class HttpTls:
    """Owns the context for handshakes.

    Args:
        cert: The certificate, followed by its chain.
        client_ca: Authorities of client certificates, which are then required; None: clients present none.

    Raises: TlsFileError: a file cannot be used.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        paths = [path for path in (cert, key, client_ca) if path is not None]
        self._files = WatchedFiles("http_certificate", paths, lambda: _context(cert, key, client_ca))

    def context(self) -> ssl.SSLContext:
        """Return the context for the next handshake."""
        return self._files.current()


def http_tls(config: ServiceConfig) -> HttpTls | None:
    """Return the TLS that a service is configured for; None: it speaks plaintext.

    Raises: TlsFileError: a file cannot be used.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    return HttpTls(config.tls_cert, config.tls_key, config.tls_client_ca)


def certificate_names(certificate: Mapping[str, object]) -> frozenset[str]:
    """Return the names of the owner in a verified client certificate: common names, DNS names, URIs.

    Args:
        certificate: As `ssl.SSLSocket.getpeercert` returns it; empty: the client presented none.
    """
    subject = _pairs(certificate.get("subject"), depth=1)
    alternatives = _pairs(certificate.get("subjectAltName"), depth=0)
    common_names = {value for kind, value in subject if kind == "commonName"}
    return frozenset(common_names | {value for kind, value in alternatives if kind in ("DNS", "URI")})


def _pairs(value: object, *, depth: int) -> list[tuple[str, str]]:
    items = list(value) if isinstance(value, tuple) else []
    for _ in range(depth):
        items = [inner for item in items for inner in item]
    return items


def _context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    cert_file, key_file = PemFile("--tls-cert", cert), PemFile("--tls-key", key)
    read_pair(cert_file, key_file)  # its errors are one sentence
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            authorities = read_authorities(PemFile("--tls-client-ca", client_ca))
            context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
            context.verify_mode = ssl.CERT_REQUIRED
            # As gRPC does it: an intermediate authority is enough, its root need not be in the file.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    except OSError as error:  # of ssl too; the files were replaced in the meantime
        raise TlsFileError(f"{cert_file} and {key_file} cannot be used ({error}); write both again") from error
    return context
