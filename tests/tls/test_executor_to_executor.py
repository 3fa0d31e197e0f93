"""Executors send each other blocks over mutual TLS, each with its own certificate, or not at all."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from executor_svc.config import FakeConfig
from executor_svc.fake.worker import FakeWorker
from tests.support.certificates import Authority, PairFiles
from tests.support.transfer_executors import TransferExecutor
from tests.tls.services import tls_settings


@asynccontextmanager
async def executor(files: PairFiles, client_ca: Path) -> AsyncIterator[TransferExecutor]:
    config = FakeConfig.model_validate(tls_settings(files, client_ca))
    async with TransferExecutor(FakeWorker(max_transfers=1), config) as started:
        yield started


@pytest.mark.parametrize("name", ["octavo-executor", "127.0.0.1"])
async def test_executors_with_one_name_or_with_their_addresses_know_each_other(
    name: str, authority: Authority, ca: Path, tmp_path: Path
) -> None:
    files = [authority.issue(name).write(tmp_path / place) for place in ("one", "other")]
    async with executor(files[0], ca) as one, executor(files[1], ca) as other:
        await other.receive([4, 5])
        await one.send(other, [1, 2])
        assert (await one.end(), await other.end()) == ("sent", "arrived")


@pytest.mark.parametrize("stranger", ["another authority", "another name"])
async def test_blocks_go_to_no_stranger(
    stranger: str, authority: Authority, other_authority: Authority, ca: Path, tmp_path: Path
) -> None:
    issuer = other_authority if stranger == "another authority" else authority
    strange_ca = issuer.write(tmp_path / "strange-ca.crt")
    strange = issuer.issue("octavo-executor" if issuer is other_authority else "elsewhere").write(tmp_path / "strange")
    own = authority.issue("octavo-executor").write(tmp_path / "own")
    async with executor(own, ca) as one, executor(strange, strange_ca) as other:
        await one.send(other, [1, 2])
        assert await one.end() == "cancelled"
