"""Who is at the other end of a call, as gRPC has it."""

from urllib.parse import unquote

from octavo_shared.grpc.interceptor import Context

# What a verified client certificate calls its owner, in the names of gRPC's authentication context.
_NAME_PROPERTIES = ("x509_common_name", "peer_dns", "peer_uri")


def certificate_names(context: Context) -> set[str]:
    """Return what the verified client certificate of a call calls its owner; empty: none was shown."""
    properties = context.auth_context()
    values = [value for name in _NAME_PROPERTIES for value in properties.get(name, ())]
    return {value.decode("utf-8", "replace") for value in values}


def peer_address(context: Context) -> str:
    """Return from where a call comes, host:port; empty: by a unix socket, so from this machine."""
    scheme, _, address = unquote(context.peer()).partition(":")
    return "" if scheme == "unix" else address
