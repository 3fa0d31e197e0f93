"""What `pip install '.[scheduler]'` brings to a new environment."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
MAX_MIB = 300


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the scheduler in it, installed as people do."""
    directory = tmp_path_factory.mktemp("scheduler")
    venv.create(directory, with_pip=True)
    install = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", f"{ROOT}[scheduler]"]
    subprocess.run(install, check=True, timeout=500)
    return directory


def test_the_scheduler_is_small_and_has_no_torch(environment: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < MAX_MIB * 2**20, f"{size / 2**20:.0f} MiB"
    assert not [name for name in ("torch", "transformers", "triton") if (packages / name).exists()]


@pytest.mark.parametrize("module", ["scheduler_svc", "executor_svc.fake", "octavo.cli"])
def test_its_programs_start(module: str, environment: Path) -> None:
    command = [str(environment / "bin" / "python"), "-P", "-m", module, "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=environment)
    assert run.returncode == 0, run.stderr
    assert "--help" in run.stdout
