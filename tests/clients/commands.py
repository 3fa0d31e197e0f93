"""Commands that install and run clients."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

INSTALL_TIMEOUT_S = 900.0


async def run_command(
    *command: str,
    timeout_s: float = INSTALL_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command; return all that it wrote.

    Raises: RuntimeError: a command that has our own environment, so one that installs something, fails.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        cwd=cwd,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return f"it did not end in {timeout_s:.0f} s"
    text = output.decode()
    if environment is None and process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{text}")
    return text
