"""TLS of a connection that this process opens: the files are read at that moment."""

import grpc

from octavo.calls.tls import TlsOptions
from octavo_shared.grpc.certificates import PemFile, read_authorities, read_pair


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
