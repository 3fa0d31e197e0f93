"""TLS of the scheduler's side of the hop to its executors."""

import grpc

from octavo.tls import TlsOptions
from scheduler_svc.config import SchedulerConfig
from shared.certificates import PemFile, read_authorities, read_pair

# What the names of its settings begin with.
FLAGS = "--executor-tls"


def executor_tls(config: SchedulerConfig) -> TlsOptions | None:
    """Return how to speak TLS with executors; None: plaintext."""
    if config.executor_tls_ca is None:
        return None
    return TlsOptions(
        ca=config.executor_tls_ca,
        cert=config.executor_tls_cert,
        key=config.executor_tls_key,
        server_name=config.executor_tls_server_name,
    )


def read_credentials(tls: TlsOptions) -> grpc.ChannelCredentials:
    """Read the files as they are now and return credentials for one channel.

    Raises: TlsFileError: a file cannot be used.
    """
    assert tls.ca is not None, "the settings demand it"
    authorities = read_authorities(PemFile(f"{FLAGS}-ca", tls.ca))
    if tls.cert is None or tls.key is None:
        return grpc.ssl_channel_credentials(authorities)
    pair = read_pair(PemFile(f"{FLAGS}-cert", tls.cert), PemFile(f"{FLAGS}-key", tls.key))
    return grpc.ssl_channel_credentials(authorities, pair.key, pair.cert)
