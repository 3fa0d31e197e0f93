"""Compile the C library of this package with the machine's compiler, once, into the user's cache.

The file name carries a hash of everything that could make another library: sources, flags, the compiler's
version, and what the processor can do. So a cache may be shared by machines, and nothing in it goes stale.
One process at a time builds, on all cores; who comes meanwhile waits and takes its file, which is renamed when whole.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from octavo_shared.process.user_cache import user_cache_directory

SOURCE_DIRECTORY = Path(__file__).parent / "csrc"
COMPILERS = ("gcc", "cc", "clang")
FLAGS = (
    "-std=c11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # a * b + c is rounded as it is written, wherever the compiler puts it
    "-fopenmp",
    "-fPIC",
    "-shared",
)
TIMEOUT_S = 300


class NativeUnavailableError(Exception):
    """The C library cannot serve here; the message says why, in one line."""


class NativeBrokenError(NativeUnavailableError):
    """It could serve here, but for something that an operator can mend."""


def cache_directory() -> Path:
    """Return where compiled libraries are kept: below OCTAVO_CACHE_DIR, else the user's cache.

    Raises: NativeBrokenError: this user has none.
    """
    try:
        return user_cache_directory() / "native"
    except RuntimeError as error:
        raise NativeBrokenError("this user has no home directory: set OCTAVO_CACHE_DIR") from error


def build_library(cache_directory: Path, *, flags: Sequence[str] = FLAGS, sources: Path = SOURCE_DIRECTORY) -> Path:
    """Return the compiled library, and compile it first if the cache does not have it.

    Args:
        cache_directory: Where libraries are kept; made if it is missing.
        flags: For the compiler.
        sources: A directory; its *.c are compiled, its *.h belong to them.

    Raises: NativeUnavailableError: no compiler, or a processor of another kind; NativeBrokenError: the compiler's
        first error, or the cache cannot be written.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NativeUnavailableError(f"the C library requires x86-64; this machine is {platform.machine()}")
    features = _processor_features()
    if not {"avx2", "fma", "f16c"} <= features:
        raise NativeUnavailableError("this CPU lacks AVX2, FMA or F16C")
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        raise NativeUnavailableError(f"no C compiler was found ({', '.join(COMPILERS)}); install gcc")
    path = cache_directory / f"octavo-{_key(compiler, flags, sources, features)}.so"
    if path.is_file():
        return path
    try:
        cache_directory.mkdir(parents=True, exist_ok=True)
        with _turn(cache_directory), tempfile.TemporaryDirectory(prefix=".build-", dir=cache_directory) as work:
            if not path.is_file():
                _compile([compiler, *flags], sources, Path(work) / path.name).replace(path)
    except OSError as error:
        raise NativeBrokenError(
            f"{cache_directory} cannot be written: {error.strerror}; set OCTAVO_CACHE_DIR to a directory that can be"
        ) from error
    return path


@contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Wait until nobody else builds in a directory; where its file system has no locks, several may."""
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


def _key(compiler: str, flags: Sequence[str], sources: Path, features: frozenset[str]) -> str:
    hasher = hashlib.sha256()
    for part in (_run([compiler, "--version"]), *flags, *sorted(features)):
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
