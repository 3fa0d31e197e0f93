"""The C library is built ahead, or compiled once into a cache; what keeps it from being had is one line."""

import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from executor_svc.native import build
from executor_svc.native.build import (
    FLAGS,
    LEVELS,
    SOURCE_DIRECTORY,
    NativeBrokenError,
    NativeUnavailableError,
    build_ahead,
    build_library,
    cache_directory,
    find_library,
    find_prebuilt,
)
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


# Macros of compilers whose features have other names in Linux.
NAMES = {
    "__SSE3__": "pni",
    "__LZCNT__": "abm",
    "__BMI__": "bmi1",
    "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16": "cx16",
    "__LAHF_SAHF__": "lahf_lm",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BF16__": "avx512_bf16",
    "__AVXVNNI__": "avx_vnni",
}


def features_of(*flags: str) -> frozenset[str]:
    """Return what a compiler may use beyond x86-64, as Linux names it."""
    macros, plain = (
        set(re.findall(r"^#define (__\w+) 1$", preprocessed("-dM", *each, "/dev/null"), re.MULTILINE))
        for each in (flags, ("-march=x86-64",))
    )
    return frozenset(NAMES.get(macro, macro.strip("_").lower()) for macro in macros - plain)


def preprocessed(*arguments: str) -> str:
    command = [build._find_compiler(), "-E", "-P", "-x", "c", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_needs_what_its_flags_let_the_compiler_use(name: str) -> None:
    flags = [flag for flag in LEVELS[name].flags if flag.startswith("-m")]
    no_features = {"crc32", *(each for each in features_of(*flags) if each.startswith("fp_fast"))}

    assert features_of(*flags) - no_features == LEVELS[name].needs


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("ivybridge", None),
        ("haswell", "avx2"),
        ("znver3", "avx2"),
        ("alderlake", None),  # AVX-VNNI
        ("skylake-avx512", None),  # AVX-512 without VNNI
        ("cascadelake", "avx512-vnni"),
        ("icelake-server", "avx512-vnni"),
        ("cooperlake", "avx512-vnni-bf16"),
        ("sapphirerapids", "avx512-vnni-bf16"),
    ],
)
def test_a_level_is_taken_where_its_flags_select_the_code_of_native(
    processor: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for level in LEVELS:
        build._prebuilt_path(tmp_path, level, SOURCE_DIRECTORY).touch()
    monkeypatch.setattr(build, "_processor_features", lambda: features_of(f"-march={processor}"))

    found = find_prebuilt(tmp_path)

    expected = None if name is None else build._prebuilt_path(tmp_path, name, SOURCE_DIRECTORY)
    assert found == expected
    if processor != "ivybridge":  # csrc has no code for it
        code = selected_code(tmp_path, *build._flags(f"-march={processor}"))
        assert [level for level in LEVELS if selected_code(tmp_path, *LEVELS[level].flags) == code] == (
            [] if name is None else [name]
        )


def selected_code(directory: Path, *flags: str) -> str:
    """Return all code that macros select in csrc, without that of headers of the system."""
    paths = sorted(SOURCE_DIRECTORY.glob("*.[ch]"))
    for header in re.findall(r"#include <(.+)>", "".join(path.read_text() for path in paths)):
        (directory / header).parent.mkdir(exist_ok=True)
        (directory / header).touch()
    every = directory / "every.c"
    every.write_text("".join(f'#include "{path}"\n' for path in paths if path.suffix == ".c"))
    return preprocessed("-w", "-nostdinc", f"-I{directory}", *flags, str(every))


def test_what_was_built_ahead_is_taken_where_it_fits(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = build_ahead(tmp_path / "ahead", sources=sources)
    stamps = [path.stat().st_mtime_ns for path in paths]

    def found() -> list[Path | None]:
        every = []
        for level in LEVELS.values():
            monkeypatch.setattr(build, "_processor_features", lambda level=level: level.needs | {"more"})
            every.append(find_prebuilt(tmp_path / "ahead", sources=sources))
        return every

    assert len(set(paths)) == len(LEVELS)
    assert found() == build_ahead(tmp_path / "ahead", sources=sources) == paths
    assert [path.stat().st_mtime_ns for path in paths] == stamps
    (sources / "one.h").write_text("#define ONE 2\n")
    assert found() == [None] * len(LEVELS)


def test_what_was_built_ahead_needs_neither_compiler_nor_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PREBUILT_DIRECTORY", tmp_path)
    monkeypatch.setattr(build, "_processor_features", lambda: LEVELS["avx2"].needs)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "/dev/null")
    with pytest.raises(NativeUnavailableError, match="no C compiler was found"):
        find_library()
    path = build._prebuilt_path(tmp_path, "avx2", SOURCE_DIRECTORY)
    path.touch()

    assert find_library() == path


@pytest.mark.parametrize(
    ("machine", "ended"),
    [
        ("x86_64", (1, "octavo executor: no C compiler was found (gcc, cc, clang); install gcc\n")),
        ("aarch64", (0, "")),  # torch serves there
    ],
)
def test_the_command_fails_where_a_library_is_missed(
    machine: str,
    ended: tuple[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: machine)

    assert (build.main(), capsys.readouterr().err) == ended
