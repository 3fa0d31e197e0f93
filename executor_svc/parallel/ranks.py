"""Which rank of which group a process is, by the variables that launchers set; and ranks that this process starts.

torchrun, LeaderWorkerSet recipes and our own `--tp` on one machine all say it in the same words: RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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


class LocalRanks:
    """Ranks 1 to `size` - 1 as child processes: the same program, started with the variables of a launcher.

    Args:
        module: What they run, as after `python -m`.
        argv: Its arguments; the same as ours.
        environ: Our environment.
        size: Size of the group.
        master_port: Where the group meets, on this machine.
    """

    def __init__(
        self, module: str, argv: Sequence[str], environ: Mapping[str, str], size: int, master_port: int
    ) -> None:
        self._size = size
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, size):
            assignment = RankAssignment(rank, size, rank, "127.0.0.1", master_port)
            # -P: a folder named like one of our packages, where the user stands, must not come first.
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *argv],
                env={**environ, **assignment.to_environment(), "LOCAL_WORLD_SIZE": str(size)},
                stdin=subprocess.DEVNULL,
            )

    def check(self) -> None:
        """Raise ModelLoadError if a rank has ended; it has said why on standard error."""
        for rank in self._processes:
            ending = self.ending_of(rank)
            if ending is not None:
                raise ModelLoadError(f"rank {rank} of {self._size} {ending}")

    def exit_causes(self) -> list[str]:
        """Say how the ended ranks ended, in a few words each."""
        return [f"rank {rank} {ending}" for rank in self._processes if (ending := self.ending_of(rank)) is not None]

    def ending_of(self, rank: int) -> str | None:
        """Say how a rank ended; None: it has not."""
        code = self._processes[rank].poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def wait(self, timeout_s: float) -> None:
        """Wait until all have ended; kill the rest after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the running ranks at once."""
        for process in self._processes.values():
            process.kill()
            process.wait()
