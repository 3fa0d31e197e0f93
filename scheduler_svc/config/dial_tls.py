"""TLS of a connection that this process opens: the files as they are when it does."""

import grpc

from octavo.calls.tls import TlsOptions
from octavo_shared.grpc.certificates import PemFile, read_authorities, read_pair


def read_credentials(tls: TlsOptions, flags: str) -> grpc.ChannelCredentials:
    """Read the files and return credentials for one channel.

    Args:
        tls: Names its authority; `octavo` knows connections that trust the system's.
        flags: What the names of the settings begin with, for people.

    Raises: TlsFileError: a file cannot be used.
    """
    assert tls.ca is not None, "the settings require it"
    authorities = read_authorities(PemFile(f"{flags}-ca", tls.ca))
    if tls.cert is None or tls.key is None:
        return grpc.ssl_channel_credentials(authorities)
    pair = read_pair(PemFile(f"{flags}-cert", tls.cert), PemFile(f"{flags}-key", tls.key))
    return grpc.ssl_channel_credentials(authorities, pair.key, pair.cert)
