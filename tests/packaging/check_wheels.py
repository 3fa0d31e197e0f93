"""`python -m tests.packaging.check_wheels`: what would be published is complete, and works away from this checkout.

It builds the sdist and the wheel of a clean copy, looks into both, installs the wheel in two new virtual
environments, octavo[scheduler] in one and octavo[executor] in the other, and lets the two serve a request.
Ends with 1 at the first thing that is wrong. Needs the demo model (`octavo model prepare smollm2`), and the network
for what pip does not find on this machine. Read next: published_files.py, which looks into the archives.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.packaging.published_files import check_archives

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 600.0
COMMANDS = {"scheduler": ("octavo", "octavo-scheduler"), "executor": ("octavo", "octavo-executor")}
WAIT_UNTIL_READY = """\
import asyncio, sys
from octavo import Client

async def main() -> None:
    async with Client(sys.argv[1]) as client:
        await client.wait_until_ready(120)

asyncio.run(main())
"""
TYPED_PROGRAM = """\
from octavo import LLM, SamplingParams

with LLM("smollm2") as llm:
    text: str = llm.generate("The sky is", SamplingParams(max_tokens=16))[0].outputs[0].text
"""
WRONG_PROGRAM = TYPED_PROGRAM.replace("text: str", "text: int")


class CheckError(Exception):
    """Something that would be published is wrong; says what."""


class Check:
    """Runs programs in a folder of its own, away from the checkout, within one time limit for all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started_s = time.monotonic()
        # Neither the checkout nor what its virtual environment sets may help.
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OCTAVO_", "VIRTUAL_"))
        }

    @property
    def elapsed_s(self) -> float:
        """Return the time since the beginning, in seconds."""
        return time.monotonic() - self._started_s

    def say(self, what: str) -> None:
        """Print what has been found to be right."""
        print(f"{self.elapsed_s:5.0f} s  {what}", flush=True)

    def run(self, *command: str | Path) -> str:
        """Return what a program prints on stdout. Raises CheckError: it fails, or the time is over."""
        run = self.finish(*command)
        if run.returncode != 0:
            raise CheckError(f"{_shown(command)} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
        return run.stdout

    def finish(self, *command: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run a program and return how it ended, whatever that is. Raises CheckError: the time is over."""
        left_s = max(1.0, LIMIT_S - self.elapsed_s)
        try:
            return subprocess.run(
                [str(word) for word in command],
                capture_output=True,
                text=True,
                check=False,
                cwd=self.folder,
                env=self._environment,
                timeout=left_s,
            )
        except subprocess.TimeoutExpired as error:
            raise CheckError(f"{_shown(command)} did not end within the {LIMIT_S:.0f} s that all may take") from error

    @contextmanager
    def service(self, *command: str | Path) -> Iterator[str]:
        """Run a service on a free port; yield its HOST:PORT. Raises CheckError: it does not serve, or end in order."""
        log = self.folder / f"{Path(command[0]).name}.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*map(str, command), "--listen", "127.0.0.1:0", "--exit-on-stdin-close"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=self.folder,
                env=self._environment,
            )
            assert process.stdout is not None
            try:
                yield self._address(process.stdout, command, log)
                process.terminate()
                if (status := process.wait(timeout=30)) != 0:
                    raise CheckError(f"{_shown(command)} ended with {status} after SIGTERM:\n{log.read_text()}")
            finally:
                process.kill()
                process.communicate()

    def _address(self, stdout: Iterator[str], command: Sequence[str | Path], log: Path) -> str:
        for line in stdout:
            if match := re.fullmatch(r"octavo \w+ serving on (\S+)", line.strip()):
                return match[1]
        raise CheckError(f"{_shown(command)} ended before it served:\n{log.read_text()}")


def main() -> int:
    """Return 0 if all is right."""
    with tempfile.TemporaryDirectory(prefix="octavo-wheels-") as name:
        check = Check(Path(name))
        try:
            wheel = _build(check)
            with ThreadPoolExecutor(2) as both:
                environments = dict(
                    zip(COMMANDS, both.map(lambda extra: _install(check, wheel, extra), COMMANDS), strict=True)
                )
            _check_types(check, environments["scheduler"])
            _check_request(check, environments["scheduler"], environments["executor"])
        except CheckError as error:
            print(f"check_wheels: {error}", file=sys.stderr)
            return 1
        check.say("all is right")
    return 0


def _build(check: Check) -> Path:
    """Build sdist and wheel of a clean copy, look into them, and return the wheel."""
    source = check.folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for path in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / path).is_file():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / path, source / path)
    check.run(sys.executable, "-m", "build", "--outdir", check.folder / "dist", source)
    check.run(sys.executable, "-m", "build", "--wheel", "--outdir", check.folder / "direct", source)
    [wheel], [sdist], [direct] = (
        list(check.folder.glob(pattern)) for pattern in ("dist/*.whl", "dist/*.tar.gz", "direct/*.whl")
    )
    mistakes = check_archives(source, wheel=wheel, sdist=sdist, direct=direct, private=[REPOSITORY, check.folder])
    if mistakes:
        raise CheckError("; ".join(mistakes))
    check.say(f"{sdist.name} and {wheel.name} are complete; the sdist makes the same wheel as the checkout")
    return wheel


def _install(check: Check, wheel: Path, extra: str) -> Path:
    """Install octavo[EXTRA] in a new environment, try its commands, and return the folder of its programs."""
    home = check.folder / extra
    venv.create(home)
    programs = home / "bin"
    requirement = f"octavo[{extra}] @ {wheel.as_uri()}"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    constraints = REPOSITORY / "constraints.txt"
    check.run(*pip, "install", "--quiet", "--no-compile", "--constraint", constraints, requirement)
    check.run(*pip, "check")
    version = wheel.name.split("-")[1]
    for command in COMMANDS[extra]:
        if (shown := check.run(programs / command, "--version").strip()) != f"octavo {version}":
            raise CheckError(f"{command} --version prints {shown!r}, and the wheel is {wheel.name}")
        if "--help" not in check.run(programs / command, "--help"):
            raise CheckError(f"{command} --help does not print its flags")
    origin = check.run(programs / "python", "-c", "import octavo; print(octavo.__file__)")
    if not Path(origin).is_relative_to(home):
        raise CheckError(f"octavo is imported from {origin.strip()}, and not from the wheel")
    check.say(f"octavo[{extra}] installs, `pip check` finds nothing, {' and '.join(COMMANDS[extra])} start")
    return programs


def _check_types(check: Check, programs: Path) -> None:
    """Let mypy find the types of the wheel: it passes a right program and refuses a wrong one."""
    command: list[str | Path] = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", check.folder / "mypy"]
    command += ["--python-executable", programs / "python"]
    for name, text, status in (("right.py", TYPED_PROGRAM, 0), ("wrong.py", WRONG_PROGRAM, 1)):
        (check.folder / name).write_text(text)
        run = check.finish(*command, name)
        if run.returncode != status or (status and "expression has type" not in run.stdout):
            raise CheckError(f"mypy on {name} ends with {run.returncode}, {status} is right:\n{run.stdout}{run.stderr}")
    check.say("mypy finds the types")


def _check_request(check: Check, scheduler: Path, executor: Path) -> None:
    """Let the scheduler of one environment and the executor of the other answer a prompt."""
    model = check.run(executor / "octavo", "model", "path", "smollm2").strip()
    with (
        check.service(executor / "octavo-executor", "--model", model, "--kv-cache-gib", "0.5") as executor_address,
        check.service(
            scheduler / "octavo-scheduler", "--executor", executor_address, "--admin-listen", "127.0.0.1:0"
        ) as address,
    ):
        check.run(scheduler / "python", "-c", WAIT_UNTIL_READY, address)
        command = (scheduler / "octavo", "generate", "--raw", "The sky is", "--max-tokens", "8", "--temperature", "0")
        answer = check.run(*command, "--address", address)
    if not answer.strip():
        raise CheckError("`octavo generate` printed nothing")
    check.say(f"`octavo generate` answers: The sky is{answer.rstrip()}")


def _shown(command: Sequence[str | Path]) -> str:
    return " ".join(Path(word).name if isinstance(word, Path) else word for word in command)


if __name__ == "__main__":
    sys.exit(main())
