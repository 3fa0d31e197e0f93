from pathlib import Path

import pytest

from executor_svc.device.cpus import AvailableCpus, read_cpus
from tests.support.each_row import each_row

SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
V2, V1 = "0::/pod/app\n", "3:cpuset:/\n2:cpu,cpuacct:/app\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, AvailableCpus(4, 4, None), id="nothing is known"),
        pytest.param(
            {SIBLINGS.format(cpu): siblings for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"])},
            AvailableCpus(4, 2, None),
            id="two hardware threads a core",
        ),
        pytest.param(
            {"proc/self/cgroup": V2, "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n"},
            AvailableCpus(4, 4, None),
            id="cgroup v2 without a quota",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/pod/app/cpu.max": "350000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            },
            AvailableCpus(4, 4, 1.5),
            id="the quota of a group above",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            AvailableCpus(4, 4, 2.0),
            id="cgroup v1",
        ),
    ],
)
def test_what_the_system_says_is_read(files: dict[str, str], expected: AvailableCpus, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert read_cpus(tmp_path, range(4)) == expected


@each_row(
    (AvailableCpus(8, 4, None), 1, 4),
    (AvailableCpus(8, 4, 2.9), 1, 2),
    (AvailableCpus(8, 8, 0.5), 1, 1),
    (AvailableCpus(8, 8, None), 3, 2),
    (AvailableCpus(2, 2, None), 3, 1),
)
def test_a_rank_has_a_thread_for_each_core_that_is_its_own(
    cpus: AvailableCpus, num_ranks: int, num_threads: int
) -> None:
    assert cpus.num_threads(num_ranks) == num_threads
