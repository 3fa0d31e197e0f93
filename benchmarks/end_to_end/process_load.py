"""Who used the cores while an engine ran: from /proc, so Linux only."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


def process_tree(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for child, fields in _all_stats():
        children.setdefault(int(fields[1]), []).append(child)
    tree, unseen = [], [pid]
    while unseen:
        tree.append(unseen.pop())
        unseen.extend(children.get(tree[-1], []))
    return tree


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of processes, and of their children that ended, up to now."""
    wanted, ticks = set(pids), 0
    for pid, fields in _all_stats():
        if pid in wanted:
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


def _all_stats() -> Iterable[tuple[int, list[str]]]:
    """Yield each process with the fields of its stat file, from the third one, its state."""
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        yield int(path.parent.name), text.rpartition(")")[2].split()


def busy_seconds() -> float:
    """Return the time that all cores together were busy since the start of the machine, stolen time included."""
    fields = (_PROC / "stat").read_text(encoding="utf-8").split("\n")[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """What a stretch of time took.

    Attributes:
        engine_s: CPU time of the engine that ran.
        idle_engines_s: Of those that waited for their turn.
        foreign_s: Of everything else; the hypervisor's share too, where it tells it.
        foreign_share: Of all cores; includes the idle engines.
    """

    engine_s: float
    idle_engines_s: float
    foreign_s: float
    foreign_share: float


class LoadMeter:
    """Reads the counters at its making and at `stop`.

    Args:
        engine: Process of the engine that runs.
        idle_engines: Those of the others.
    """

    def __init__(self, engine: int, idle_engines: Iterable[int]) -> None:
        self._engine = engine
        self._idle_engines = tuple(idle_engines)
        self._began_at = time.monotonic()
        self._began = self._read()

    def stop(self) -> Load:
        """Return what happened since."""
        busy, engine, idle = (now - before for now, before in zip(self._read(), self._began, strict=True))
        core_seconds = max(time.monotonic() - self._began_at, 1e-9) * (os.cpu_count() or 1)
        foreign = max(0.0, busy - engine - idle)
        return Load(engine, idle, foreign, (foreign + idle) / core_seconds)

    def _read(self) -> tuple[float, float, float]:
        idle = [pid for engine in self._idle_engines for pid in process_tree(engine)]
        return busy_seconds(), cpu_seconds(process_tree(self._engine)), cpu_seconds(idle)
