"""What `make demo` installs and says, with stand-ins for python, pip, uv and df that note how they are called."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.each_row import each_row

ROOT = Path(__file__).parents[2]

# pip: torch is installed or not, and what would be installed is a report.
PYTHON = """#!/bin/sh
case "$*" in $FAILING) exit 1 ;; esac
case "$*" in
  *" show "*) exit $SHOW_STATUS ;;
  *" --dry-run "*) echo "$REPORT"; ;;
  *" install "*) echo "pip $*" >> "$CALLS" ;;
  *version_info*) echo $VERSION; exit $VERSION_STATUS ;;
esac
"""
UV = '#!/bin/sh\necho "uv $*" >> "$CALLS"\n'
DF = '#!/bin/sh\necho "Filesystem 1024-blocks Used Available"\necho "disk 100000000 1 $FREE_KB"\n'
OCTAVO = '#!/bin/sh\necho "octavo $*" >> "$CALLS"\n'

FOR_CPUS = '{"install": [{"metadata": {"name": "torch", "version": "2.13.0+cpu"}}]}'
FOR_CUDA = '{"install": [{"metadata": {"name": "torch"}}, {"metadata": {"name": "nvidia-cublas"}}]}'

SERVICES = "pip -m pip --disable-pip-version-check install -qq --constraint constraints.txt"


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def make_demo(
    folder: Path, *, has_uv: bool = False, has_venv: bool = True, **variables: object
) -> tuple[int, str, str, list[str]]:
    """Return how `make demo` ended, what it said on both streams, and the calls."""
    venv, programs, calls = folder / "venv", folder / "programs", folder / "calls"
    if has_venv:
        write_program(venv / "bin" / "python", PYTHON)
    write_program(venv / "bin" / "octavo", OCTAVO)
    write_program(programs / "python3", PYTHON)
    write_program(programs / "df", DF)
    for name in ("sh", "test", "grep", "touch", "awk", "dirname"):
        found = shutil.which(name)
        assert found is not None
        write_program(programs / name, f'#!{shutil.which("sh")}\nexec {found} "$@"\n')
    if has_uv:
        write_program(programs / "uv", UV)
    make = shutil.which("make")
    assert make is not None
    environment = {
        "SHOW_STATUS": 1,
        "FAILING": "",
        "VERSION": "3.11",
        "VERSION_STATUS": 0,
        "REPORT": FOR_CPUS,
        "FREE_KB": 50_000_000,
        "CALLS": calls,
        "PATH": programs,
        **variables,
    }
    ended = subprocess.run(
        [make, "-C", str(ROOT), "--no-print-directory", f"VENV={venv}", "demo"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={name: str(value) for name, value in environment.items()},
    )
    return ended.returncode, ended.stdout, ended.stderr, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize(
    ("is_installed", "report", "has_uv", "says", "call"),
    [
        (True, FOR_CUDA, True, "torch is in ", None),
        (False, FOR_CPUS, True, "torch, in the build for CPUs that pip finds", f"{SERVICES} torch"),
        (
            *(False, FOR_CUDA, True, "torch, in the build that uv chooses for this machine"),
            "uv pip install --quiet --python {python} --torch-backend=auto --constraint constraints.txt torch",
        ),
        (False, FOR_CUDA, False, "torch with its CUDA libraries: 5 GB, about four minutes", f"{SERVICES} torch"),
    ],
)
def test_torch_is_the_build_that_suits_the_machine(
    is_installed: bool, report: str, has_uv: bool, says: str, call: str | None, tmp_path: Path
) -> None:
    status, stdout, stderr, calls = make_demo(tmp_path, has_uv=has_uv, SHOW_STATUS=int(not is_installed), REPORT=report)
    assert status == 0, stderr
    begin, first, *others = stdout.splitlines()
    assert begin.startswith(f"installing: into {tmp_path / 'venv'}")
    assert first.startswith(f"installing: {says}")
    assert "installing: Octavo and what it needs" in others
    expected = [] if call is None else [call.format(python=tmp_path / "venv" / "bin" / "python")]
    expected += [f"{SERVICES} --editable .[scheduler,executor]", "octavo demo"]
    assert calls == ["pip -m pip --disable-pip-version-check install -qq --upgrade pip", *expected]


def test_before_the_large_download_it_says_how_to_get_the_small_one_and_whether_the_disk_will_do(
    tmp_path: Path,
) -> None:
    for free_kb, warns in ((50_000_000, False), (7_000_000, True)):
        _, stdout, _, _ = make_demo(tmp_path / str(free_kb), REPORT=FOR_CUDA, FREE_KB=free_kb)
        advice = f"{tmp_path / str(free_kb) / 'venv'}/bin/pip install torch==2.13.0 --index-url "
        assert advice in stdout
        assert ("warning: 7 GB are free here, and this takes up to 8" in stdout) == warns


@each_row(
    ({"VERSION": "3.9", "VERSION_STATUS": 1}, "needs Python 3.11 or newer, and python3 is 3.9;"),
    ({"VERSION": "", "VERSION_STATUS": 127}, "needs Python 3.11 or newer, and python3 is not there;"),
    ({"FAILING": "*ensurepip*", "has_venv": False}, "python3 has no module venv,"),
    ({"FAILING": "*-m venv*", "has_venv": False}, "could not install a virtual environment;"),
    ({"FAILING": "*--upgrade*"}, "could not install pip;"),
    ({"FAILING": "*--dry-run*"}, "could not find torch==2.13.0;"),
    ({"FAILING": "*constraints.txt torch"}, "could not install torch;"),
    ({"FAILING": "*--editable*"}, "could not install Octavo;"),
)
def test_an_install_that_fails_ends_with_one_sentence_of_ours(
    given: dict[str, Any], says: str, *, tmp_path_factory: pytest.TempPathFactory
) -> None:
    status, _, stderr, calls = make_demo(tmp_path_factory.mktemp("venv"), **given)
    assert status != 0
    [ours] = [line for line in stderr.splitlines() if line.startswith("install: ")]
    assert ours.startswith(f"install: {says}")
    assert "octavo demo" not in calls
