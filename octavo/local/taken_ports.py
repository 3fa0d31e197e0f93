"""Finds out before a start which ports are taken: most often by another `octavo up`."""

import asyncio
import errno
import http.client
import ipaddress
import socket
from collections.abc import Mapping

import grpc.aio

from octavo.admin_client import AdminClient
from octavo.client import DEFAULT_ADDRESS, Client
from octavo.errors import (
    InvalidRequestError,
    LocalServiceError,
    OctavoError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from octavo.values.status_details import is_from_service

# A scheduler of this machine answers sooner.
_ANSWER_TIMEOUT_S = 3.0
_HTTP_TIMEOUT_S = 0.5


async def check_ports(listen: str, admin_listen: str, http_listens: Mapping[str, str | None]) -> None:
    """Refuse ports of a scheduler that are taken; what else may be wrong with them, the scheduler says.

    Args:
        listen: HOST:PORT for clients; port 0 is never taken.
        admin_listen: HOST:PORT for operators.
        http_listens: HOST:PORT of the ports for HTTP, by flag; None: not served.

    Raises:
        LocalServiceError: a port is taken; says by which program, as far as it answers, and what to do.
    """
    if is_taken(listen):
        if found := await _describe_scheduler(listen):
            flags = "" if listen == DEFAULT_ADDRESS else f" --address {listen}"
            raise LocalServiceError(
                f'{found}; `octavo generate "..."{flags}` uses it, `octavo up --listen 127.0.0.1:0` starts another one'
            )
        raise _taken("--listen", listen)
    if is_taken(admin_listen):
        if found := await _describe_admin_port(admin_listen):
            raise LocalServiceError(f"{found}; `octavo up --admin-listen 127.0.0.1:0` starts another one")
        raise _taken("--admin-listen", admin_listen)
    for flag, address in http_listens.items():
        if address is not None and is_taken(address):
            raise _taken(flag, address)


def _taken(flag: str, address: str) -> LocalServiceError:
    return LocalServiceError(
        f"{flag} {address} is in use by another program; choose another port, or 0 for any free one"
    )


def is_taken(address: str) -> bool:
    """Return whether a program of this machine listens on an address, HOST:PORT; on port 0 none does."""
    host, _, port = address.rpartition(":")
    try:
        [(family, kind, protocol, _, place), *_] = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was served a moment ago is free
            probe.bind(place)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def is_octavos_openai_port(address: str) -> bool:
    """Return whether the program on an address serves OpenAI's API as a scheduler does."""
    connection = http.client.HTTPConnection(_reachable(address), timeout=_HTTP_TIMEOUT_S)
    try:
        connection.request("GET", "/version")
        return connection.getresponse().getheader("Server") == "octavo"
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


async def _describe_scheduler(address: str) -> str | None:
    """Return what serves clients at an address; None: no scheduler does."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S), Client(_reachable(address)) as client:
            model_id = (await client.get_model()).model_id
    except (UnauthenticatedError, PermissionDeniedError):
        return f"octavo is already running on {address} and requires a token"
    except InvalidRequestError:  # we named no model
        return f"octavo is already running on {address} and serves several models"
    except OctavoError as error:
        is_scheduler = isinstance(error.__cause__, grpc.aio.AioRpcError) and is_from_service(error.__cause__)
        return f"octavo is already running on {address}, but its model is still loading" if is_scheduler else None
    except TimeoutError:
        return None
    return f"octavo is already running on {address} and serves {model_id}"


async def _describe_admin_port(address: str) -> str | None:
    """Return what serves operators at an address; None: no scheduler does."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S), AdminClient(_reachable(address)) as client:
            state = await client.get_state()
    except (UnauthenticatedError, PermissionDeniedError):
        return f"octavo is already running with admin address {address}, and requires a token"
    except (OctavoError, TimeoutError):
        return None
    models = sorted({executor.model_id for executor in state.executors} - {""})
    served = f"it serves {', '.join(models)}" if models else "its model is still loading"
    return f"octavo is already running with admin address {address}; {served}"


def _reachable(address: str) -> str:
    """Return where a client of this machine finds what listens on an address, which may be that of all networks."""
    host, _, port = address.rpartition(":")
    try:
        is_all = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:  # a name
        return address
    return f"{'[::1]' if ':' in host else '127.0.0.1'}:{port}" if is_all else address
