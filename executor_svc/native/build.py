"""Compile the C library of this package: ahead, for the usual processors, or once, into the user's cache.

`python -m executor_svc.native.build` builds it for all LEVELS into this package, or into the directory given, and
prints the files: the executor's image has them. A start takes the file that fits; where none does, the machine's
compiler builds it for this processor.

The file name carries a hash of everything that could make another library: sources and flags, and in the cache the
compiler's version and what the processor can do. So a cache may be shared by machines, and nothing stale is taken.
One process at a time builds, on all cores; another one waits and takes its file, which is renamed when whole.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from octavo_shared.process.events import Event
from octavo_shared.process.user_cache import user_cache_directory

SOURCE_DIRECTORY = Path(__file__).parent / "csrc"
PREBUILT_DIRECTORY = Path(__file__).parent / "prebuilt"
COMPILERS = ("gcc", "cc", "clang")
TIMEOUT_S = 300


def _flags(*processor: str) -> Sequence[str]:
    return (
        "-std=c11",
        "-O3",
        *processor,
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=off",  # a * b + c is rounded as it is written, wherever the compiler puts it
        "-fopenmp",
        "-fPIC",
        "-shared",
    )


FLAGS = _flags("-march=native")

_V2 = frozenset({"pni", "ssse3", "sse4_1", "sse4_2", "cx16", "lahf_lm", "popcnt"})
_V3 = _V2 | {"avx", "avx2", "fma", "f16c", "abm", "bmi1", "bmi2", "movbe", "xsave"}
_VNNI = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Level:
    """Processors on which the compiler's macros select one code in csrc: the code that -march=native selects there.

    Attributes:
        flags: For the compiler.
        needs: What these flags let the compiler use, as Linux names it.
        lacks: Features for which the macros would select other code.
    """

    flags: Sequence[str]
    needs: frozenset[str]
    lacks: frozenset[str]


LEVELS: Mapping[str, Level] = {
    "avx2": Level(_flags("-march=x86-64-v3"), _V3, frozenset({"avx512f", "avx_vnni"})),
    "avx512-vnni": Level(_flags("-march=x86-64-v4", "-mavx512vnni"), _VNNI, frozenset({"avx512_bf16"})),
    "avx512-vnni-bf16": Level(
        _flags("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _VNNI | {"avx512_bf16"}, frozenset()
    ),
}


class NativeUnavailableError(Exception):
    """The C library cannot serve here; the message says why, in one line."""


class NativeBrokenError(NativeUnavailableError):
    """It could serve here, if an operator mended something."""


def cache_directory() -> Path:
    """Return where compiled libraries are kept: below OCTAVO_CACHE_DIR, else the user's cache.

    Raises: NativeBrokenError: this user has none.
    """
    try:
        return user_cache_directory() / "native"
    except RuntimeError as error:
        raise NativeBrokenError("this user has no home directory: set OCTAVO_CACHE_DIR") from error


def find_library() -> Path:
    """Return the library for this processor: what was built ahead, else what the cache has, else compiled now.

    Raises: NativeUnavailableError: as `build_library`; NativeBrokenError: so too, or this user has no cache.
    """
    return find_prebuilt(PREBUILT_DIRECTORY) or build_library(cache_directory())


def find_prebuilt(directory: Path, *, sources: Path = SOURCE_DIRECTORY) -> Path | None:
    """Return the library that was built ahead from these sources for processors like this one; None: there is none."""
    features = _processor_features()
    for name, level in LEVELS.items():
        if level.needs <= features and not level.lacks & features:
            path = _prebuilt_path(directory, name, sources)
            return path if path.is_file() else None
    return None


def build_ahead(directory: Path, *, sources: Path = SOURCE_DIRECTORY) -> Sequence[Path]:
    """Build the library for all LEVELS into a directory, as far as they are not there; return the files.

    A machine without an x86-64 processor has none.

    Raises: NativeUnavailableError: no compiler; NativeBrokenError: its first error; OSError: the directory cannot be
        written.
    """
    if not _is_x86_64():
        return []
    compiler = _find_compiler()
    paths = {name: _prebuilt_path(directory, name, sources) for name in LEVELS}
    for name, path in paths.items():
        _build([compiler, *LEVELS[name].flags], sources, path)
    return list(paths.values())


def build_library(cache_directory: Path, *, flags: Sequence[str] = FLAGS, sources: Path = SOURCE_DIRECTORY) -> Path:
    """Return the compiled library, and compile it first if the cache does not have it.

    Args:
        cache_directory: Where libraries are kept; made if it is missing.
        flags: For the compiler.
        sources: A directory; its *.c are compiled, its *.h belong to them.

    Raises: NativeUnavailableError: no compiler, or another processor than x86-64; NativeBrokenError: the compiler's
        first error, or the cache cannot be written.
    """
    if not _is_x86_64():
        raise NativeUnavailableError(f"the C library requires x86-64; this machine is {platform.machine()}")
    features = _processor_features()
    if not {"avx2", "fma", "f16c"} <= features:
        raise NativeUnavailableError("this CPU lacks AVX2, FMA or F16C")
    compiler = _find_compiler()
    key = _digest([_run([compiler, "--version"]), *flags, *sorted(features)], sources)
    path = cache_directory / f"octavo-{key}.so"
    try:
        _build([compiler, *flags], sources, path)
    except OSError as error:
        raise NativeBrokenError(
            f"{cache_directory} cannot be written: {error.strerror}; set OCTAVO_CACHE_DIR to a directory that can be"
        ) from error
    return path


def _is_x86_64() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _find_compiler() -> str:
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        raise NativeUnavailableError(f"no C compiler was found ({', '.join(COMPILERS)}); install gcc")
    return compiler


def _prebuilt_path(directory: Path, name: str, sources: Path) -> Path:
    return directory / f"octavo-{name}-{_digest(LEVELS[name].flags, sources)}.so"


def _build(command: Sequence[str], sources: Path, path: Path) -> None:
    """Compile a library unless it is there. Raises: OSError: its directory cannot be written."""
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _turn(path.parent), tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as work:
        if not path.is_file():
            _logger.info(Event("compiling_kernels", compiler=command[0], library=str(path)))
            _compile(command, sources, Path(work) / path.name).replace(path)


@contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Wait until no other process builds in a directory; where its file system has no locks, several may."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(command: Sequence[str], sources: Path, library: Path) -> Path:
    """Compile each source beside the others, and link them; return the library."""
    # The largest take longest.
    paths = sorted(sources.glob("*.c"), key=lambda path: (-path.stat().st_size, path.name))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = [str(library.parent / f"{path.stem}.o") for path in paths]
        for _ in pool.map(lambda path, to: _run([*command, "-c", "-o", to, str(path)]), paths, objects):
            pass
    _run([*command, "-o", str(library), *sorted(objects), "-lm"])
    return library


def _digest(parts: Sequence[str], sources: Path) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part.encode() + b"\0")
    for path in sorted(sources.glob("*.[ch]")):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]


def _run(command: Sequence[str]) -> str:
    """Return the output of a command.

    Raises: NativeBrokenError: it failed; the message has its first line that names an error.
    """
    try:
        # English messages, whatever the user reads.
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env={**os.environ, "LC_ALL": "C"}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBrokenError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NativeBrokenError(f"{command[0]}: {next((line for line in lines if 'error: ' in line), lines[0])}")
    return done.stdout


def _processor_features() -> frozenset[str]:
    """Return the flags of the processor as Linux lists them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def main() -> int:
    """Build for all LEVELS into this package, or into the directory that is named; return the exit code."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else PREBUILT_DIRECTORY
    try:
        for path in build_ahead(directory):
            print(path)
    except (NativeUnavailableError, OSError) as error:
        print(f"octavo executor: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
