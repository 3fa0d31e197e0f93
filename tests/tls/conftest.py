"""Authorities and the files of a service and of a client that they vouch for."""

from pathlib import Path

import pytest

from tests.support.certificates import Authority, Pair, PairFiles


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="session")
def other_authority() -> Authority:
    return Authority("another authority")


@pytest.fixture(scope="session")
def server_pair(authority: Authority) -> Pair:
    return authority.issue("localhost", "127.0.0.1")


@pytest.fixture
def ca(authority: Authority, tmp_path: Path) -> Path:
    return authority.write(tmp_path / "ca.crt")


@pytest.fixture
def other_ca(other_authority: Authority, tmp_path: Path) -> Path:
    return other_authority.write(tmp_path / "other-ca.crt")


@pytest.fixture
def server_files(server_pair: Pair, tmp_path: Path) -> PairFiles:
    return server_pair.write(tmp_path / "server")


@pytest.fixture
def client_files(authority: Authority, tmp_path: Path) -> PairFiles:
    return authority.issue(common_name="client").write(tmp_path / "client")
