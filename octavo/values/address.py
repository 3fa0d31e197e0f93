"""HOST:PORT as text: whether it is an address, whether only this machine can reach it, and the warning if not."""

import ipaddress
import re

# What gRPC allows before the host: dns:[//authority]/name, ipv4:address, ipv6:address.
_SCHEME = re.compile(r"^(dns:(///?)?|ipv4:|ipv6:)")

_LACKS_TLS_AND_IDENTITY = (
    "uses neither TLS nor authentication: anyone who can reach it can use it, and anyone on the network path can read "
    "the traffic"
)


def target_trouble(target: str) -> str | None:
    """Return what is wrong with the address of a scheduler; None: nothing, or it is another target of gRPC's.

    gRPC would only say that nothing answers there.
    """
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


def is_loopback(address: str) -> bool:
    """Return whether nothing but this machine can reach HOST:PORT, or what gRPC accepts beside it.

    Names other than localhost count as elsewhere: what they stand for can change.
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = _SCHEME.sub("", address).rpartition(":")[0].strip("[]")
    if host.lower() == "localhost":
        return True
    try:
        parsed = ipaddress.ip_address(host)
        mapped = getattr(parsed, "ipv4_mapped", None)  # which Python looks at from 3.13 on
        return (mapped or parsed).is_loopback
    except ValueError:
        return False


def exposure_warning(
    name: str, flag: str, address: str, *, lack: str = _LACKS_TLS_AND_IDENTITY, advice: str | None = None
) -> str | None:
    """Return one sentence about a port that is not protected; None: only this machine reaches it.

    Args:
        name: What serves there, for people.
        flag: The flag that sets the address.
        address: HOST:PORT.
        lack: What the port does not do, and what follows from that.
        advice: What to do, beginning with a verb; None: listen on this machine only.
    """
    if is_loopback(address):
        return None
    advice = advice or f"set {local_address_advice(flag)}"
    return f"octavo: warning: the {name} at {flag} {address} {lack}; {advice}"


def local_address_advice(flag: str) -> str:
    """Return how to let only this machine reach a port, as the end of the sentence "set ..."."""
    return f"{flag} to a loopback address, such as 127.0.0.1"
