"""The units for one machine: systemd takes them, the services take their flags and the file, and their times fit."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from executor_svc.config import ExecutorConfig
from octavo_shared.process.config import load_config
from octavo_shared.process.service_config import ServiceConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig
from tests.docs.pages import REPOSITORY

UNITS = REPOSITORY / "docs" / "systemd"
SERVICES: dict[str, type[ServiceConfig]] = {
    "octavo-executor@.service": ExecutorConfig,
    "octavo-scheduler.service": SchedulerConfig,
}


def setting(unit: str, name: str) -> str:
    """Return a setting of a unit."""
    [line] = [line for line in (UNITS / unit).read_text().splitlines() if line.startswith(f"{name}=")]
    return line.partition("=")[2]


@pytest.mark.parametrize("unit", SERVICES)
def test_the_service_takes_what_its_unit_gives_and_has_the_time_to_end(unit: str) -> None:
    command = setting(unit, "ExecStart").replace("/etc/octavo/octavo.toml", str(UNITS / "octavo.toml"))
    program, *flags = shlex.split(command.replace("%i", "50061"))
    config = load_config(SERVICES[unit], flags, {})
    assert Path(program).name == f"octavo-{config.service}"
    assert int(setting(unit, "TimeoutStopSec")) > config.shutdown_grace_s


@pytest.mark.parametrize("unit", SERVICES)
def test_the_service_may_write_to_its_cache_since_its_home_is_closed(unit: str) -> None:
    assert setting(unit, "ProtectHome") == "yes"
    variables = dict(word.split("=", 1) for word in setting(unit, "Environment").split())
    assert variables["OCTAVO_CACHE_DIR"] == f"/var/cache/{setting(unit, 'CacheDirectory')}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in SERVICES:
        text = (UNITS / unit).read_text().replace(f"/opt/octavo/bin/octavo-{SERVICES[unit].service}", "/bin/true")
        (tmp_path / unit.replace("@", "@50061")).write_text(text)
    names = [str(path) for path in tmp_path.iterdir()]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
