"""A small OpenAI-compatible server for tests: streams what the prompt asks for, in pieces cut anywhere."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class OpenAIServer:
    """Answers with `max_tokens` words.

    Attributes:
        refusal: HTTP status and body of every answer to a request for tokens; None: they are answered.
        models: What /models lists; None: it is a page of HTML.
        events: What a stream says instead of words.
        key: The key that is wanted; None: any.
        chunk_bytes: Streams come in pieces of so many bytes.
        knows_ignore_eos: Whether the field is taken.
        breaks: Whether connections break in the middle of a stream.
        lingers: Whether a stream stays open after its last event, until the server ends.
    """

    refusal: tuple[int, str, str] | None = None
    models: list[dict[str, Any]] | None = field(default_factory=lambda: [{"id": "small"}, {"id": "large"}])
    events: list[str] | None = None
    key: str | None = None
    chunk_bytes: int = 7
    knows_ignore_eos: bool = True
    breaks: bool = False
    lingers: bool = False
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    end: asyncio.Event = field(default_factory=asyncio.Event)

    async def list_models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if self.models is None:
            return web.Response(text="<html>hello</html>", content_type="text/html")
        return web.json_response({"data": self.models})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refusal is not None:
            status, content_type, text = self.refusal
            return web.Response(status=status, text=text, content_type=content_type)
        if "ignore_eos" in body and not self.knows_ignore_eos:
            message = "Unrecognized request argument supplied: ignore_eos"
            return web.json_response({"error": {"message": message}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        is_chat = request.path.endswith("chat/completions")
        events = self.events if self.events is not None else self._events(body, is_chat=is_chat)
        stream = b": welcome\n\n" + b"".join(f"data: {event}\r\n\r\n".encode() for event in events)
        for begin in range(0, len(stream), self.chunk_bytes):
            await response.write(stream[begin : begin + self.chunk_bytes])
            await asyncio.sleep(0)
            if self.breaks and begin > len(stream) // 2 and request.transport is not None:
                request.transport.abort()
                break
        if self.lingers:
            await self.end.wait()
        return response

    def _events(self, body: dict[str, Any], *, is_chat: bool) -> list[str]:
        num_tokens = body["max_tokens"]
        num_prompt_tokens = len((body["messages"][0]["content"] if is_chat else body["prompt"]).split())
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
        word: dict[str, Any] = {"delta": {"content": " wörd"}} if is_chat else {"text": " wörd"}
        choices = [dict(word) for _ in range(num_tokens)]
        if is_chat:
            choices.insert(0, {"delta": {"role": "assistant", "content": ""}})
        choices[-1]["finish_reason"] = "length"
        last = json.dumps({"choices": [], "usage": usage})
        return [*(json.dumps({"choices": [choice]}) for choice in choices), last, "[DONE]"]


@asynccontextmanager
async def openai_server(**fields: Any) -> AsyncIterator[OpenAIServer]:
    """Serve on a free port of this machine."""
    server = OpenAIServer(**fields)
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/completions", server.generate)
    app.router.add_post("/v1/chat/completions", server.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        server.end.set()
        await runner.cleanup()
