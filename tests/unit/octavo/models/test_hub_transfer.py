"""A model is pulled from a hub on loopback, whatever cuts the pull off, and is found by what serves it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGMLQuantizationType as FileType
from huggingface_hub import constants
from rich.filesize import decimal

from octavo.commands.command_line import run
from octavo.errors import LocalServiceError
from octavo.models.hub_transfer import pull_hub_model
from octavo.models.names import resolve_model
from octavo.models.progress import ignore_progress
from octavo_shared.errors import ModelLoadError
from tests.support.gguf_files import write_small_gguf
from tests.support.hub import Hub, Repo, running_hub, use_hub

CHUNK_BYTES = 1 << 14
# 16 chunks, of which the first one is the header.
_DESCRIPTION = {"w": {"dtype": "U8", "shape": [15 * CHUNK_BYTES], "data_offsets": [0, 15 * CHUNK_BYTES]}}
_HEADER = json.dumps(_DESCRIPTION).ljust(CHUNK_BYTES - 8).encode()
WEIGHTS = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(range(256)) * (15 * CHUNK_BYTES // 256)
TINY = Repo({"config.json": b"{}", "tokenizer.json": b'{"b": 1}', "model.safetensors": WEIGHTS, "model.bin": WEIGHTS})

# A pull that is killed, not stopped, when half of the weights have come.
KILLED_PULL = f"""
import os, signal
from huggingface_hub import constants
from octavo.models.hub_transfer import pull_hub_model
constants.DOWNLOAD_CHUNK_SIZE = {CHUNK_BYTES}
def progress(stage, completed, total):
    if completed > {len(WEIGHTS) // 2}:
        os.kill(os.getpid(), signal.SIGKILL)
pull_hub_model("org/tiny", progress)
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(tiny=TINY, old=Repo({"config.json": b"{}", "pytorch_model.bin": b"weights"})) as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK_BYTES)
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture
def cut_off(hub: Hub) -> Hub:
    """Return a hub whose model was pulled until Ctrl-C, when half of the weights had come."""

    def stop(stage: str, completed: int, total: int | None) -> None:
        if completed > len(WEIGHTS) // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_hub_model("org/tiny", stop)
    hub.requests.clear()
    return hub


def weights_of(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def cached_names(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "hub" / "models--org--tiny" / "blobs").iterdir()]


