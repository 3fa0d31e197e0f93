"""Tokens, tenants, TLS and traces at the port of OpenAI's API."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.certificates import Authority, PairFiles
from tests.support.patience import PATIENCE_S
from tests.tls.services import Scheduler, running_pair, tls_settings

BLUE, OPERATOR = "blue-token-0123456", "operator-token-012"
BODY = {"model": "fake", "prompt": "a", "max_tokens": 1}


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"blue {BLUE}\n* {OPERATOR}\n")
    return path


@asynccontextmanager
async def client_of(scheduler: Scheduler, tls: ssl.SSLContext | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{scheduler.service.other_addresses['openai']}"
    connector = aiohttp.TCPConnector(ssl=tls or True)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        yield session


async def call(session: aiohttp.ClientSession, method: str, path: str, token: str | None) -> tuple[int, Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    body = BODY if method == "POST" else None
    async with session.request(method, path, json=body, headers=headers) as response:
        answer = await response.json() if response.content_type == "application/json" else None
        return response.status, answer


async def test_tokens_are_tenants_and_operators_see_more(tokens_file: Path) -> None:
    paths = {"/health": "GET", "/version": "GET", "/metrics": "GET", "/v1/models": "GET", "/v1/completions": "POST"}
    statuses = {}
    async with (
        running_pair(tokens_file=tokens_file, openai_listen="127.0.0.1:0") as scheduler,
        client_of(scheduler) as session,
    ):
        for name, token in {"none": None, "wrong": "x" * 20, "blue": BLUE, "operator": OPERATOR}.items():
            statuses[name] = [(await call(session, method, path, token))[0] for path, method in paths.items()]
        _, missing = await call(session, "POST", "/v1/completions", None)
        tenants = [ended.tenant for ended in scheduler.service.engine.ended.values()]
    assert statuses == {
        "none": [200, 200, 401, 401, 401],
        "wrong": [200, 200, 401, 401, 401],
        "blue": [200, 200, 403, 200, 200],
        "operator": [200, 200, 200, 200, 200],
    }
    assert tenants == ["blue", ""]
    assert missing["error"] == {
        "message": "a bearer token is required; send the header Authorization: Bearer TOKEN (openai: api_key), "
        "or x-api-key: TOKEN",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


async def test_health_says_nothing_of_the_inside(tokens_file: Path) -> None:
    async with (
        running_pair(tokens_file=tokens_file, openai_listen="127.0.0.1:0") as scheduler,
        client_of(scheduler) as session,
    ):
        await scheduler.service.engine.start_draining()
        status, answer = await call(session, "GET", "/health", None)
    assert (status, answer["error"]["message"]) == (503, "the scheduler is draining; retry in a moment")


async def test_the_port_speaks_tls_with_the_certificate_as_it_is_now(
    authority: Authority, server_files: PairFiles, ca: Path, tmp_path: Path
) -> None:
    settings = tls_settings(server_files)
    async with running_pair(**settings, openai_listen="127.0.0.1:0") as scheduler:
        shown = []
        for _ in range(2):
            context = ssl.create_default_context(cafile=ca)
            async with client_of(scheduler, context) as session, session.post("/v1/completions", json=BODY) as response:
                assert response.status == 200
            shown.append(await asyncio.to_thread(certificate, scheduler))
            authority.issue("127.0.0.1", "localhost").write(tmp_path / "server")
        async with client_of(scheduler) as session:
            status, answer = await call(session, "POST", "/v1/completions", None)
    assert shown[0] != shown[1]
    assert (status, answer["error"]["message"]) == (400, "this port uses TLS; call it with https://")


def certificate(scheduler: Scheduler) -> str:
    host, _, port = scheduler.service.other_addresses["openai"].rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


async def test_a_trusted_client_needs_no_token(
    authority: Authority, server_files: PairFiles, ca: Path, tokens_file: Path, tmp_path: Path
) -> None:
    settings = tls_settings(server_files, client_ca=ca) | {"tokens_file": tokens_file, "trusted_clients": ("gateway",)}
    statuses = []
    async with running_pair(**settings, openai_listen="127.0.0.1:0") as scheduler:
        for name in ("gateway", "other"):
            pair = authority.issue(common_name=name).write(tmp_path / name)
            context = ssl.create_default_context(cafile=ca)
            context.load_cert_chain(pair.cert, pair.key)
            async with client_of(scheduler, context) as session:
                statuses.append((await call(session, "GET", "/metrics", None))[0])
    assert statuses == [200, 401]
