"""A scheduler with OpenAI's API and fake executors, in this process, called over real HTTP."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from executor_svc.worker.interface import Worker
from tests.support.patience import PATIENCE_S
from tests.support.stack import Stack, running_stack

HELLO = [{"role": "user", "content": "hello"}]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Json:
        parsed: Json = json.loads(self.text)
        return parsed

    @property
    def error(self) -> Json:
        error: Json = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Json]:
        """The JSON objects of a stream that ended in order."""
        lines = self.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@dataclass(frozen=True, slots=True)
class Api:
    """A running one."""

    stack: Stack
    url: str
    session: aiohttp.ClientSession

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    async def send(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, path, **options) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.text())

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.send("GET", path, **options)

    async def complete(self, **fields: Any) -> Answer:
        body = {"model": "fake", "prompt": "hello", **fields}
        return await self.send("POST", "/v1/completions", json=body)

    async def chat(self, **fields: Any) -> Answer:
        return await self.send("POST", "/v1/chat/completions", json={"model": "fake", "messages": HELLO, **fields})


@asynccontextmanager
async def running_api(*workers: Worker | None, **settings: object) -> AsyncIterator[Api]:
    """Run a scheduler with the API on a free port, and an executor for each worker."""
    settings = {"openai_listen": "127.0.0.1:0", **settings}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with running_stack(*workers, **settings) as stack:  # type: ignore[arg-type]
        url = "http://" + stack.service.other_addresses["openai"]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
            yield Api(stack, url, session)
