"""The channel to one port of a scheduler, for clients and operators alike: how it is opened, what its errors mean."""

from collections.abc import Sequence
from typing import ClassVar, Self

import grpc
import grpc.aio

from octavo.address import target_trouble
from octavo.bearer_token import token_metadata
from octavo.errors import (
    ClosedError,
    ConnectionOptionsError,
    NotConnectedError,
    OctavoError,
    TlsHandshakeError,
    UnavailableError,
    from_rpc_error,
)
from octavo.status_details import is_from_service
from octavo.tls import TlsOptions, channel_credentials, handshake_trouble

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
    # One that was restarted is found at once, where gRPC would wait up to 120 s; an attempt that nobody answers is
    # given up after 5 s, not 20.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 5000),
)


class SchedulerChannel:
    """A channel with its token; use it as `async with`. It belongs to the event loop in which it is opened.

    Args:
        address: HOST:PORT of the scheduler, or any gRPC target; or several, of which one is used until it fails.
        tls: How to speak TLS; None: plaintext. The files are read when the channel is opened.
        token: Who we are, for a scheduler with --tokens-file; over plaintext it goes to this machine only.

    Raises:
        ConnectionOptionsError: the address is none, or the token cannot be sent; when the channel is opened, also: a
            file cannot be used.
    """

    channel_options: ClassVar[tuple[tuple[str, int], ...]] = ()

    def __init__(
        self, address: str | Sequence[str], *, tls: TlsOptions | None = None, token: str | None = None
    ) -> None:
        self.addresses = (address,) if isinstance(address, str) else tuple(address)
        if not self.addresses:
            raise ConnectionOptionsError("there is no address; give one or more")
        self._metadata: tuple[tuple[str, str], ...] = ()
        for one in self.addresses:
            if trouble := target_trouble(one):
                raise ConnectionOptionsError(f"the address {trouble}")
            if token is not None:
                self._metadata = token_metadata(one, token, is_encrypted=tls is not None)
        self._tls = tls
        self._place = 0  # of the address that is used
        self._channels: tuple[grpc.aio.Channel, ...] = ()  # of all; one that is not used has no connection

    @property
    def address(self) -> str:
        """The address that is used."""
        return self.addresses[self._place]

    async def __aenter__(self) -> Self:
        options: list[tuple[str, int | str]] = [*_COMMON_OPTIONS, *self.channel_options]
        if self._tls is None:
            self._channels = tuple(grpc.aio.insecure_channel(one, options=options) for one in self.addresses)
        else:
            options += self._tls.channel_options
            credentials = channel_credentials(self._tls)
            self._channels = tuple(grpc.aio.secure_channel(one, credentials, options=options) for one in self.addresses)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what still runs and close the channel; closing twice is fine."""
        channels, self._channels = self._channels, ()
        for channel in channels:
            await channel.close()

    def _open_channel(self) -> grpc.aio.Channel:
        if not self._channels:
            name = type(self).__name__
            raise ClosedError(f"the client is not open; use it as `async with {name}(address) as client`")
        return self._channels[self._place]

    def _move_on(self, failed: str) -> None:
        """Use the next address, unless another call has moved on already from the one that failed."""
        if failed == self.address:
            self._place = (self._place + 1) % len(self.addresses)

    def _to_octavo_error(self, error: grpc.aio.AioRpcError) -> OctavoError:
        """Add what only the channel knows: whether UNAVAILABLE is the scheduler's word or its absence."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE or is_from_service(error):
            return from_rpc_error(error)
        if trouble := handshake_trouble(error.details() or "", self._tls):
            return TlsHandshakeError(self.address, trouble)
        state = self._channels[self._place].get_state() if self._channels else None
        # A channel that could not connect may be at its next attempt already; then only gRPC's text tells.
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE or "failed to connect" in (error.details() or ""):
            return NotConnectedError(self.address)
        return UnavailableError(f"the connection to the scheduler at {self.address} was lost")
