"""The channels to one port of a scheduler, for clients and operators: how they are opened, what their errors mean.

Several addresses are several ways to the same answers: calls go to one of them until no scheduler answers there.
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import grpc
import grpc.aio

from octavo.calls.tls import TlsOptions, channel_credentials, handshake_trouble, is_closed_at_once
from octavo.errors import (
    ClosedError,
    ConnectionOptionsError,
    LostTooOftenError,
    NotConnectedError,
    OctavoError,
    TlsHandshakeError,
    UnavailableError,
    from_rpc_error,
)
from octavo.values.address import is_loopback, target_trouble
from octavo.values.status_details import is_from_service

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    # The scheduler sets the limit for prompts; these keep a broken peer from filling our memory, and leave room for
    # the last message of a long output with log-probabilities, and for a map of blocks.
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A client is a connection: several of them reach several fronts of a scheduler.
    ("grpc.use_local_subchannel_pool", 1),
    # A scheduler is a neighbour: a web proxy in the environment must not come between.
    ("grpc.enable_http_proxy", 0),
    # A restarted scheduler is found at once, where gRPC would wait up to 120 s; an attempt without an answer ends after
    # 5 s, not 20.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 5000),
)


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """An address, and the channel to it."""

    address: str
    channel: grpc.aio.Channel


def is_elsewhere_better(error: OctavoError) -> bool:
    """Return whether another address, or the same one later, may serve what ended with this error."""
    return isinstance(error, UnavailableError) and not isinstance(error, LostTooOftenError | TlsHandshakeError)


class SchedulerChannel:
    """A channel with its token; use it as `async with`. It belongs to the event loop in which it is opened.

    Args:
        address: HOST:PORT of the scheduler, or any gRPC target; or several of them.
        tls: How to speak TLS; None: plaintext. The files are read when the channel is opened.
        token: Identifies the caller to a scheduler with --tokens-file; over plaintext it goes to this machine only.

    Raises:
        ConnectionOptionsError: an address is none, or the token cannot be sent; when the channel is opened, also: a
            file cannot be used.
    """

    channel_options: ClassVar[tuple[tuple[str, int], ...]] = ()

    def __init__(
        self, address: str | Sequence[str], *, tls: TlsOptions | None = None, token: str | None = None
    ) -> None:
        self.addresses = (address,) if isinstance(address, str) else tuple(dict.fromkeys(address))
        if not self.addresses:
            raise ConnectionOptionsError("no address given; give HOST:PORT of a scheduler, or of several")
        self._tls = tls
        self._metadata: tuple[tuple[str, str], ...] = ()
        for each in self.addresses:
            if trouble := target_trouble(each):
                raise ConnectionOptionsError(f"the address {trouble}")
            if token is not None:
                self._metadata = token_metadata(each, token, is_encrypted=tls is not None)
        self._endpoints: list[Endpoint] = []  # empty: it is not open
        self._current = 0  # the index of the endpoint that calls go to
        self._answering: set[Endpoint] = set()  # endpoints that have answered a call
        self._pid = os.getpid()  # the process that opened it

    @property
    def address(self) -> str:
        """Where calls go now."""
        return self.addresses[self._current]

    async def __aenter__(self) -> Self:
        self._endpoints = [Endpoint(address, self._dial(address)) for address in self.addresses]
        self._pid = os.getpid()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what still runs and close the channels; closing twice is fine."""
        endpoints, self._endpoints = self._endpoints, []
        for endpoint in endpoints:
            await endpoint.channel.close()

    def _dial(self, address: str) -> grpc.aio.Channel:
        """Return a channel; it connects with its first call."""
        options: list[tuple[str, int | str]] = [*_COMMON_OPTIONS, *self.channel_options]
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        options += self._tls.channel_options
        return grpc.aio.secure_channel(address, channel_credentials(self._tls), options=options)

    def _endpoint(self) -> Endpoint:
        name = type(self).__name__
        if os.getpid() != self._pid:  # gRPC's threads stayed behind, and a call would wait for ever
            raise ClosedError(f"this {name} belongs to the process that made it; make one after the fork")
        if not self._endpoints:
            raise ClosedError(f"the client is not open; use it as `async with {name}(address) as client`")
        return self._endpoints[self._current]

    def _all_endpoints(self) -> list[Endpoint]:
        """Return all endpoints, the one in use first."""
        self._endpoint()
        return [*self._endpoints[self._current :], *self._endpoints[: self._current]]

    def _untried(self, tried: Collection[Endpoint]) -> Endpoint | None:
        """Return the endpoint in use, or the first one behind it that was not tried; None: all were."""
        return next((endpoint for endpoint in self._all_endpoints() if endpoint not in tried), None)

    def _move_on(self, endpoint: Endpoint) -> None:
        """Let calls go to the next address: no scheduler answers here. Of many failed calls only the first moves."""
        if self._endpoints and self._endpoints[self._current] is endpoint:
            self._current = (self._current + 1) % len(self._endpoints)

    def _go_to(self, endpoint: Endpoint) -> None:
        self._current = self._endpoints.index(endpoint)

    def _failed(self, error: grpc.aio.AioRpcError, endpoint: Endpoint) -> OctavoError:
        """Return what a call ended with as an error of the tree; later calls go elsewhere if that is better."""
        ours = self._to_octavo_error(error, endpoint)
        if is_elsewhere_better(ours):
            self._move_on(endpoint)
        if is_from_service(error):
            self._answering.add(endpoint)
        elif isinstance(ours, UnavailableError):
            ours.goes_away = endpoint in self._answering
        return ours

    def _to_octavo_error(self, error: grpc.aio.AioRpcError, endpoint: Endpoint) -> OctavoError:
        """Add what only the channel knows: whether UNAVAILABLE is the scheduler's word or its absence."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE or is_from_service(error):
            return from_rpc_error(error)
        details = error.details() or ""
        # One that answered before does not mind how we speak: it, or what stands behind it, goes away.
        is_leaving = endpoint in self._answering and is_closed_at_once(details)
        if not is_leaving and (trouble := handshake_trouble(details, self._tls)):
            return TlsHandshakeError(endpoint.address, trouble)
        if "Failed parsing HTTP/2" in details:
            return self._not_grpc(endpoint)
        state = endpoint.channel.get_state() if self._endpoints else None
        # A channel that could not connect may be at its next attempt already; then only gRPC's text tells.
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE or "failed to connect" in details:
            return NotConnectedError(endpoint.address)
        return UnavailableError(f"the connection to the scheduler at {endpoint.address} was lost")

    def _not_grpc(self, endpoint: Endpoint) -> OctavoError:
        """Return what is said of a port where gRPC is not spoken."""
        return UnavailableError(
            f"the server at {endpoint.address} does not speak gRPC: it may be a port for HTTP; give the scheduler's "
            "--listen, by default 127.0.0.1:50051"
        )


# The token that names the caller to a scheduler --------------------------------------------------


def token_metadata(address: str, token: str, *, is_encrypted: bool) -> tuple[tuple[str, str], ...]:
    """Return what carries a token in each call to HOST:PORT.

    Raises: ConnectionOptionsError: others could read it on its way, or it is no token.
    """
    if not is_encrypted and not is_loopback(address):
        raise ConnectionOptionsError(
            f"the token would be sent to {address} in plaintext; use TLS (--tls-ca or --tls), or send no token"
        )
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ConnectionOptionsError("the token must be one word of ASCII characters, without spaces")
    return (("authorization", f"Bearer {token}"),)


def read_token(path: Path) -> str:
    """Return the token in a file, without the white space around it.

    Raises: ConnectionOptionsError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConnectionOptionsError(f"--token-file {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConnectionOptionsError(f"--token-file {path} is not a text file with a token") from error
