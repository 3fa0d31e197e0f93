"""The HTTP side of the operators' port, whose server is made when the first connection comes."""

import asyncio
import socket
import threading
from typing import Any, cast

import pytest

from scheduler_svc.admin.http.forwarded_client_cert import ForwardedClientCert
from scheduler_svc.admin.http.json_transcoder import JsonTranscoder
from scheduler_svc.admin.listener import admin_port
from tests.support.patience import PATIENCE_S


async def test_a_connection_that_waits_for_the_server_is_closed_when_the_port_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def import_slowly() -> Any:
        begun.set()
        goes_on.wait(PATIENCE_S)

    monkeypatch.setattr(admin_port, "_http_server", import_slowly)
    side = admin_port._HttpSide(cast("JsonTranscoder", None), "/", ForwardedClientCert(()), None, asks_for_tokens=False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serving = asyncio.create_task(side.serve(ours, "somebody", over_tls=False))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert ours.fileno() == -1
        goes_on.set()
    await side.stop(0.0)
