"""A shell that types the sessions of a page against services that listen elsewhere than the page says."""

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.sessions import find_grpcurl


@dataclass(slots=True)
class Shell:
    """Runs commands one after the other.

    Attributes:
        directory: Where it runs.
        addresses: Where things are, by the addresses that the page has for them.
    """

    directory: Path
    addresses: Mapping[str, str]
    _exports: list[str] = field(default_factory=list)
    _in_background: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def type(self, command: str) -> str:
        """Run a command and return all that it writes; of one in the background, nothing.

        A file that a command in the background writes is complete when another command reads it.
        """
        if command.startswith("export "):
            self._exports.append(command)
            return ""
        if background := re.fullmatch(r"(.* >(\S+) 2>&1) &", command, re.DOTALL):
            self._in_background[background[2]] = await self._start(f"exec {background[1]}")
            return ""
        for name in [name for name in self._in_background if name in command.split()]:
            await asyncio.wait_for(self._in_background.pop(name).wait(), PATIENCE_S)
        process = await self._start(command)
        output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        text = output.decode()
        for printed, address in self.addresses.items():
            text = text.replace(address, printed)
        return text

    async def _start(self, command: str) -> asyncio.subprocess.Process:
        for printed, address in self.addresses.items():
            command = command.replace(printed, address)
        path = os.pathsep.join([str(find_grpcurl().parent), str(Path(sys.executable).parent), os.environ["PATH"]])
        return await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            "\n".join([*self._exports, command]),
            cwd=self.directory,
            env={"PATH": path},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def close(self) -> None:
        """Wait for what still runs in the background; the services are gone, so its calls were cut off."""
        for process in self._in_background.values():
            await asyncio.wait_for(process.wait(), PATIENCE_S)
