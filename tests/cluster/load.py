"""Streams of known answers, from a pod: each answer is compared to the bit, and leaves a line of JSON on stdout.

    python load.py GRPC_ADDRESS HTTP_URL NUM_STREAMS [FOLDER TOKEN]

With a folder, which has ca.crt, tls.crt and tls.key, by TLS.
Three kinds of clients take turns among the streams: octavo.Client, a plain gRPC channel, and openai's client. Runs
until SIGTERM. It is a file of its own: the pod has it from a ConfigMap.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from octavo.calls.tls import TlsOptions, channel_credentials, client_context
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.generation.v1.generation_service_pb2_grpc import GenerationServiceStub
from octavo.values.outputs import Delta

PROMPTS = [
    "The capital of Japan is",
    "Once upon a time",
    "Water boils when",
    "A prime number is",
    "Dear Sir,",
    "1, 2, 3,",
]
NUM_TOKENS = 48
SAMPLING = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 7})

Case = tuple[str, dict[str, Any]]
CASES: list[Case] = list(itertools.product(PROMPTS, SAMPLING))


async def by_octavo(client: Client, case: Case) -> AsyncIterator[str]:
    """Yield the texts of an answer, from octavo.Client."""
    async for event in client.stream(case[0], max_tokens=NUM_TOKENS, **case[1]):
        if isinstance(event, Delta):
            yield event.text


async def by_grpc(stub: Any, token: str | None, case: Case) -> AsyncIterator[str]:
    """Yield the texts of an answer, from a plain channel, which sends nothing twice."""
    request = pb.GenerateRequest(
        text=case[0], sampling_params=generation_pb2.SamplingParams(max_tokens=NUM_TOKENS, **case[1])
    )
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    async for message in stub.Generate(request, metadata=metadata):
        if message.HasField("delta"):
            yield message.delta.text


async def by_openai(client: AsyncOpenAI, case: Case) -> AsyncIterator[str]:
    """Yield the texts of an answer, from openai's client as it comes."""
    model = (await client.models.list()).data[0].id
    answer = await client.completions.create(model=model, prompt=case[0], max_tokens=NUM_TOKENS, stream=True, **case[1])
    async for chunk in answer:
        yield chunk.choices[0].text if chunk.choices else ""


async def run(kind: str, texts: AsyncIterator[str], expected: str) -> None:
    """Read an answer to its end and print what became of it."""
    began_s = last_s = time.time()
    pause_s, text, error = 0.0, "", ""
    try:
        async for part in texts:
            now_s = time.time()
            pause_s, last_s = max(pause_s, now_s - last_s), now_s
            text += part
    except (OctavoError, grpc.aio.AioRpcError, OpenAIError) as failure:
        error = (
            f"{type(failure).__name__}: {failure.details() if isinstance(failure, grpc.aio.AioRpcError) else failure}"
        )
        await asyncio.sleep(0.1)  # a plain client that is refused at once asks again at once
    ended_s = time.time()
    line = {"kind": kind, "began_s": began_s, "ended_s": ended_s, "pause_s": max(pause_s, ended_s - last_s)}
    print(json.dumps({**line, "error": error, "wrong": "" if error or text == expected else text}), flush=True)


class Door:
    """How to reach the Services, as each kind of client is told it."""

    def __init__(self, address: str, url: str, folder: Path | None = None, token: str | None = None) -> None:
        self._address, self._url, self.token = address, url, token
        self._tls = None if folder is None else TlsOptions(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")

    def octavo(self) -> Client:
        """Return a client of ours."""
        return Client(self._address, tls=self._tls, token=self.token)

    def grpc(self) -> grpc.aio.Channel:
        """Return a plain channel."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self._tls is None:
            return grpc.aio.insecure_channel(self._address, options=options)
        return grpc.aio.secure_channel(self._address, channel_credentials(self._tls), options=options)

    def openai(self) -> AsyncOpenAI:
        """Return OpenAI's client."""
        context = True if self._tls is None else client_context(self._tls)
        client = DefaultAsyncHttpxClient(verify=context)
        return AsyncOpenAI(base_url=self._url, api_key=self.token or "none", http_client=client)


async def main(door: Door, num_streams: int) -> None:
    """Learn the answers while nothing is broken, then run the streams."""
    async with door.octavo() as client:
        await client.wait_until_ready(60)
        answers = {
            index: (await client.generate(case[0], max_tokens=NUM_TOKENS, **case[1])).outputs[0].text
            for index, case in enumerate(CASES)
        }
    print(json.dumps({"kind": "answers", "began_s": time.time(), "num": len(answers)}), flush=True)

    async def stream(number: int) -> None:
        async with door.octavo() as client, door.grpc() as channel, door.openai() as openai:
            stub = GenerationServiceStub(channel)
            for index in itertools.count(number):
                case, expected = CASES[index % len(CASES)], answers[index % len(CASES)]
                kind = ("octavo", "grpc", "openai")[number % 3]
                texts = {
                    "octavo": by_octavo(client, case),
                    "grpc": by_grpc(stub, door.token, case),
                    "openai": by_openai(openai, case),
                }
                await run(kind, texts[kind], expected)

    async with asyncio.TaskGroup() as group:
        for number in range(num_streams):
            group.create_task(stream(number))


if __name__ == "__main__":
    shown = (Path(sys.argv[4]), sys.argv[5]) if len(sys.argv) > 4 else ()
    asyncio.run(main(Door(sys.argv[1], sys.argv[2], *shown), int(sys.argv[3])))
