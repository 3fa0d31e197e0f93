"""Opens the addresses of an HTTP port as gRPC opens its own."""

import errno
import ipaddress
import socket
from collections.abc import Callable
from functools import partial

from octavo_shared.errors import AddressError

_BACKLOG = 1024

# This machine does not have the address, for lack of IPv6 for example.
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def open_listeners(listen: str, flag: str, *, is_shared: bool = False) -> list[socket.socket]:
    """Return sockets that listen on every address of a name, all on one port; only one socket may listen on an address.

    Args:
        listen: host:port. A wildcard of either family stands for both; port 0 takes a free one.
        flag: The setting that has the address, for errors.
        is_shared: Whether our other processes listen there too, so that the kernel deals connections to all.

    Raises: AddressError: an address is taken, or this machine has none of them.
    """
    return _open_all(listen, flag, partial(_listener, is_shared=is_shared))


def reserve(listen: str, flag: str) -> list[socket.socket]:
    """Return sockets that keep every address of a name for our processes, which share it; none of them listens.

    Raises: AddressError: another process listens on one, or this machine has none of them.
    """
    return _open_all(listen, flag, _reserved)


def is_free(listen: str) -> bool:
    """Return whether no process listens at an address, as far as this machine has it."""
    return not _is_taken(listen, _reserved)


def is_shared_by_others(listen: str) -> bool:
    """Return whether processes of this user listen at an address and share it, as fronts do."""
    return not is_free(listen) and not _is_taken(listen, _shared)


def _is_taken(listen: str, open_one: Callable[[socket.AddressFamily, str, int], socket.socket]) -> bool:
    try:
        opened = _open_all(listen, "", open_one)
    except AddressError as error:
        return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
    for each in opened:
        each.close()
    return False


def _open_all(
    listen: str, flag: str, open_one: Callable[[socket.AddressFamily, str, int], socket.socket]
) -> list[socket.socket]:
    """Open every address of a name, all on one port. Raises AddressError."""
    host, _, port_text = listen.rpartition(":")
    listeners: list[socket.socket] = []
    trouble: OSError | None = None
    try:
        for family, address in _addresses(host.strip("[]")):
            port = listeners[0].getsockname()[1] if listeners else int(port_text)
            try:
                listeners.append(open_one(family, address, port))
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise
                trouble = error
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise AddressError(flag, listen) from error
    if not listeners:
        raise AddressError(flag, listen) from trouble
    return listeners


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    if _is_wildcard(host):
        return [(socket.AF_INET6, "::")] if socket.has_dualstack_ipv6() else [(socket.AF_INET, "0.0.0.0")]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # The scope of a link-local address is missing here, but the host's name has it.
    return list(dict.fromkeys((family, host if "%" in host else str(address[0])) for family, *_, address in found))


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _listener(family: socket.AddressFamily, address: str, port: int, *, is_shared: bool) -> socket.socket:
    is_dual = family is socket.AF_INET6 and address == "::"
    listener = socket.create_server(
        (address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual, reuse_port=is_shared
    )
    listener.setblocking(False)
    return listener


def _reserved(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    with _unbound(family, address) as alone:  # refused if another socket is bound there
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind((address, port))
        port = alone.getsockname()[1]
    return _shared(family, address, port)


def _shared(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    shared = _unbound(family, address)
    try:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind((address, port))
    except OSError:
        shared.close()
        raise
    return shared


def _unbound(family: socket.AddressFamily, address: str) -> socket.socket:
    unbound = socket.socket(family, socket.SOCK_STREAM)
    if family is socket.AF_INET6:
        unbound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
    return unbound