def test_a_killed_pull_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED_PULL], env=hub.environ(tmp_path / "hub"), check=False)
    assert killed.returncode == -signal.SIGKILL
    hub.requests.clear()
    reported: list[tuple[str, int, int | None]] = []

    directory = pull_hub_model("org/tiny", lambda *report: reported.append(report))

    assert hub.downloads("model.safetensors") == [f"bytes={len(WEIGHTS) // 2}-"]
    assert weights_of(directory) == WEIGHTS
    assert sorted(os.listdir(directory)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert reported[-1] == ("Downloading", len(WEIGHTS), len(WEIGHTS))
    assert not [name for name in cached_names(tmp_path) if name.endswith("incomplete")]


def test_a_hub_that_sends_the_whole_file_again_gets_its_way(cut_off: Hub) -> None:
    cut_off.ignores_ranges = True
    reported: list[int] = []

    assert weights_of(pull_hub_model("org/tiny", lambda _, completed, __: reported.append(completed))) == WEIGHTS
    assert reported[-1] == len(WEIGHTS)


def test_what_was_damaged_on_the_disk_is_found_and_deleted(cut_off: Hub, tmp_path: Path) -> None:
    [partial] = (tmp_path / "hub").rglob("*.incomplete")
    partial.write_bytes(b"damaged" + partial.read_bytes()[7:])

    with pytest.raises(
        ModelLoadError, match=r"model.safetensors of org/tiny does not match the hub's checksum .*: pull it again"
    ):
        pull_hub_model("org/tiny", ignore_progress)
    assert weights_of(pull_hub_model("org/tiny", ignore_progress)) == WEIGHTS


def test_what_is_longer_than_the_file_is_begun_again(cut_off: Hub, tmp_path: Path) -> None:
    [partial] = (tmp_path / "hub").rglob("*.incomplete")
    partial.write_bytes(2 * WEIGHTS)

    assert weights_of(pull_hub_model("org/tiny", ignore_progress)) == WEIGHTS


def test_of_two_pulls_at_a_time_one_downloads(hub: Hub) -> None:
    is_waiting = threading.Event()
    others: list[Future[Path]] = []

    def wait_for_other(stage: str, completed: int, total: int | None) -> None:
        """In the middle of the first one: start the second one, and go on when that waits or has ended."""
        if not others:
            others.append(pool.submit(pull_hub_model, "org/tiny", tell_that_it_waits))
            others[0].add_done_callback(lambda _: is_waiting.set())
            is_waiting.wait()

    def tell_that_it_waits(stage: str, completed: int, total: int | None) -> None:
        if stage.startswith("Waiting"):
            is_waiting.set()

    with ThreadPoolExecutor(1) as pool:
        directory = pull_hub_model("org/tiny", wait_for_other)

    assert hub.downloads("model.safetensors") == [""]
    assert others[0].result() == directory
    assert weights_of(directory) == WEIGHTS


def test_too_small_a_disk_is_told_before_the_download(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))

    with pytest.raises(ModelLoadError) as caught:
        pull_hub_model("org/tiny", ignore_progress)

    assert str(caught.value) == (
        f"org/tiny needs 0.3 MB more in {tmp_path / 'hub'}, where 0.0 MB are free (set HF_HOME to use another disk)"
    )
    assert hub.downloads("model.safetensors") == []


