"""How much memory this machine has. Imports no torch, so that a command can ask without waiting for it."""

from pathlib import Path


def available_memory_bytes() -> int | None:
    """Return the memory that new work can take without swapping, as Linux estimates it; None elsewhere."""
    return _memory_bytes("MemAvailable")


def total_memory_bytes() -> int | None:
    """Return the memory of this machine, on Linux; None elsewhere."""
    return _memory_bytes("MemTotal")


def _memory_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes_kib = [int(line.split()[1]) for line in lines if line.startswith(f"{name}:")]
    return sizes_kib[0] * 1024 if sizes_kib else None
