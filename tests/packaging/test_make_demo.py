"""Which build of torch `make demo` installs, with stand-ins for pip and uv that note how they are called."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# pip: torch is installed or not, and what would be installed is a report.
PYTHON = """#!/bin/sh
case "$*" in
  *" show "*) exit $SHOW_STATUS ;;
  *" --dry-run "*) echo "$REPORT" ;;
  *" install "*) echo "pip $*" >> "$CALLS" ;;
esac
"""
UV = '#!/bin/sh\necho "uv $*" >> "$CALLS"\n'
OCTAVO = '#!/bin/sh\necho "octavo $*" >> "$CALLS"\n'

FOR_CPUS = '{"install": [{"metadata": {"name": "torch", "version": "2.13.0+cpu"}}]}'
FOR_CUDA = '{"install": [{"metadata": {"name": "torch"}}, {"metadata": {"name": "nvidia-cublas"}}]}'

SERVICES = "pip -m pip --disable-pip-version-check install -qq --constraint constraints.txt"


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("is_installed", "report", "has_uv", "says", "call"),
    [
        (True, FOR_CUDA, True, "torch is in ", None),
        (False, FOR_CPUS, True, "torch, in the build for CPUs that pip finds", f"{SERVICES} torch"),
        (
            *(False, FOR_CUDA, True, "torch, in the build that uv chooses for this machine"),
            "uv pip install --quiet --python {python} --torch-backend=auto --constraint constraints.txt torch",
        ),
        (False, FOR_CUDA, False, "torch with its CUDA libraries, several GB to download", f"{SERVICES} torch"),
    ],
)
def test_torch_is_the_build_that_suits_the_machine(
    is_installed: bool, report: str, has_uv: bool, says: str, call: str | None, tmp_path: Path
) -> None:
    venv, programs, calls = tmp_path / "venv", tmp_path / "programs", tmp_path / "calls"
    write_program(venv / "bin" / "python", PYTHON)
    write_program(venv / "bin" / "octavo", OCTAVO)
    for name in ("sh", "test", "grep", "touch"):
        found = shutil.which(name)
        assert found is not None
        write_program(programs / name, f'#!{shutil.which("sh")}\nexec {found} "$@"\n')
    if has_uv:
        write_program(programs / "uv", UV)
    make = shutil.which("make")
    assert make is not None
    environment = {
        "PATH": str(programs),
        "CALLS": str(calls),
        "REPORT": report,
        "SHOW_STATUS": str(int(not is_installed)),
    }
    ended = subprocess.run(
        [make, "-C", str(ROOT), "--no-print-directory", f"VENV={venv}", "demo"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    begin, first, second, *_ = ended.stdout.splitlines()
    assert begin.startswith(f"installing: into {venv}")
    assert first.startswith(f"installing: {says}")
    assert second == "installing: Octavo and what it needs"
    expected = [] if call is None else [call.format(python=venv / "bin" / "python")]
    expected += [f"{SERVICES} --editable .[scheduler,executor]", "octavo demo"]
    assert calls.read_text().splitlines() == [
        "pip -m pip --disable-pip-version-check install -qq --upgrade pip",
        *expected,
    ]
