"""The C library is compiled once into a cache; what keeps it from being had is one line."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from executor_svc.native import build
from executor_svc.native.build import FLAGS, NativeBrokenError, NativeUnavailableError, build_library, cache_directory
from executor_svc.native.library import NativeLibrary


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A library that compiles at once."""
    directory = tmp_path / "csrc"
    directory.mkdir()
    (directory / "one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n')
    (directory / "one.h").write_text("#define ONE 1\n")
    return directory


def test_the_second_build_takes_the_file_of_the_first(sources: Path, tmp_path: Path) -> None:
    first = build_library(tmp_path / "cache", sources=sources)
    stamp = first.stat().st_mtime_ns

    assert build_library(tmp_path / "cache", sources=sources) == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]


@pytest.mark.parametrize("name", ["one.c", "one.h"])
def test_changed_sources_are_another_library(name: str, sources: Path, tmp_path: Path) -> None:
    first = build_library(tmp_path / "cache", sources=sources)
    with (sources / name).open("a") as file:
        file.write("// more\n")

    assert build_library(tmp_path / "cache", sources=sources) != first


def test_other_flags_and_another_processor_are_another_library(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [build_library(tmp_path, sources=sources), build_library(tmp_path, sources=sources, flags=(*FLAGS, "-g"))]
    monkeypatch.setattr(build, "_processor_features", lambda: frozenset({"avx2", "fma", "f16c", "more"}))

    paths.append(build_library(tmp_path, sources=sources))

    assert len(set(paths)) == 3


def test_of_several_builders_at_once_one_compiles(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[Path] = []
    compiled: list[str] = []
    run = build._run

    def counted(command: Sequence[str]) -> str:
        compiled.extend(command[-1:] if "-c" in command else [])
        return run(command)

    monkeypatch.setattr(build, "_run", counted)
    threads = [
        threading.Thread(target=lambda: paths.append(build_library(tmp_path / "cache", sources=sources)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(paths) == 4
    assert compiled == [str(sources / "one.c")]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [paths[0].name]


def test_an_error_of_the_compiler_is_one_line_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    (sources / "two.c").write_text("int two(void) { return three; }\n")

    with pytest.raises(NativeBrokenError, match=r"error: .*three") as caught:
        build_library(tmp_path / "cache", sources=sources)

    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(NativeUnavailableError, match="no C compiler was found") as caught:
        build_library(tmp_path / "cache")

    assert not isinstance(caught.value, NativeBrokenError)  # nobody need mend it


@pytest.mark.parametrize(
    ("features", "machine", "reason"),
    [
        ({"avx2", "fma"}, "x86_64", "lacks AVX2, FMA or F16C"),
        ({"avx2", "fma", "f16c"}, "aarch64", "this machine is aarch64"),
    ],
)
def test_another_processor(
    features: set[str], machine: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_processor_features", lambda: frozenset(features))
    monkeypatch.setattr("platform.machine", lambda: machine)

    with pytest.raises(NativeUnavailableError, match=reason):
        build_library(tmp_path)


def test_a_cache_that_cannot_be_written(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    sentence = r"file/cache cannot be written: Not a directory; set OCTAVO_CACHE_DIR to a directory that can be$"
    with pytest.raises(NativeBrokenError, match=sentence):
        build_library(tmp_path / "file" / "cache", sources=sources)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own" / "native"
    monkeypatch.delenv("OCTAVO_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "octavo" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "octavo" / "native"


def test_a_damaged_library_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "octavo-damaged.so"
    path.write_bytes(b"nothing")

    with pytest.raises(NativeBrokenError, match="cannot be loaded"):
        NativeLibrary(path, 1)
