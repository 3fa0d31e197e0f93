"""Claude Code and Codex CLI mend a file, set up as docs/messages.md and docs/responses.md say."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.commands import run_command

DOCS = Path(__file__).parents[2] / "docs"
TIMEOUT_S = 480.0


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent on npm.

    Attributes:
        package: What npm installs.
        command: What is run; `script.jsonl` plays its model.
        page: Of the documentation, with its set-up.
    """

    package: str
    command: Sequence[str]
    page: str


AGENTS = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        ("claude", "--permission-mode", "acceptEdits", "-p", "Please fix the typo in a.txt"),
        "messages.md",
    ),
    "codex": Agent(
        "@openai/codex",
        ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "Please mend a.txt"),
        "responses.md",
    ),
}


async def try_agent(agent: Agent, folder: Path, url: str, model: str) -> tuple[str, str]:
    """Install an agent and let it mend a file; return its name with its version, and what went wrong in words."""
    await run_command("npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", agent.package)
    home, project = folder / "home", folder / "project"
    for directory in (home / ".codex", project):
        directory.mkdir(parents=True, exist_ok=True)
    text = project / "a.txt"
    text.write_text("It is a tpyo.\n")
    page = (DOCS / agent.page).read_text(encoding="utf-8").replace("http://127.0.0.1:8080", url)
    # One token a byte: the prompts are longer than with a real tokenizer.
    page = re.sub(r"Qwen/Qwen3-4B|smollm2", model, page).replace("= 32768", "= 262144")
    [toml] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL) or [""]
    (home / ".codex" / "config.toml").write_text(toml)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **dict(re.findall(r"export (\w+)=(\S+)", page))}
    program = str(folder / "node_modules" / ".bin" / agent.command[0])
    version = await run_command(program, "--version", environment=environment)
    [number] = re.findall(r"\d+\.\d+\.\d+", version)[-1:]
    said = await run_command(program, *agent.command[1:], timeout_s=TIMEOUT_S, environment=environment, cwd=project)
    is_done = text.read_text() == "It is a typo.\n" and "The typo is fixed." in said
    return f"{agent.package} {number}", "" if is_done else said
