"""The other ranks of a group on this machine: the same program, started with the variables of a launcher."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from executor_svc.parallel.ranks import RankAssignment
from octavo_shared.errors import ModelLoadError


class LocalRanks:
    """Ranks 1 to `size` - 1 as child processes.

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
