"""`python -m tests.clients`: client libraries run their quickstarts against Octavo, each in its own environment.

pip installs each library into a temporary folder. Base URL and key come from the environment, and the model answers by `script.jsonl`. It prints a table; docs/openai.md has the last one.

Exit status: 0, all passed; 1, one did not.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import running_service

HERE = Path(__file__).parent
INSTALL_TIMEOUT_S = 900.0
QUICKSTART_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Library:
    """What is installed, the first requirement being what is tested, and the file of its quickstarts."""

    requirements: Sequence[str]
    quickstart: str


LIBRARIES = {
    "openai": Library(["openai"], "with_openai.py"),
    "openai-agents": Library(["openai-agents"], "with_openai_agents.py"),
    "pydantic-ai": Library(["pydantic-ai-slim[openai,anthropic]"], "with_pydantic_ai.py"),
    "instructor": Library(["instructor[anthropic]"], "with_instructor.py"),
    "langchain": Library(["langchain-openai", "langchain-anthropic"], "with_langchain.py"),
    "anthropic": Library(["anthropic"], "with_anthropic.py"),
}


async def main(words: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=LIBRARIES, nargs="+", metavar="NAME", help=f"some of {', '.join(LIBRARIES)}")
    parser.add_argument("--environments", type=Path, metavar="DIRECTORY", help="keep the environments there")
    arguments = parser.parse_args(words)
    failures: list[str] = []
    print("| library | passed | failed |\n|---|---:|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="octavo-clients-") as temporary:
        folder = arguments.environments or Path(temporary)
        script = ("--script", str(HERE / "script.jsonl"), "--max-model-len", "262144", "--num-device-blocks", "65536")
        async with running_service("executor_svc.fake", *script, "--log-level", "warning") as executor:
            flags = ("--executor", executor.address, "--openai-listen", "127.0.0.1:0", "--log-level", "warning")
            async with running_service("scheduler_svc", *flags) as scheduler:
                for name in arguments.only or LIBRARIES:
                    url = f"http://{scheduler.other_addresses['openai']}"
                    failures += await _try(LIBRARIES[name], folder / name, url)
    print("\n".join(("", *failures)))
    return int(bool(failures))


async def _try(library: Library, environment: Path, url: str) -> list[str]:
    """Install a library and run its quickstarts; print its row, and return what failed, in words."""
    python = environment / "bin" / "python"
    if not python.exists():
        await _run(sys.executable, "-m", "venv", str(environment), timeout_s=INSTALL_TIMEOUT_S)
    await _run(str(python), "-m", "pip", "install", "-q", *library.requirements, timeout_s=INSTALL_TIMEOUT_S)
    names = [requirement.split("[")[0] for requirement in library.requirements]
    of_versions = f"from importlib.metadata import version; print(*map(version, {names}))"
    versions = (await _run(str(python), "-c", of_versions, timeout_s=60)).split()
    title = ", ".join(f"{name} {version}" for name, version in zip(names, versions, strict=True))
    quickstart = str(HERE / "quickstarts" / library.quickstart)
    lines = await _run(
        str(python), quickstart, timeout_s=QUICKSTART_TIMEOUT_S, environment=_variables(url, environment)
    )
    results = [json.loads(line) for line in lines.splitlines() if line.startswith('{"check"')]
    failed = [result for result in results if result["error"]]
    ended = "" if lines.endswith("end\n") else "it did not run to its end"
    print(
        f"| {title} | {len(results) - len(failed)} | {', '.join(each['check'] for each in failed)} {ended} |",
        flush=True,
    )
    return [f"{title}, {each['check']}: {each['error']}" for each in failed] + ([f"{title}: {lines}"] if ended else [])


def _variables(url: str, home: Path) -> dict[str, str]:
    """Return all that a library finds in its environment: nothing of ours."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OCTAVO_MODEL": "fake",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
    }


async def _run(*command: str, timeout_s: float, environment: dict[str, str] | None = None) -> str:
    """Run a command; return all that it wrote."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    text = output.decode()
    if environment is None and process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{text}")
    return text


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
