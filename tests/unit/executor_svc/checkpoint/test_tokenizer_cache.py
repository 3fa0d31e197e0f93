"""The second start of a GGUF file does not convert its tokenizer, and no state of the cache keeps it from starting."""

import importlib.metadata
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor_svc.checkpoint.gguf import tokenizer, tokenizer_cache
from executor_svc.checkpoint.gguf.model import GGUFModel
from tests.support.each_row import each_row
from tests.support.gguf_tokenizers import BYTE_LEVEL, TOKENS, write_tokenizer

VALUES = BYTE_LEVEL | {"tokenizer.ggml.pre": "gpt-2"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Where entries are, and no other test's: see conftest.py."""
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were converted."""
    converted: list[str] = []
    convert = tokenizer._tokenizer

    def counted(metadata: Any) -> dict[str, object]:
        converted.append(metadata.path.name)
        return convert(metadata)

    monkeypatch.setattr(tokenizer, "_tokenizer", counted)
    return converted


def load(path: Path, values: dict[str, Any] = VALUES, architecture: str = "llama") -> bytes:
    """Return the tokenizer.json of a file with these values."""
    write_tokenizer(path, values, architecture)
    return GGUFModel(path).tokenizer_files()[0].content


def test_the_second_start_does_not_convert(tmp_path: Path, cache: Path, conversions: list[str]) -> None:
    first = load(tmp_path / "m.gguf")
    (entry,) = cache.iterdir()
    assert (stat.S_IMODE(cache.stat().st_mode), stat.S_IMODE(entry.stat().st_mode)) == (0o700, 0o600)

    assert load(tmp_path / "m.gguf") == first
    assert load(tmp_path / "of_the_same_tokenizer.gguf") == first
    assert conversions == ["m.gguf"]


def test_the_second_start_imports_no_library_of_tokenizers(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(cache.parent))
    load(tmp_path / "m.gguf")
    assert len(list(cache.iterdir())) == 1
    start = (
        "import sys; from pathlib import Path; from executor_svc.checkpoint.gguf.model import GGUFModel\n"
        "GGUFModel(Path(sys.argv[1])).tokenizer_files()\n"
        "print({'transformers', 'tokenizers'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", start, str(tmp_path / "m.gguf")]

    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert imported == "set()"


def test_what_decides_on_the_result_decides_on_the_entry(
    tmp_path: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = [*TOKENS[:-2], TOKENS[-1], TOKENS[-2]]
    contents = {
        load(tmp_path / "a.gguf"),
        load(tmp_path / "a.gguf", VALUES | {"tokenizer.ggml.tokens": swapped}),
        load(tmp_path / "a.gguf", VALUES | {"tokenizer.ggml.pre": "smollm"}),
        load(tmp_path / "a.gguf", VALUES | {"tokenizer.ggml.add_bos_token": True}),
    }
    assert len(contents) == len(conversions) == len(list(cache.iterdir())) == 4

    load(tmp_path / "a.gguf", architecture="qwen2")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"another {name}")
    load(tmp_path / "a.gguf")
    assert len(conversions) == len(list(cache.iterdir())) == 6


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda entry: entry.write_bytes(change(entry.read_bytes()))


def become_link(entry: Path) -> None:
    entry.rename(entry.with_suffix(".other"))
    entry.symlink_to(entry.with_suffix(".other"))


def become_fifo(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


def become_another(entry: Path) -> None:
    """Have the content of an entry that is sound under its own name."""
    tokenizer_cache._write(entry.with_name("another.json"), b"{}")
    entry.with_name("another.json").rename(entry)


@each_row(
    changed(lambda content: b""),
    changed(lambda content: content[:-1]),
    changed(lambda content: content[:100] + b"x" + content[101:]),
    changed(lambda content: content + b"\n"),
    become_link,
    become_fifo,
    become_another,
    lambda entry: entry.chmod(0o606),
    lambda entry: entry.chmod(0o660),
    lambda entry: entry.parent.chmod(0o707),
    lambda entry: entry.parent.chmod(0o770),
)
def test_an_entry_that_cannot_be_trusted_counts_as_none(
    spoil: Callable[[Path], object], *, tmp_path: Path, cache: Path, conversions: list[str]
) -> None:
    good = load(tmp_path / "m.gguf")
    del conversions[:]
    entry = next(each for each in cache.iterdir() if each.suffix == ".json")
    spoil(entry)

    assert load(tmp_path / "m.gguf") == good
    assert conversions == ["m.gguf"]
    cache.chmod(0o700)
    assert load(tmp_path / "m.gguf") == good
    assert conversions == ["m.gguf"], "it was not replaced"


def test_an_entry_of_another_user_counts_as_none(
    tmp_path: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path / "m.gguf")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    load(tmp_path / "m.gguf")

    assert len(conversions) == 2


def no_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(tokenizer_cache, "user_cache_directory", refuse)


def no_directory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.touch()


def full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def partly(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", partly)


def read_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)


@pytest.mark.parametrize("spoil", [no_home, no_directory, full_disk, read_only])
def test_a_cache_that_cannot_be_written_does_not_matter(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    tmp_path: Path,
    cache: Path,
    conversions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(cache, monkeypatch)

    assert load(tmp_path / "m.gguf") == load(tmp_path / "m.gguf")

    assert conversions == ["m.gguf"] * 2
    assert not cache.is_dir() or not list(cache.iterdir()), "something is left"


def test_an_entry_of_a_cache_that_became_read_only_is_read(
    tmp_path: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = load(tmp_path / "m.gguf")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)

    assert load(tmp_path / "m.gguf") == good
    assert conversions == ["m.gguf"]


def test_the_entries_that_were_used_last_stay(cache: Path) -> None:
    for number in range(tokenizer_cache._NUM_KEPT):
        tokenizer_cache.cached_conversion([b"%d" % number], lambda: b"{}")
        for entry in cache.iterdir():  # the first one becomes the oldest
            os.utime(entry, (entry.stat().st_mtime - 1000,) * 2)
    tokenizer_cache.cached_conversion([b"0"], lambda: b"it was not kept")

    tokenizer_cache.cached_conversion([b"new"], lambda: b"{}")

    assert len(list(cache.iterdir())) == tokenizer_cache._NUM_KEPT
    for used in (b"0", b"new"):
        assert tokenizer_cache.cached_conversion([used], lambda: b"it was removed") == b"{}"
