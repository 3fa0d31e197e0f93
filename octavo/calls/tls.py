"""TLS of the side that dials: what to trust, what to show, and what a failed handshake means.

Python's own `ssl` checks the files before gRPC gets them: gRPC takes any bytes and refuses to connect later,
without saying why.
"""

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from octavo.errors import ConnectionOptionsError


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How to speak TLS with a service; without any of these, the service has a certificate of a public authority.

    Attributes:
        ca: PEM file with the authorities that the service's certificate may come from; None: the system's.
        cert: PEM file with a client certificate, for services that demand one; needs `key`.
        key: PEM file with its private key, without a passphrase.
        server_name: The name in the service's certificate, if it is not the dialled one.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    @property
    def channel_options(self) -> list[tuple[str, str]]:
        """The options of a gRPC channel that go with it."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def channel_credentials(options: TlsOptions) -> grpc.ChannelCredentials:
    """Read the files and return credentials for a channel.

    Raises: ConnectionOptionsError: a file cannot be used; names the option, the file and the fix.
    """
    client_context(options)
    return grpc.ssl_channel_credentials(
        None if options.ca is None else _read("--tls-ca", options.ca),
        None if options.key is None else _read("--tls-key", options.key),
        None if options.cert is None else _read("--tls-cert", options.cert),
    )


def client_context(options: TlsOptions) -> ssl.SSLContext:
    """Read the files and return what Python's own TLS needs of them; `server_name` is the caller's to use.

    Raises: ConnectionOptionsError: as above.
    """
    if (options.cert is None) != (options.key is None):
        raise ConnectionOptionsError("--tls-cert and --tls-key must be set together: a certificate and its private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if options.ca is None:
        context.load_default_certs()
    else:
        _load_authorities(context, options.ca)
    if options.cert is not None and options.key is not None:
        _load_pair(context, options.cert, options.key)
    return context


def is_closed_at_once(details: str) -> bool:
    """Return whether a connection was closed before it could be used, by what gRPC says of the failed call."""
    return "failed to connect" in details and re.search("Socket closed|Connection reset", details) is not None


def handshake_trouble(
    details: str, tls: TlsOptions | None, flags: str = "--tls", authority_flag: str = "--tls-client-ca"
) -> str | None:
    """Say what is wrong, and the fix, if a connection failed because of TLS; None: it failed otherwise.

    What the other side finds wrong it does not tell: it closes the connection.

    Args:
        details: What gRPC says of the failed call.
        tls: How this side tried to speak TLS; None: it spoke plaintext.
        flags: What the names of this side's settings begin with.
        authority_flag: The setting of the other side that names the authorities of certificates like ours.
    """
    if "failed to connect" not in details:
        return None
    is_closed = is_closed_at_once(details)
    if tls is None:
        if is_closed:
            return f"it closed the connection at once; if it uses TLS, name its certificate authority with {flags}-ca"
        return None
    if "Hostname Verification Check failed" in details:
        name = "used to connect" if tls.server_name is None else tls.server_name
        return (
            f"its certificate is not valid for the name {name}; give a name from the certificate with "
            f"{flags}-server-name"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not use TLS; start it with --tls-cert and --tls-key, or connect without TLS"
    if verification := re.search(r"CERTIFICATE_VERIFY_FAILED: ([^:]*)", details):
        return _verification_trouble(verification[1], tls, flags)
    if "handshake" in details.lower():
        return f"the TLS handshake failed ({details.rpartition('last error: ')[2]})"
    if not is_closed:
        return None
    if tls.cert is None:
        return (
            "it closed the connection after the TLS handshake; if it requires a client certificate, name one with "
            f"{flags}-cert and {flags}-key"
        )
    return (
        f"it closed the connection after the TLS handshake; it may have rejected the client certificate {tls.cert}, "
        f"which must be valid and signed by an authority in its {authority_flag}"
    )


def _verification_trouble(reason: str, tls: TlsOptions, flags: str) -> str:
    if "expired" in reason:
        return "its certificate has expired; renew it there"
    if "not yet valid" in reason:
        return "its certificate is not valid yet; check the clocks of both machines"
    if "issuer" in reason or "self" in reason:
        authorities = "that this system knows" if tls.ca is None else f"in {tls.ca}"
        return f"its certificate is not signed by an authority {authorities}; name its authority with {flags}-ca"
    return f"its certificate is refused ({reason})"


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise ConnectionOptionsError(
            f"--tls-ca {path} contains no certificate in PEM format; it must begin with -----BEGIN CERTIFICATE-----"
        ) from error
    except OSError as error:
        raise _unreadable("--tls-ca", path, error) from error


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    _read("--tls-cert", cert)  # the errors of load_cert_chain do not say which file it is
    _read("--tls-key", key)
    try:
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConnectionOptionsError(
                f"--tls-key {key} does not match the first certificate in --tls-cert {cert}; give that certificate's "
                "key"
            ) from error
        raise ConnectionOptionsError(
            f"--tls-cert {cert} and --tls-key {key} must be a certificate and its private key without a passphrase, "
            "both in PEM format"
        ) from error


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(flag, path, error) from error


def _unreadable(flag: str, path: Path, error: OSError) -> ConnectionOptionsError:
    return ConnectionOptionsError(f"{flag} {path} cannot be read ({error.strerror}); give an existing PEM file")
