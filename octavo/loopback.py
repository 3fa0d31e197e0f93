"""Whether an address is on this machine only, as far as its text tells."""

import ipaddress
import re

# What gRPC allows before the host: dns:[//authority]/name, ipv4:address, ipv6:address.
_SCHEME = re.compile(r"^(dns:(///?)?|ipv4:|ipv6:)")


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
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
