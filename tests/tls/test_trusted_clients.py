"""Clients whose certificate stands for them, such as a gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from octavo.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from octavo.calls.tls import TlsOptions, channel_credentials
from octavo.client import Client
from octavo.errors import UnauthenticatedError
from tests.support.certificates import Authority, PairFiles
from tests.tls.services import Scheduler, running_scheduler, tls_settings

BLUE = "blue-token-0123456"


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"blue {BLUE}\n")
    return path


@asynccontextmanager
async def mutual(server_files: PairFiles, ca: Path, **settings: object) -> AsyncIterator[Scheduler]:
    async with running_scheduler(**tls_settings(server_files, client_ca=ca), **settings) as scheduler:
        yield scheduler


@pytest.mark.parametrize("trusted", ["gateway", "gateway.octavo.svc", "spiffe://octavo/gateway"])
async def test_a_trusted_client_needs_no_token(
    authority: Authority, server_files: PairFiles, ca: Path, tokens_file: Path, tmp_path: Path, trusted: str
) -> None:
    gateway = authority.issue("gateway.octavo.svc", common_name="gateway", uris=("spiffe://octavo/gateway",)).write(
        tmp_path / "gateway"
    )
    tls = TlsOptions(ca=ca, cert=gateway.cert, key=gateway.key)
    async with mutual(server_files, ca, tokens_file=tokens_file, trusted_clients=(trusted,)) as scheduler:
        async with Client(scheduler.address, tls=tls) as client:
            assert await client.abort("unknown") is False
        async with grpc.aio.secure_channel(scheduler.admin_address, channel_credentials(tls)) as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            await stub.GetSchedulerState(admin_service_pb2.GetSchedulerStateRequest())


@pytest.mark.parametrize("name", ["gateway.example.org", "GATEWAY", "*", "gateway "])
async def test_a_name_that_is_merely_alike_is_not_trusted(
    authority: Authority, server_files: PairFiles, ca: Path, tokens_file: Path, tmp_path: Path, name: str
) -> None:
    pair = authority.issue(common_name=name).write(tmp_path / "alike")
    tls = TlsOptions(ca=ca, cert=pair.cert, key=pair.key)
    async with mutual(server_files, ca, tokens_file=tokens_file, trusted_clients=("gateway",)) as scheduler:
        async with Client(scheduler.address, tls=tls) as client:
            with pytest.raises(UnauthenticatedError):
                await client.abort("unknown")
        async with Client(scheduler.address, tls=tls, token=BLUE) as client:
            assert await client.abort("unknown") is False


async def test_trusted_clients_without_tokens_are_the_only_ones(
    server_files: PairFiles, client_files: PairFiles, ca: Path
) -> None:
    tls = TlsOptions(ca=ca, cert=client_files.cert, key=client_files.key)
    async with (
        mutual(server_files, ca, trusted_clients=("client",)) as scheduler,
        Client(scheduler.address, tls=tls) as client,
    ):
        assert await client.abort("unknown") is False
    async with (
        mutual(server_files, ca, trusted_clients=("gateway",)) as scheduler,
        Client(scheduler.address, tls=tls, token=BLUE) as client,
    ):
        with pytest.raises(UnauthenticatedError) as caught:
            await client.abort("unknown")
    assert str(caught.value) == (
        "only clients listed in --trusted-clients may call this scheduler; use such a client's certificate"
    )
