from pathlib import Path

from executor_svc.device.host_memory import available_memory_bytes
from tests.support.each_row import each_row

MEMORY = {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable:    2048 kB\n"}
V2 = {**MEMORY, "proc/self/cgroup": "0::/pod/app\n"}
V1 = {**MEMORY, "proc/self/cgroup": "4:memory:/app\n1:cpu:/\n"}
GROUP = "sys/fs/cgroup/pod/app/memory."
OUTER = "sys/fs/cgroup/pod/memory."
OLD = "sys/fs/cgroup/memory/app/memory."


@each_row(
    ({}, None),
    (MEMORY, 2048 * 1024),
    (V2, 2048 * 1024),
    ({**V2, f"{GROUP}max": "max\n", f"{GROUP}current": "5000\n"}, 2048 * 1024),
    ({**V2, f"{GROUP}max": "900000\n", f"{GROUP}current": "300000\n"}, 600_000),
    ({**V2, f"{GROUP}max": "9000000\n", f"{GROUP}current": "3000\n"}, 2048 * 1024),
    (
        {
            **V2,
            f"{GROUP}max": "900000\n",
            f"{GROUP}current": "800000\n",
            f"{GROUP}stat": "anon 1\ninactive_file 200000\nactive_file 50000\n",
        },
        350_000,
    ),
    (
        {
            **V2,
            f"{GROUP}max": "900000\n",
            f"{GROUP}current": "0\n",
            f"{OUTER}max": "700000\n",
            f"{OUTER}current": "700001\n",
        },
        1,
    ),
    (
        {
            **V1,
            f"{OLD}limit_in_bytes": "900000\n",
            f"{OLD}usage_in_bytes": "800000\n",
            f"{OLD}stat": "inactive_file 10\ntotal_inactive_file 20000\n",
        },
        120_000,
    ),
)
def test_the_least_of_what_the_machine_and_its_groups_have_is_available(
    files: dict[str, str], expected: int | None, *, tmp_path: Path
) -> None:
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    assert available_memory_bytes(root) == expected
