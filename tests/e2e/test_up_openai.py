"""`octavo up` with the demo model: from nothing to an answer by OpenAI's own client."""

import asyncio
import re
import signal
import sys
import time
from pathlib import Path

import openai
import pytest

from octavo import Client, SamplingParams
from octavo.outputs import ChatMessage

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

QUESTION = "What is the capital of France?"
UP = (
    "up",
    "--listen",
    "127.0.0.1:0",
    "--admin-listen",
    "127.0.0.1:0",
    "--openai-listen",
    "127.0.0.1:0",
    "--kv-cache-gib",
    "0.3",
    "--served-model-name",
    "my/assistant",
)

# About 12 s on 2 cores, most of it the executor's start; several times that under load.
LONGEST_START_S = 120.0


async def printed(stdout: asyncio.StreamReader, pattern: str) -> str:
    """Return what the first group of a pattern finds in the lines that come."""
    while line := (await stdout.readline()).decode():
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError(f"octavo up ended before it printed {pattern!r}")


async def test_a_chat_gets_a_sensible_answer_beside_the_native_client(demo_model: Path) -> None:
    started_at_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "octavo.cli", *UP, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        address = await printed(process.stdout, r"^serving my/assistant on (\S+);")
        url = await printed(process.stdout, r"^OpenAI API of my/assistant: (\S+)")
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            names = [model.id async for model in client.models.list()]
            answer = await client.chat.completions.create(
                model=names[0], messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16
            )
        start_s = time.monotonic() - started_at_s
        async with Client(address) as octavo_client:
            params = SamplingParams(temperature=0.0, max_tokens=16)
            expected = await octavo_client.generate([ChatMessage(role="user", content=QUESTION)], params)
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert names == ["my/assistant"]
    assert answer.choices[0].message.content == expected.outputs[0].text == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert start_s < LONGEST_START_S
    print(f"{start_s:.1f} s from the start to the first answer")
