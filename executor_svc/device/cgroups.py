"""The control groups that this process is in, which limit what a container may use; cgroup v2 and v1."""

from collections.abc import Iterator
from pathlib import Path


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process' groups that a controller may limit, the innermost first."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup" if not controllers else root / "sys/fs/cgroup" / controllers
        if not controllers or controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            yield from (mount / directory for directory in (group, *group.parents))


def read_text(path: Path) -> str:
    """Return what a file of the system says; "": it is not there."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
