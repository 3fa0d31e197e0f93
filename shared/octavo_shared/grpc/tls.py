"""A service's side of TLS: credentials whose files are read again when they change.

gRPC asks for the certificate at every handshake, so new connections get a renewed one, and running streams
go on. Read next: `certificates.py` for the checks, `watched_files.py` for the renewal.
"""

from dataclasses import dataclass

import grpc

from octavo_shared.grpc.certificates import CertificatePair, PemFile, read_authorities, read_pair
from octavo_shared.grpc.watched_files import WatchedFiles
from octavo_shared.process.service_config import ServiceConfig


@dataclass(frozen=True, slots=True)
class _Certificates:
    pair: CertificatePair
    client_authorities: bytes | None  # PEM

    def to_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.pair.key, self.pair.cert)], self.client_authorities)


class ServerTls:
    """The certificate that a service presents, and the authorities of client certificates.

    Args:
        cert: The certificate, followed by its chain.
        client_ca: Authorities of client certificates; None: clients present none.

    Raises: TlsFileError: a file cannot be used.
    """

    def __init__(self, cert: PemFile, key: PemFile, client_ca: PemFile | None) -> None:
        def load() -> _Certificates:
            authorities = None if client_ca is None else read_authorities(client_ca)
            return _Certificates(read_pair(cert, key), authorities)

        paths = [file.path for file in (cert, key, client_ca) if file is not None]
        self._files = WatchedFiles("server_certificate", paths, load)
        self._demands_client_certificate = client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one port: each port must be told of a renewal."""
        shown = self._files.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            latest = self._files.current()
            if latest is shown:
                return None  # gRPC's word for "as before"
            shown = latest
            return latest.to_grpc()

        return grpc.dynamic_ssl_server_credentials(
            shown.to_grpc(),
            renewed,  # type: ignore[arg-type]  # the stub does not know None
            require_client_authentication=self._demands_client_certificate,
        )

    @property
    def not_after_s(self) -> float:
        """When the certificate of the next handshake expires, in seconds of Unix time."""
        return self._files.current().pair.not_after_s


def server_tls(config: ServiceConfig) -> ServerTls | None:
    """Return the TLS that a service is configured for; None: it speaks plaintext.

    Raises: TlsFileError: a file cannot be used.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    client_ca = None if config.tls_client_ca is None else PemFile("--tls-client-ca", config.tls_client_ca)
    return ServerTls(PemFile("--tls-cert", config.tls_cert), PemFile("--tls-key", config.tls_key), client_ca)
