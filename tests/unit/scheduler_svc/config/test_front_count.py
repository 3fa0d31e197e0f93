"""How many fronts `--fronts auto` is, and what bounds the CPUs that it counts."""

import logging
import os
from pathlib import Path

import pytest

from octavo_shared.process.config import ConfigError, load_config
from scheduler_svc.config.front_count import cgroup_limits, choose_fronts, fronts_for, usable_cpus
from scheduler_svc.config.scheduler_config import SchedulerConfig
from tests.support.each_row import each_row


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be bound to eight CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def cgroups(root: Path, own: str, **contents: str) -> Path:
    """Write the files of cgroups: `own` is /proc/self/cgroup, and __ in a name stands for /."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for name, content in contents.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_a_number_is_taken_as_it_is() -> None:
    assert choose_fronts(SchedulerConfig(fronts="3")).num_fronts == 3
    assert SchedulerConfig.model_validate({"fronts": 64}).num_fronts == 64


@each_row("-1", "65", "some", "1.5", "")
def test_anything_else_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="in the format that --help describes"):
        load_config(SchedulerConfig, [f"--fronts={wrong}"], {})


@each_row((0.5, 0), (2, 0), (3.9, 0), (4, 2), (5, 2), (6, 3), (7.5, 3), (8, 4), (14, 7), (128, 7))
def test_auto_is_half_of_the_cpus_and_none_on_few(cpus: float, number: int) -> None:
    assert fronts_for(cpus) == number


@pytest.mark.usefixtures("on")
def test_the_log_says_what_was_chosen_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scheduler_svc.config.front_count.cgroup_limits", lambda _: iter(()))
    caplog.set_level(logging.INFO)
    assert choose_fronts(SchedulerConfig(fronts="auto")).num_fronts == 4
    monkeypatch.setattr("scheduler_svc.config.front_count.cgroup_limits", lambda _: iter((2.5, 6.0)))
    assert choose_fronts(SchedulerConfig(fronts="auto")).num_fronts == 0
    many, none = (record.getMessage() for record in caplog.records)
    assert "fronts=4" in many
    assert "half of the 8 CPUs that this process may use, at most 7" in many
    assert "fronts=0" in none
    assert "no fronts on fewer than 4 CPUs; this process may use 2.5" in none


@pytest.mark.usefixtures("on")
def test_without_limits_the_cpus_that_the_process_is_bound_to_count(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == 8
    assert usable_cpus(cgroups(tmp_path, "0::/\n", **{"cpu.max": "max 100000\n"})) == 8


@pytest.mark.usefixtures("on")
def test_the_smallest_limit_of_a_cgroup_and_of_those_around_it_counts(tmp_path: Path) -> None:
    root = cgroups(
        tmp_path,
        "0::/pods/one\n",
        **{"pods__one__cpu.max": "600000 100000\n", "pods__cpu.max": "250000 50000\n", "cpu.max": "max 100000\n"},
    )
    assert sorted(cgroup_limits(root)) == [5, 6]
    assert usable_cpus(root) == 5


@pytest.mark.usefixtures("on")
def test_cgroups_of_version_1_count_too(tmp_path: Path) -> None:
    own = "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n0::/\n"
    quota = {"cpu__box__cpu.cfs_quota_us": "350000\n", "cpu__box__cpu.cfs_period_us": "100000\n"}
    root = cgroups(tmp_path, own, **quota, **{"cpu__cpu.cfs_quota_us": "-1\n", "cpu__cpu.cfs_period_us": "100000\n"})
    assert usable_cpus(root) == 3.5


def test_this_machine_says_something_sensible() -> None:
    assert 0 < usable_cpus() <= (os.cpu_count() or 1)
