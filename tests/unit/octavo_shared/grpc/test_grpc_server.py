"""The gRPC port towards peers that only hold a connection."""

import asyncio
import socket

import pytest

from octavo_shared.grpc import grpc_server
from octavo_shared.grpc.grpc_server import GrpcServer
from tests.support.patience import PATIENCE_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", PREFACE[:5], PREFACE], ids=["nothing", "a part", "no settings"])
async def test_a_connection_that_says_nothing_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_TIMEOUT_MS", 50)
    server = GrpcServer(listen="127.0.0.1:0", max_message_bytes=2**20, service_names=())
    host, _, port = (await server.start()).rpartition(":")

    def hold() -> None:
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(sent)
            while connection.recv(4096):
                pass

    await asyncio.to_thread(hold)
    await server.stop(0)
