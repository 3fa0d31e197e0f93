"""Says which ports without TLS others than this machine can reach; those of the services are in shared/exposure.py."""

from octavo.loopback import is_loopback


def exposure_warning(name: str, flag: str, address: str) -> str | None:
    """Return one sentence about a port that speaks no TLS; None: only this machine reaches it.

    Args:
        name: What serves there, for people.
        flag: The flag that sets the address.
        address: HOST:PORT.
    """
    if is_loopback(address):
        return None
    return (
        f"octavo: warning: the {name} at {flag} {address} speaks no TLS and does not ask who calls: "
        "anybody who reaches it may use it, and anybody on the way can read along; "
        f"set {flag} to an address of this machine only, such as 127.0.0.1"
    )
