"""A model of a hub, served by the executor and by `octavo up`: real processes, which download it first."""

import asyncio
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import Client, SamplingParams
from tests.numerics.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.hub import Hub, read_repo, running_hub
from tests.support.processes import running_service
from tests.support.tokenizers import byte_level_backend

PORTS = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    tokenizer = byte_level_backend()
    save_tiny_model(tmp_path / "tiny", vocab_size=max(VOCAB_SIZE, tokenizer.get_vocab_size()))
    tokenizer.save(str(tmp_path / "tiny" / "tokenizer.json"))
    with running_hub(tiny=read_repo(tmp_path / "tiny")) as hub:
        for name, value in hub.environ(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.mark.slow
async def test_the_executor_downloads_its_model(hub: Hub) -> None:
    async with running_service("executor_svc", "--model", "org/tiny", "--kv-cache-gib", "0.01") as executor:
        assert executor.process.stdout is not None
        async for line in executor.process.stdout:
            if line.startswith(b"octavo executor serving on"):
                break
        assert hub.downloads("model.safetensors") == [""]


@pytest.mark.slow  # unit/octavo/models has downloads
async def test_up_serves_a_model_of_the_hub_by_its_id_and_downloads_it_once(hub: Hub) -> None:
    command = [sys.executable, "-m", "octavo.cli", "up", "--model", "org/tiny@main", *PORTS, "--kv-cache-gib", "0.01"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        match = re.match(r"serving org/tiny@main on (\S+);", line)
        assert match, line
        async with Client(match[1]) as client:
            model_id = (await client.get_model()).model_id
            output = await client.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True))
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert model_id == "org/tiny@main"
    assert len(output.outputs[0].token_ids) == 4
    assert hub.downloads("model.safetensors") == [""]
