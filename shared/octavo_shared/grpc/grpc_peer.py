"""The peer of a call: its certificate's names, and its address."""

from urllib.parse import unquote

from octavo_shared.grpc.interceptor import Context

# The owner's names in a verified client certificate, as gRPC's authentication context calls them.
_NAME_PROPERTIES = ("x509_common_name", "peer_dns", "peer_uri")


def certificate_names(context: Context) -> set[str]:
    """Return the owner's names in the verified client certificate of a call; empty: none was presented."""
    properties = context.auth_context()
    values = [value for name in _NAME_PROPERTIES for value in properties.get(name, ())]
    return {value.decode("utf-8", "replace") for value in values}


def peer_address(context: Context) -> str:
    """Return the address that a call comes from, host:port; empty: a unix socket, so from this machine."""
    scheme, _, address = unquote(context.peer()).partition(":")
    return "" if scheme == "unix" else address
