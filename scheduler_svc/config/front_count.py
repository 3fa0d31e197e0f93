"""How many front processes `--fronts auto` means, from the CPUs that this process may use."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from octavo_shared.process.events import Event
from scheduler_svc.config.scheduler_config import SchedulerConfig

log = logging.getLogger(__name__)

# On fewer CPUs a front would only take turns with the engine, and with an executor or a client on the same machine.
LEAST_CPUS = 4

# Fronts need some seven times the engine's CPU time for each token (docs/benchmarks.md): more fronts would wait for it.
MOST_FRONTS = 7


def choose_fronts(config: SchedulerConfig) -> SchedulerConfig:
    """Return the configuration with a number in place of `auto`, and log which number and why."""
    if config.fronts != "auto":
        return config
    cpus = usable_cpus()
    number = fronts_for(cpus)
    why = (
        f"--fronts auto: half of the {cpus:g} CPUs that this process may use, at most {MOST_FRONTS}"
        if number
        else f"--fronts auto: no fronts on fewer than {LEAST_CPUS} CPUs; this process may use {cpus:g}"
    )
    log.info(Event("fronts_chosen", fronts=number, cpus=cpus, why=why))
    return config.model_copy(update={"fronts": str(number)})


def fronts_for(cpus: float) -> int:
    """Return the number of fronts for so many CPUs.

    Half of the CPUs: the other half is for the engine, gRPC's threads, and executors and clients on the same machine.
    """
    return 0 if cpus < LEAST_CPUS else min(MOST_FRONTS, int(cpus // 2))


def usable_cpus(root: Path = Path("/")) -> float:
    """Return how many CPUs this process may use: those that it is bound to, and no more than its cgroups allow.

    Args:
        root: The folder with `proc` and `sys`.
    """
    return min(float(len(os.sched_getaffinity(0))), *cgroup_limits(root), float("inf"))


def cgroup_limits(root: Path) -> Iterator[float]:
    """Yield the limits of the cgroups of this process, in CPUs, of version 2 and of version 1."""
    for line in _words(root / "proc/self/cgroup", "\n"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for cgroup in _with_parents(root / "sys/fs/cgroup", path):
                quota, *period = _words(cgroup / "cpu.max") or ["max"]
                if quota != "max":
                    yield int(quota) / int(period[0])
        elif "cpu" in controllers.split(","):
            for cgroup in _with_parents(root / "sys/fs/cgroup/cpu", path):
                quotas, periods = _words(cgroup / "cpu.cfs_quota_us"), _words(cgroup / "cpu.cfs_period_us")
                if quotas and periods and int(quotas[0]) > 0:
                    yield int(quotas[0]) / int(periods[0])


def _with_parents(tree: Path, path: str) -> list[Path]:
    """Return a cgroup and its ancestors. A container may see its own as the root of the tree, under any path."""
    inner = Path(path.lstrip("/"))
    return [tree / each for each in (inner, *inner.parents)] if path != "/" else [tree]


def _words(path: Path, separator: str | None = None) -> list[str]:
    """Return the words of a file; none: it is not there."""
    try:
        return [word for word in path.read_text(encoding="utf-8").split(separator) if word]
    except OSError:
        return []
