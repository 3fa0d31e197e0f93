"""What a figure needs beside it: processor, cores, memory, date, versions."""

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> str:
    """Return one line about this machine and the libraries; no host name, no path."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "grpcio"))
    return (
        f"{processor_name()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}, "
        f"{libraries}, {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    )


def processor_name() -> str:
    """Return the processor's name as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
