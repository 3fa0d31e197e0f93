"""Warns of ports that others can reach and that do not ask who calls, and of secrets that others can read."""

import logging
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from octavo.values.address import exposure_warning, local_address_advice
from octavo_shared.process.events import Event, JsonLines

_logger = logging.getLogger(__name__)


def warn_if_others_can_read(flag: str, path: Path) -> None:
    """Say in the log that every user of the machine can read a secret. Its group may: in Kubernetes that is the pod."""
    with suppress(OSError):  # whoever reads it says so
        if path.stat().st_mode & stat.S_IROTH:
            fix = f"chmod o-r {path}"
            _logger.warning(Event("secret_readable_by_others", flag=flag, file=str(path), fix=fix))


def warn_if_exposed(
    service: str, ports: Mapping[str, str], *, is_encrypted: bool, knows_clients: bool, how_to_know_clients: str
) -> None:
    """Say in the log, and as a sentence on stderr, which ports lack protection, and what to do.

    Args:
        service: Name of the service.
        ports: Address of each port, host:port, by the flag that sets it.
        is_encrypted: Whether they speak TLS.
        knows_clients: Whether they take calls of known clients only.
        how_to_know_clients: The advice if they do not, beginning with a verb.
    """
    if is_encrypted and knows_clients:
        return
    for flag, address in ports.items():
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
            if not isinstance(sys.stderr, JsonLines):  # the event has said it to whoever collects logs
                print(warning, file=sys.stderr)
