"""A target that speaks OpenAI's API: Octavo, vLLM, SGLang, TGI, llama.cpp."""

import asyncio
import contextlib
import json
import os
import re
import time
from dataclasses import replace
from enum import StrEnum
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from octavo.bench.config import BenchError, RequestFailedError
from octavo.bench.openai_stream import SseParser, StreamReader, error_message
from octavo.bench.record import RequestRecord, TargetInfo
from octavo.values.address import is_loopback
from octavo.values.wording import printable

_MAX_MESSAGE_CHARACTERS = 300

# How servers say that they do not know a field.
_UNKNOWN_FIELD = re.compile(r"ignore_eos|extra|unknown|unrecogni[sz]ed|unexpected|not permitted", re.IGNORECASE)

# A connection can be used again when the end of the answer was read, which comes right behind the last event.
_REST_TIMEOUT_S = 0.5


class OpenAIApi(StrEnum):
    """Which of the two streams is asked for."""

    COMPLETIONS = "completions"
    CHAT = "chat"


_PATHS = {OpenAIApi.COMPLETIONS: "completions", OpenAIApi.CHAT: "chat/completions"}


class OpenAITarget:
    """A server at a URL; see `Target`. Use it as `async with OpenAITarget(...) as target`.

    Every request that runs has a connection of its own; connections of requests that ended are used again.

    Args:
        url: Where the API begins, such as http://127.0.0.1:8080/v1.
        api: Which of the two streams.
        api_key: Sent as a bearer token; None: none.
        model: The model's name; None: the first that the server lists.
        temperature: 0: greedy.
        ignore_eos: Ask for outputs of full length, by a field that OpenAI's own servers do not know.
        timeout_s: Longest that one request may take.
    """

    def __init__(
        self,
        url: str,
        *,
        api: OpenAIApi,
        api_key: str | None,
        model: str | None,
        temperature: float,
        ignore_eos: bool,
        timeout_s: float,
    ) -> None:
        self._url = url.rstrip("/")
        self._api = api
        self._headers = {"Accept-Encoding": "identity"}  # compression would hold tokens back
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model
        self._temperature = temperature
        self._ignore_eos = ignore_eos
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def describe(self) -> TargetInfo:
        """Ask for the list of models.

        Raises:
            BenchError: no OpenAI-compatible server answers, or it has no model and none was named.
        """
        try:
            async with self._open_session().get(f"{self._url}/models") as response:
                if response.status == 404 and self._model is not None:
                    return self._info(self._model, None)  # some servers have no list
                models = self._to_models(response.status, response.content_type, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"no OpenAI-compatible server answers at {self._url}: {_reason(error)}") from error
        ids = [model["id"] for model in models]
        model_id = self._model or (ids[0] if ids else None)
        if model_id is None:
            raise BenchError(f"the server at {self._url} lists no model: name one by --model")
        found = next((model for model in models if model["id"] == model_id), {})
        longest, encodes = found.get("max_model_len"), found.get("max_encoder_tokens")
        self._model = model_id
        info = self._info(model_id, longest if isinstance(longest, int) else None)
        return replace(info, max_encoder_tokens=encodes) if isinstance(encodes, int) else info

    async def send(self, record: RequestRecord) -> None:
        """Run one request. Raises RequestFailedError: why there is no complete answer."""
        reader, parser = StreamReader(), SseParser()
        body = self._body(record)
        try:
            async with self._open_session().post(f"{self._url}/{_PATHS[self._api]}", json=body) as response:
                await self._check_response(response)
                async for chunk in response.content.iter_any():
                    if reader.read_all(parser.feed(chunk)):
                        record.ended_s = time.perf_counter()
                        await _read_rest(response)
                        break
        except TimeoutError:
            raise RequestFailedError(f"no complete answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RequestFailedError(_reason(error)) from error
        finally:
            reader.note(record)
        reader.check_complete()

    def _info(self, model_id: str, max_model_len: int | None) -> TargetInfo:
        return TargetInfo(self._api.value, self._url, printable(model_id), max_model_len)

    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use it as `async with OpenAITarget(...) as target`"
        return self._session

    def _body(self, record: RequestRecord) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": record.planned.max_tokens,
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._api is OpenAIApi.CHAT:
            body["messages"] = [{"role": "user", "content": record.planned.prompt}]
        else:
            body["prompt"] = record.planned.prompt
        if (schema := record.planned.json_schema) is not None:
            named = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body

    def _to_models(self, status: int, content_type: str, body: bytes) -> list[dict[str, Any]]:
        if status != 200:
            raise BenchError(f"the server at {self._url} refuses /models: {self._refusal(status, content_type, body)}")
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        models = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(models, list) or not all(
            isinstance(m, dict) and isinstance(m.get("id"), str) for m in models
        ):
            raise BenchError(
                f"the server at {self._url} has no OpenAI-compatible API (/models gives {content_type}); "
                "the URL usually ends in /v1"
            )
        return models

    async def _check_response(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            refusal = self._refusal(response.status, response.content_type, await response.read())
            raise RequestFailedError(refusal)
        if response.content_type != "text/event-stream":
            raise RequestFailedError(f"the server answered with {response.content_type} instead of a stream")

    def _refusal(self, status: int, content_type: str, body: bytes) -> str:
        """Return what an HTTP error says, and what helps."""
        try:
            said = error_message(json.loads(body))
        except ValueError:
            said = f"an answer of type {content_type}"
        said = " ".join(said.split())[:_MAX_MESSAGE_CHARACTERS].rstrip(".")
        match status:
            case 401 | 403:
                fix = "; the key comes from --api-key or OPENAI_API_KEY"
            case 404:
                fix = "; the URL usually ends in /v1, and --model must be a model of the server"
            case 400 | 422 if self._ignore_eos and _UNKNOWN_FIELD.search(said):
                fix = "; a server that does not know ignore_eos needs --no-ignore-eos"
            case _:
                fix = ""
        return f"HTTP {status}: {said}{fix}"


def check_url(url: str, api_key: str | None, *, is_key_explicit: bool) -> None:
    """Refuse what cannot be asked, and a key from the environment that others could read on its way.

    Raises:
        ValueError: with a sentence.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{url!r} is not a URL of an API, such as http://127.0.0.1:8080/v1")
    if api_key is not None and not is_key_explicit and parts.scheme == "http" and not is_loopback(f"{host}:{port}"):
        raise ValueError(
            f"the key in OPENAI_API_KEY would travel to {host} unencrypted: "
            "use https, unset it, or give it by --api-key"
        )


async def _read_rest(response: aiohttp.ClientResponse) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REST_TIMEOUT_S):
            await response.read()


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted ({getattr(error.certificate_error, 'verify_message', error)})"
    if isinstance(error, aiohttp.ClientSSLError):
        return "the server does not speak TLS, or no version that we know; is it http://?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else "no such host"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the server does not speak HTTP"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionError):
        return "the connection broke before the answer was complete"
    return " ".join(str(error).split()) or type(error).__name__
