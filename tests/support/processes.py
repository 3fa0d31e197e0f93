"""Real service processes for end-to-end tests, started and stopped by process id."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

# Where a port takes calls: each that has a name, at last the main one, which may not serve yet.
PORT_LINE = re.compile(r"octavo \w+ (listening|serving( (?P<port>\w+))?) on (?P<address>[^\s,]+)(, waiting for .*)?")


@dataclass(slots=True)
class Service:
    """A running service process; `other_addresses` has the addresses of its other ports by name, such as "admin"."""

    process: asyncio.subprocess.Process
    address: str
    other_addresses: dict[str, str] = field(default_factory=dict)

    def resident_mib(self) -> float:
        """Resident memory now, in MiB (Linux)."""
        return resident_mib(self.process.pid)

    def loaded_libraries(self) -> str:
        """The memory map, with the path of every shared library (Linux)."""
        return Path(f"/proc/{self.process.pid}/maps").read_text(encoding="utf-8")

    async def terminate(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()

    async def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.process.kill()
        await self.process.wait()


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process, in MiB (Linux); 0: it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS:"))


def children_of(pid: int, module: str) -> list[int]:
    """Return the children of a process that run a module."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = (int(child) for path in lists for child in path.read_text(encoding="ascii").split())
    return sorted(child for child in children if module in command_of(child))


def command_of(pid: int) -> list[str]:
    """Return what a process was started with; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
    except OSError:
        return []


async def start_service(module: str, *flags: str, environment: Mapping[str, str] = MappingProxyType({})) -> Service:
    """Start `python -m module` and return it once its ports take calls; `environment` is added to ours."""
    command = [sys.executable, "-P", "-m", module, "--exit-on-stdin-close", *flags]
    if "--listen" not in flags:
        command += ["--listen", "127.0.0.1:0"]
    if module == "scheduler_svc" and "--admin-listen" not in flags:
        command += ["--admin-listen", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=os.environ | environment
    )
    assert process.stdout is not None
    other_addresses: dict[str, str] = {}
    while True:
        line = (await process.stdout.readline()).decode()
        if " notice: " in line:
            continue
        match = PORT_LINE.fullmatch(line.strip())
        assert match, f"{module} ended before it served"
        if match["port"] is None:
            return Service(process, match["address"], other_addresses)
        other_addresses[match["port"]] = match["address"]


@asynccontextmanager
async def running_service(module: str, *flags: str) -> AsyncIterator[Service]:
    """Run a service for the length of a block."""
    service = await start_service(module, *flags)
    try:
        yield service
    finally:
        if service.process.returncode is None:
            await service.kill()