def test_pull_says_where_the_model_lies_and_what_to_type_next(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert run(["pull", "org/tiny"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"U8, no architecture: needs 0.4 GB, \d+(\.\d)? GB free", lines.pop(1))
        assert lines == [
            f"org/tiny: 262.2 kB in {tmp_path}/hub/models--org--tiny/snapshots/{TINY.commit}",
            "next: octavo up --model org/tiny",
        ]
    assert hub.downloads("model.safetensors") == [""]


def test_a_pulled_gguf_file_is_told_with_what_it_needs(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_small_gguf(tmp_path / "m.gguf", FileType.Q4_0).read_bytes()
    repo = hub.repos["org/files"] = Repo({"m-Q4_0.gguf": good, "m-Q8_0.gguf": good[:-1]})

    assert run(["pull", "org/files:Q4_0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    directory = f"{tmp_path}/hub/models--org--files/snapshots/{repo.commit}"
    assert lines[0] == f"org/files:Q4_0: {decimal(len(good))} in {directory}/m-Q4_0.gguf"
    assert re.fullmatch(r"Q4_0, LlamaForCausalLM: needs 0.4 GB, \d+(\.\d)? GB free", lines[1])
    assert lines[2:] == ["next: octavo up --model org/files:Q4_0"]

    assert run(["pull", "org/files:Q8_0"]) == 1
    assert f"org/files:Q8_0 is in {directory}/m-Q8_0.gguf, but cannot be served: " in capsys.readouterr().err
    assert run(["pull", "org/files"]) == 1
    assert "has GGUF files only; use one of org/files:Q4_0, org/files:Q8_0 for --model" in capsys.readouterr().err
    assert run(["pull", str(tmp_path / "m.gguf")]) == 1
    assert f"m.gguf is on this machine already; octavo up {tmp_path}/m.gguf serves it" in capsys.readouterr().err
    assert run(["pull", ""]) == 1
    assert "'' is no name at the hub; such a name is Qwen/Qwen3-0.6B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("org/none", "octavo: the hub has no model org/none; a private model needs HF_TOKEN"),
        (
            "org/old",
            "octavo: the hub model org/old has its weights as pytorch_model.bin, which Octavo does not read;",
        ),
        (
            "ollama:tiny:1b",
            "octavo: ollama:tiny:1b is a model of Ollama: ollama pull tiny:1b gets it, octavo up serves it",
        ),
        (
            "no id",
            "octavo: there is nothing to download: no id is neither a directory, nor a GGUF file, nor a hub id "
            "(NAME or ORGANISATION/NAME)",
        ),
        ("/none/here", "octavo: there is nothing to download: the model directory /none/here does not exist"),
        ("empty", "octavo: there is nothing to download: the model directory empty is empty"),
        ("cut.gguf", "octavo: there is nothing to download: cut.gguf"),
    ],
)
def test_what_cannot_be_pulled_is_one_sentence(
    model: str,
    sentence: str,
    hub: Hub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("cut.gguf").write_bytes(b"GGUF")
    assert run(["pull", model]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(sentence)


def test_what_is_served_is_pulled_before_anything_starts(cut_off: Hub) -> None:
    assert resolve_model("org/tiny", progress=False) == "org/tiny"
    assert cut_off.downloads("model.safetensors") == [f"bytes={len(WEIGHTS) // 2}-"]
    with pytest.raises(LocalServiceError, match="there is no directory org/none, and the hub has no model org/none"):
        resolve_model("org/none", progress=False)
    with pytest.raises(LocalServiceError, match=r"the hub has no model smolm2.*; did you mean smollm2\?"):
        resolve_model("smolm2", progress=False)


Tamper = Callable[[Any], None]


def rename(name: str) -> Tamper:
    """Return what gives the last file of a description, or of a tree, another name."""

    def tamper(value: Any) -> None:
        if isinstance(value, dict):
            value["siblings"][-1]["rfilename"] = name
        else:
            value[-1]["path"] = name

    return tamper


def promise(sha256: str) -> Tamper:
    """Return what gives weights another checksum in a description."""

    def tamper(value: Any) -> None:
        if isinstance(value, dict):
            value["siblings"][2]["lfs"]["sha256"] = sha256

    return tamper


def rename_commit(after: int) -> Tamper:
    """Return what gives descriptions another commit, but for the first ones: the hub's library asks again."""
    seen: list[None] = []

    def tamper(value: Any) -> None:
        if isinstance(value, dict):
            if len(seen) == after:
                value["sha"] = "../../../planted"
            else:
                seen.append(None)

    return tamper


HOSTILE_NAMES = [
    "../../../planted",
    "/planted",
    "a//b",
    "./a",
    "",
    "a/../../planted",
    "a\0b",
    "a\nb",
    "a\x1b[2Jb",
    "a\x9bb",
]
HOSTILE_CHECKSUMS = ["../../planted", "", "/planted", "0" * 63, "0" * 65, "g" * 64, "0" * 64 + "\n", "é" * 64]


@pytest.mark.parametrize(
    ("tamper", "lies", "given"),
    [
        *((rename(name), {}, "as the name of a file") for name in HOSTILE_NAMES),
        *((promise(checksum), {}, "as a SHA-256") for checksum in HOSTILE_CHECKSUMS),
        *((rename_commit(after), {}, "as a commit") for after in (0, 1)),
        (None, {"X-Repo-Commit": "../../../planted"}, "as a commit"),
        *((None, {"ETag": etag}, "as the name of a file") for etag in ('"../../../planted"', '"{}/planted"', '".."')),
        (None, {"X-Linked-Etag": '"../../../planted"'}, "as the name of a file"),
    ],
)
def test_nothing_that_the_hub_says_leads_out_of_the_cache(
    tamper: Tamper | None, lies: dict[str, str], given: str, hub: Hub, tmp_path: Path
) -> None:
    hub.lies = {header: value.format(tmp_path) for header, value in lies.items()}
    hub.tampers = tamper or hub.tampers

    with pytest.raises(
        ModelLoadError, match=(f"(?s)^the hub returned the invalid value .* {given}; no file was written$")
    ):
        pull_hub_model("org/tiny", ignore_progress)

    assert [path for path in tmp_path.rglob("*planted*") if path.is_file()] == []
