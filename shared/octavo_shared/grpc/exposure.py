"""Warns of ports that other machines can reach without authentication, and of secrets that other users can read."""

import logging
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from octavo.values.address import exposure_warning, local_address_advice
from octavo_shared.process.events import Event, JsonLines

_logger = logging.getLogger(__name__)

ASK_CLIENTS = "set --tokens-file to ask for tokens, or --tls-client-ca to demand client certificates"


def warn_if_others_can_read(flag: str, path: Path) -> None:
    """Log that every user of the machine can read a secret. Its group may: in Kubernetes that is the pod."""
    with suppress(OSError):  # the reader of the file reports it
        if path.stat().st_mode & stat.S_IROTH:
            fix = f"chmod o-r {path}"
            _logger.warning(Event("secret_readable_by_others", flag=flag, file=str(path), fix=fix))


def warn_if_exposed(
    service: str,
    ports: Mapping[str, str | None],
    *,
    is_encrypted: bool,
    knows_clients: bool,
    how_to_know_clients: str = ASK_CLIENTS,
) -> None:
    """Log, and print as a sentence on stderr, which ports lack protection, and what to do.

    Args:
        service: Name of the service.
        ports: Address of each port, host:port, by the flag that sets it; None: it is not opened.
        is_encrypted: Whether the ports speak TLS.
        knows_clients: Whether the ports take calls of known clients only.
        how_to_know_clients: The advice if not, beginning with a verb.
    """
    if is_encrypted and knows_clients:
        return
    for flag, address in ports.items():
        if address is None:
            continue
        if is_encrypted:
            event = "listens_without_authentication"
            lack = "has no authentication: anyone who can reach it can use it"
            advice = how_to_know_clients
        else:
            event = "listens_without_tls"
            lack = "does not use TLS: anyone on the network path can read and change the traffic"
            advice = f"set --tls-cert and --tls-key, or {local_address_advice(flag)}"
        if warning := exposure_warning(service, flag, address, lack=lack, advice=advice):
            _logger.warning(Event(event, flag=flag, address=address, advice=advice))
            if not isinstance(sys.stderr, JsonLines):  # the event has told log collectors
                print(warning, file=sys.stderr)
