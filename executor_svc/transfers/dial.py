"""Channels to other executors, with the TLS of this one: its certificate shows who calls, and says who may answer.

With `--tls-cert` an executor presents its own certificate and checks the other's with the authorities of
`--tls-client-ca`, else with the system's. A peer that is dialled by an IP address has to have the first DNS name of the
own certificate, as certificates that executors share do.
"""

import ipaddress

import grpc
import grpc.aio

from octavo_shared.grpc.certificates import PemFile, first_dns_name, read_authorities, read_pair
from octavo_shared.process.service_config import ServiceConfig

_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 10_000)]


class Dialler:
    """Opens channels as an executor is configured.

    Args:
        config: Of this executor.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config

    def __call__(self, address: str) -> grpc.aio.Channel:
        """Return a channel; the files are read now. Raises TlsFileError: one cannot be used."""
        config = self._config
        if config.tls_cert is None or config.tls_key is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        pair = read_pair(PemFile("--tls-cert", config.tls_cert), PemFile("--tls-key", config.tls_key))
        ca = config.tls_client_ca
        authorities = None if ca is None else read_authorities(PemFile("--tls-client-ca", ca))
        name = first_dns_name(pair) if _is_ip(address) else None
        options = [] if name is None else [("grpc.ssl_target_name_override", name)]
        credentials = grpc.ssl_channel_credentials(authorities, pair.key, pair.cert)
        return grpc.aio.secure_channel(address, credentials, options=[*_OPTIONS, *options])


def _is_ip(address: str) -> bool:
    try:
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True


def reachable_address(configured: str, bound: str) -> str:
    """Return the transfer address of an executor: as configured, or as it listens.

    Args:
        configured: `--transfer-address`; empty: not set.
        bound: host:port. With a host that stands for all addresses only the port is told.
    """
    host, _, port = bound.rpartition(":")
    return configured or (f":{port}" if host.strip("[]") in ("0.0.0.0", "::", "*") else bound)
