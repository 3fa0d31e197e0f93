"""What keeps other web sites from using the port through an operator's browser.

- A foreign page may send a form, but no application/json, without asking first (a CORS preflight), which is never
  answered here.
- A foreign name may be made to resolve to this machine (DNS rebinding). Then the browser takes the foreign page for
  ours, but sends the foreign name in Host. Where a token or TLS is required as well, any name is accepted.
"""

import ipaddress
import re
from collections.abc import Sequence

# RFC 9110, section 7.2: a host and maybe a port.
_HOST = re.compile(r"(?P<host>\[[^\[\]]+\]|[^:\[\]]+)(:\d*)?")


def is_local_host(hosts: Sequence[str]) -> bool:
    """Return whether the Host of a request cannot be a name that an attacker resolves to this machine.

    That is an IP address, localhost, or a name below it (RFC 6761, section 6.3).

    Args:
        hosts: The values of the header; more or fewer than one is never local.
    """
    match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if match is None:
        return False
    host = match["host"].lower()
    if host.removesuffix(".") == "localhost" or host.removesuffix(".").endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def is_cross_site(fetch_site: str | None) -> bool:
    """Return whether a browser says that another site makes a call.

    Args:
        fetch_site: The value of Sec-Fetch-Site (W3C Fetch Metadata); None: not a browser, or it does not say.
    """
    return fetch_site not in (None, "same-origin", "none")
