"""`octavo up` with the demo model: the grpcurl session of the README, typed word for word, and OpenAI's own client."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from octavo import Client, SamplingParams
from octavo.values.outputs import ChatMessage
from tests.support.patience import PATIENCE_S
from tests.support.sessions import Typed, console_sessions, find_grpcurl, is_as_printed

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

README = Path(__file__).parents[2] / "README.md"
QUESTION = "What is the capital of Japan?"
ADDRESS, ADMIN_ADDRESS = "127.0.0.1:50051", "127.0.0.1:50052"


def grpcurl_session() -> list[Typed]:
    sessions = console_sessions(README.read_text(encoding="utf-8"))
    [session] = [session for session in sessions if any(typed.command.startswith("grpcurl ") for typed in session)]
    return session


def octavo(*words: str) -> list[str]:
    return [sys.executable, "-m", "octavo.cli", *words]


@pytest.fixture
def up(demo_model: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `octavo up` with the demo model, which is its default."""
    command = octavo("up", "--listen", "127.0.0.1:0", "--kv-cache-gib", "0.3")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def native_answer(address: str) -> str:
    async with Client(address) as client:
        params = SamplingParams(temperature=0.0, max_tokens=16)
        return (await client.generate([ChatMessage(role="user", content=QUESTION)], params)).outputs[0].text


def check_openai(url: str, native: str) -> None:
    """Ask by OpenAI's client, and by the program of the README; the answer is that of the native one."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        [name] = [model.id for model in client.models.list()]
        answer = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16
        )
    assert answer.choices[0].message.content == native == "The capital of Japan is Tokyo."
    assert answer.choices[0].finish_reason == "stop"
    [program] = re.findall(r"```python\n(import openai\n.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    program = program.replace("http://127.0.0.1:8080/v1", url)
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == native


def test_up_serves_the_sessions_of_the_readme_and_openais_client_until_sigterm_and_leaves_nothing(
    up: subprocess.Popen[str],
) -> None:
    assert up.stdout is not None
    serving = re.match(r"serving smollm2 on (\S+);", up.stdout.readline())
    assert serving, "octavo up did not say where it serves"
    assert up.stdout.readline().startswith("kernels: ")
    operators = re.match(r"operators: http://\S+ \(live page\), octavo top --address (\S+)", up.stdout.readline())
    assert operators, "octavo up did not say where it serves operators"
    assert up.stdout.readline().startswith("try: octavo generate ")
    assert re.match(r"chat page: http://\S+/$", up.stdout.readline())
    http = re.match(r"OpenAI API of smollm2: (\S+)", up.stdout.readline())
    assert http, "octavo up did not say where it serves OpenAI's API"

    session = grpcurl_session()
    assert [Path(shlex.split(typed.command)[0]).name for typed in session] == ["grpcurl"] * 2
    for typed in session:
        words = shlex.split(typed.command.replace(ADDRESS, serving[1]).replace(ADMIN_ADDRESS, operators[1]))
        run = subprocess.run(
            [find_grpcurl(), *words[1:]], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert run.returncode == 0, run.stderr
        assert is_as_printed(typed.output, run.stdout), f"$ {typed.command}\n{run.stdout}"
    generate = octavo("generate", "Hello", "--max-tokens", "4", "--address", serving[1])
    assert subprocess.run(generate, capture_output=True, text=True, check=True).stdout.strip() != ""
    check_openai(http[1], asyncio.run(native_answer(serving[1])))

    children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    up.send_signal(signal.SIGTERM)
    _, stderr = up.communicate(timeout=PATIENCE_S)
    assert up.returncode == 0
    assert re.fullmatch(r"smollm2: needs \S+ GB, \S+ GB free\nstopping\n", stderr)
    assert len(children) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
