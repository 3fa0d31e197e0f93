"""What a check finds on a machine: versions, wheels, the card. The driver imports it, so it imports no torch itself.

`python -m benchmarks.gpu.machine` looks at the card, in a process of its own: a broken driver may crash it.
"""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from octavo.bench.provenance import this_machine

# In the order in which they are printed.
PACKAGES = (
    *("grpcio", "protobuf", "torch", "triton", "transformers", "numpy", "pytest"),
    *("torchao", "flash-attn", "flash-attn-3", "xformers"),
)
LEAST_VERSIONS = {"torch": (2, 10), "triton": (3, 6), "transformers": (5,), "pytest": (8,)}
# What the executor imports beside torch and transformers, and what tests do.
MODEL_WHEELS = ("gguf",)
TEST_WHEELS = ("pytest", "iniconfig", "pluggy", "hypothesis", "sortedcontainers")
# What the services import beside torch, transformers and what these bring; the part `service` needs all of it.
SERVICE_WHEELS = (
    *("grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "googleapis-common-protos"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    "prometheus-client",
)
MIN_CAPABILITY = (8, 0)
LOOK_TIMEOUT_S = 120.0

FindVersion = Callable[[str], str | None]


def installed_version(name: str) -> str | None:
    """Return the version of a package; None: it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe(find: FindVersion = installed_version) -> list[str]:
    """Return versions, driver and machine, a line each; no host name, no path."""
    versions = [f"{name} {found}" for name in PACKAGES if (found := find(name)) is not None]
    return [
        f"Python {platform.python_version()}, {', '.join(versions)}",
        f"driver: {driver_version() or 'no nvidia-smi here'}",
        str(this_machine()),
    ]


def driver_version() -> str | None:
    """Return what nvidia-smi says of the first card's driver; None: it says nothing."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def describe_wheels(find: FindVersion = installed_version) -> str:
    """Return which wheels a machine with torch, Triton and transformers needs beside them, and which are missing."""
    wheels = (*MODEL_WHEELS, *TEST_WHEELS, *SERVICE_WHEELS)
    missing = [name for name in wheels if find(name) is None]
    found = f"missing here: {', '.join(missing)}" if missing else "all are here"
    return (
        f"beside torch, Triton, NumPy and transformers: {len(wheels)} wheels, "
        f"{', '.join(MODEL_WHEELS)} for models, {', '.join(TEST_WHEELS)} for tests, "
        f"{', '.join(SERVICE_WHEELS)} for the part service; {found}"
    )


def why_not_installed(*, is_rehearsal: bool, find: FindVersion = installed_version) -> str | None:
    """Return which library is missing, or will not do, in one sentence; None: all will do."""
    for name, least in LEAST_VERSIONS.items():
        found, needed = find(name), ".".join(map(str, least))
        if found is None:
            return f"{name} is not installed; install a {name} of at least {needed}"
        if _numbers(found)[: len(least)] < least:
            return f"{name} is {found}; it needs at least {needed}"
    triton, numpy = find("triton"), find("numpy")
    if is_rehearsal and triton and numpy and _numbers(triton) < (3, 7) and _numbers(numpy) >= (2, 4):
        return (
            f"NumPy {numpy} breaks the interpreter of Triton {triton}, which a rehearsal runs kernels in; "
            "install a NumPy before 2.4"
        )
    return None


def look_at_card() -> tuple[str, list[str]]:
    """Return the card's name, and lines about it. Raises: RuntimeError: there is none that will do; one sentence."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.machine"],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=LOOK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"torch did not find out within {LOOK_TIMEOUT_S:g} s which card is here") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"torch cannot be asked which card is here ({last})")
    found = json.loads(done.stdout.splitlines()[-1])
    if found["problem"] is not None:
        raise RuntimeError(found["problem"])
    return found["name"], found["lines"]


def _look() -> dict[str, object]:
    import torch

    if not torch.cuda.is_available():
        return {"problem": "torch finds no CUDA device; --rehearse shows on a CPU that the check itself works"}
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    if capability < MIN_CAPABILITY:
        return {"problem": f"the device has capability {capability[0]}.{capability[1]}; the kernels need 8.0"}
    free_bytes, _ = torch.cuda.mem_get_info()
    line = (
        f"{properties.name}, capability {capability[0]}.{capability[1]}, {properties.multi_processor_count} "
        f"multiprocessors, {properties.total_memory / 2**30:.0f} GiB, {free_bytes / 2**30:.0f} GiB of them free, "
        f"CUDA {torch.version.cuda}"
    )
    return {"problem": None, "name": properties.name, "lines": [line]}


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def main(arguments: Sequence[str]) -> int:
    del arguments
    print(json.dumps(_look()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
