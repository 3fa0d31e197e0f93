"""The CPUs that this process may use: its affinity mask, which of them share a core, and the quota of its container.

Two hardware threads of a core share its arithmetic, so a second thread on it gains nothing. A container that may use
less than it sees is stopped for the rest of each period once its quota is used up: fewer threads get as much done.
"""

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from executor_svc.device.cgroups import control_groups, read_text


@dataclass(frozen=True, slots=True)
class AvailableCpus:
    """What this process may compute on."""

    num_cpus: int  # as the system counts them: hardware threads
    num_cores: int
    quota: float | None  # CPUs that the container may use on average; None: all

    def num_threads(self, num_ranks: int = 1) -> int:
        """Return how many threads are worth it for each of `num_ranks` processes that share the CPUs."""
        usable = self.num_cores if self.quota is None else min(self.num_cores, math.floor(self.quota))
        return max(1, usable // num_ranks)


def read_cpus(root: Path = Path("/"), cpu_ids: Iterable[int] | None = None) -> AvailableCpus:
    """Ask the system.

    Args:
        root: Of its files.
        cpu_ids: The affinity mask; None: of this process.
    """
    allowed = sorted(os.sched_getaffinity(0) if cpu_ids is None else cpu_ids)
    return AvailableCpus(len(allowed), len({_core(root, cpu_id) for cpu_id in allowed}), _quota(root))


def _core(root: Path, cpu_id: int) -> str:
    """Return a name of the core that a CPU belongs to: the list of its CPUs."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu_id}/topology"
    return read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list") or str(cpu_id)


def _quota(root: Path) -> float | None:
    """Return the least quota of the groups that this process is in; cgroup v2 and v1."""
    quotas = [_quota_of(group) for group in control_groups(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(directory: Path) -> float | None:
    words = read_text(directory / "cpu.max").split() or [
        read_text(directory / "cpu.cfs_quota_us"),
        read_text(directory / "cpu.cfs_period_us"),
    ]
    with suppress(ValueError):  # "max", or no such files
        quota, period = map(int, words)
        return quota / period if quota > 0 and period > 0 else None
    return None
