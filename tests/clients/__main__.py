"""`python -m tests.clients`: client libraries run their quickstarts against Octavo, each in its own environment.

pip installs each library into a temporary folder, and npm the agents. Base URL and key come from the environment, and
`script.jsonl` plays the model. It prints a table; docs/openai.md has the last one.

Exit status: 0, all passed; 1, one did not.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.agents import AGENTS, try_agent
from tests.clients.commands import run_command
from tests.support.processes import running_service

HERE = Path(__file__).parent
QUICKSTART_TIMEOUT_S = 300.0
MODEL = "fake"


@dataclass(frozen=True, slots=True)
class Library:
    """What pip installs, and the file of its quickstarts."""

    requirements: Sequence[str]
    quickstart: str


LIBRARIES = {
    "openai": Library(["openai"], "with_openai.py"),
    "openai-2": Library(["openai<3"], "with_openai.py"),
    "openai-agents": Library(["openai-agents"], "with_openai_agents.py"),
    "pydantic-ai": Library(["pydantic-ai-slim[openai,anthropic]"], "with_pydantic_ai.py"),
    "instructor": Library(["instructor[anthropic]"], "with_instructor.py"),
    "langchain": Library(["langchain-openai", "langchain-anthropic"], "with_langchain.py"),
    "anthropic": Library(["anthropic"], "with_anthropic.py"),
}


async def main(words: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").split("\n")[0])
    names = [*LIBRARIES, *AGENTS]
    parser.add_argument("--only", choices=names, nargs="+", metavar="NAME", help=f"some of {', '.join(names)}")
    parser.add_argument("--environments", type=Path, metavar="DIRECTORY", help="keep the environments there")
    arguments = parser.parse_args(words)
    failures: list[str] = []
    print("| client | passed | failed |\n|---|---:|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="octavo-clients-") as temporary:
        folder = arguments.environments or Path(temporary)
        script = ("--script", str(HERE / "script.jsonl"), "--max-model-len", "262144", "--num-device-blocks", "65536")
        async with running_service("executor_svc.fake", *script, "--log-level", "warning") as executor:
            flags = ("--executor", executor.address, "--openai-listen", "127.0.0.1:0", "--log-level", "warning")
            async with running_service("scheduler_svc", *flags) as scheduler:
                url = f"http://{scheduler.other_addresses['openai']}"
                for name in arguments.only or names:
                    if name in LIBRARIES:
                        title, num_passed, failed = await _try(LIBRARIES[name], folder / name, url)
                    else:
                        title, said = await try_agent(AGENTS[name], folder / name, url, MODEL)
                        num_passed, failed = int(not said), {"edits a file": said} if said else {}
                    print(f"| {title} | {num_passed} | {', '.join(failed)} |", flush=True)
                    failures += [f"{title}, {check}: {error}" for check, error in failed.items()]
    print("\n".join(("", *failures)))
    return int(bool(failures))


async def _try(library: Library, environment: Path, url: str) -> tuple[str, int, dict[str, str]]:
    """Install a library and run its quickstarts.

    Returns its name with its version, how many quickstarts passed, and the errors of the others by name.
    """
    python = str(environment / "bin" / "python")
    await run_command(sys.executable, "-m", "venv", str(environment))
    await run_command(python, "-m", "pip", "install", "-q", *library.requirements)
    names = [re.split(r"[\[<]", requirement)[0] for requirement in library.requirements]
    of_versions = f"from importlib.metadata import version; print(*map(version, {names}))"
    versions = (await run_command(python, "-c", of_versions)).split()
    quickstart = str(HERE / "quickstarts" / library.quickstart)
    variables = _variables(url, environment)
    written = await run_command(python, quickstart, timeout_s=QUICKSTART_TIMEOUT_S, environment=variables)
    results = [json.loads(line) for line in written.splitlines() if line.startswith('{"check"')]
    failed = {result["check"]: result["error"] for result in results if result["error"]}
    num_passed = len(results) - len(failed)
    if not written.endswith("end\n"):
        failed["runs to its end"] = written
    return ", ".join(map(" ".join, zip(names, versions, strict=True))), num_passed, failed


def _variables(url: str, home: Path) -> dict[str, str]:
    """Return all that a library finds in its environment: nothing of ours."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OCTAVO_MODEL": MODEL,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
    }


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
