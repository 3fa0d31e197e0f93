"""The grpcurl session of the README, typed word for word with the real binary."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sessions import Typed, console_sessions, find_grpcurl, is_as_printed

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

README = Path(__file__).parents[2] / "README.md"
ADDRESS, ADMIN_ADDRESS = "127.0.0.1:50051", "127.0.0.1:50052"


def grpcurl_session() -> list[Typed]:
    sessions = console_sessions(README.read_text(encoding="utf-8"))
    [session] = [session for session in sessions if any(typed.command.startswith("grpcurl ") for typed in session)]
    return session


@pytest.fixture(scope="module")
def addresses(demo_model: Path) -> Iterator[tuple[str, str]]:
    """Run `octavo up` with the demo model, which is its default; yield where clients and operators are served."""
    any_port = "127.0.0.1:0"
    command = [sys.executable, "-m", "octavo.cli", "up", "--listen", any_port, "--admin-listen", any_port]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        serving = re.match(r"serving smollm2 on (\S+);", process.stdout.readline())
        assert serving, "octavo up did not say where it serves"
        assert process.stdout.readline().startswith("kernels: ")
        operators = re.match(r"operators: (?:http://)?([^/\s]+)", process.stdout.readline())
        assert operators, "octavo up did not say where it serves operators"
        yield serving[1], operators[1]
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_the_grpcurl_session_of_the_readme_works_as_printed(addresses: tuple[str, str]) -> None:
    session = grpcurl_session()
    assert [Path(shlex.split(typed.command)[0]).name for typed in session] == ["grpcurl"] * 2
    for typed in session:
        words = shlex.split(typed.command.replace(ADDRESS, addresses[0]).replace(ADMIN_ADDRESS, addresses[1]))
        run = subprocess.run([find_grpcurl(), *words[1:]], capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr
        assert is_as_printed(typed.output, run.stdout), f"$ {typed.command}\n{run.stdout}"
