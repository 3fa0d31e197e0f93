"""What is wrong with an address, in words: gRPC would only say that nobody answers there."""


def target_trouble(target: str) -> str | None:
    """Return what is wrong with the address of a scheduler; None: nothing, or it is another target of gRPC's."""
    if target.startswith(("http://", "https://")):
        return f"{target!r} is not HOST:PORT; leave out {target.partition('//')[0]}//"
    if "/" in target or target.startswith("unix"):
        return None
    return port_trouble(target, least_port=1)


def port_trouble(address: str, *, least_port: int) -> str | None:
    """Return what is wrong with HOST:PORT; None: nothing."""
    host, _, port = address.rpartition(":")
    if host and port.isascii() and port.isdigit() and least_port <= int(port) <= 65535:
        return None
    return f"{address!r} is not HOST:PORT with a port from {least_port} to 65535"
