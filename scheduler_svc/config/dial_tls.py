"""TLS of a connection that this process opens: the files are read at that moment."""

from collections.abc import Sequence

import grpc

from octavo.calls.tls import TlsOptions
from octavo_shared.grpc.certificates import PemFile, read_authorities, read_pair
from octavo_shared.grpc.membership import host_of_name
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig

# The beginnings of the names of the settings.
EXECUTOR_FLAGS, ENGINE_FLAGS = "--executor-tls", "--engine-tls"


def executor_tls(config: SchedulerConfig) -> TlsOptions | None:
    """Return how to speak TLS with executors; None: plaintext."""
    ca, server_name = config.executor_tls_ca, config.executor_tls_server_name
    return None if ca is None else TlsOptions(ca, config.executor_tls_cert, config.executor_tls_key, server_name)


def engine_tls(config: FrontConfig, targets: Sequence[str]) -> TlsOptions | None:
    """Return how to speak TLS with the engines at these addresses; None: plaintext."""
    ca, server_name = config.engine_tls_ca, config.engine_tls_server_name or host_of_name(targets)
    return None if ca is None else TlsOptions(ca, config.engine_tls_cert, config.engine_tls_key, server_name)


def read_credentials(tls: TlsOptions, flags: str) -> grpc.ChannelCredentials:
    """Read the files and return credentials for one channel.

    Args:
        tls: The files, with an authority; `octavo` has connections that trust the system's authorities.
        flags: The prefix of the settings' names, for errors.

    Raises: TlsFileError: a file cannot be used.
    """
    assert tls.ca is not None, "the settings require it"
    authorities = read_authorities(PemFile(f"{flags}-ca", tls.ca))
    if tls.cert is None or tls.key is None:
        return grpc.ssl_channel_credentials(authorities)
    pair = read_pair(PemFile(f"{flags}-cert", tls.cert), PemFile(f"{flags}-key", tls.key))
    return grpc.ssl_channel_credentials(authorities, pair.key, pair.cert)
