"""Which rank of which group a process is, by the variables that launchers set.

torchrun, LeaderWorkerSet recipes and our own `--tp` on one machine all say it in the same words: RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo_shared.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A place in a group. The rendezvous is at `master_address`, a host of rank 0, and `master_port`."""

    rank: int
    size: int
    local_rank: int
    master_address: str
    master_port: int

    def to_environment(self) -> dict[str, str]:
        """Return the variables that say it."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def assignment_from(environ: Mapping[str, str], size: int) -> RankAssignment | None:
    """Return what a launcher assigned to this process; None: there was none, or one for a single rank.

    Args:
        environ: The process's environment.
        size: How many ranks the configuration asks for.

    Raises: ModelLoadError: the variables are incomplete, not numbers, or of a group of another size.
    """
    if environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in environ:
        return None
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if world_size != size:
        raise ModelLoadError(f"the launcher started a group of {world_size} processes (WORLD_SIZE), but --tp is {size}")
    if not 0 <= rank < world_size:
        raise ModelLoadError(f"RANK is {rank}; in a group of {world_size} it must be 0 to {world_size - 1}")
    return RankAssignment(
        rank=rank,
        size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", default=rank),
        master_address=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT"),
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        shown = "unset" if text is None else repr(text)
        raise ModelLoadError(f"{name} is {shown}; a process group requires a number")
    return int(text)
