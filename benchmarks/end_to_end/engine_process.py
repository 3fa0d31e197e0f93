"""One engine in a process of its own, with the interpreter of its environment, and the load of the cores meanwhile.

The load of the cores is from /proc, so Linux only.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks.end_to_end.adapters.interface import (
    Description,
    Generation,
    Message,
    Options,
)
from benchmarks.end_to_end.workloads import Request

ROOT = Path(__file__).parents[2]
_LAST_WORDS_BYTES = 2000
_STOP_S = 40.0


class EngineError(Exception):
    """An engine failed; the message says how, with the last line that it printed."""


class EngineProcess:
    """Owns an adapter's process. Use it as a context; nothing that it started survives.

    Args:
        command: Interpreter and arguments.
        log_path: Where what it prints goes.
    """

    def __init__(self, command: Sequence[str], log_path: Path) -> None:
        self._log_path = log_path
        self._log: IO[bytes] = log_path.open("wb")
        # Adapters find `benchmarks` here, and nothing of our environment: a peer has its own packages.
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shared'}", "PYTHONNOUSERSITE": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, cwd=ROOT, env=environment, start_new_session=True
        )
        self._unread = b""

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The adapter's; what it started is below it."""
        return self._process.pid

    def start(self, options: Options, timeout_s: float) -> Description:
        """Load the model.

        Raises:
            EngineError: it ended, said that it failed, or took longer.
        """
        return Description(**self._ask(asdict(options), timeout_s))

    def generate(self, requests: list[Request], timeout_s: float) -> Generation:
        """Compute requests that arrive at once.

        Raises:
            EngineError: as in `start`; or an output has not the length that was asked for.
        """
        generation = Generation(**self._ask({"requests": [asdict(request) for request in requests]}, timeout_s))
        wanted = [request.output_tokens for request in requests]
        if generation.output_tokens != wanted:
            got = sum(generation.output_tokens)
            raise EngineError(f"it made {got} tokens in lengths other than those asked for, {sum(wanted)} together")
        return generation

    def stop(self) -> None:
        """Let it stop by itself; if it does not, kill it, with all that it started."""
        if not self._log.closed:
            family = process_tree(self.pid)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                for pid in family:
                    _kill(pid)
                self._process.wait()
            self._process.stdout.close()
            self._log.close()

    def _ask(self, message: Message, timeout_s: float) -> Message:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"it ended: {self._last_words()}") from None
        answer: Message = json.loads(self._read_line(timeout_s))
        if "error" in answer:
            raise EngineError(str(answer["error"]))
        return answer

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        give_up_at = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise EngineError(f"it did not answer within {timeout_s:g} s: {self._last_words()}")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                raise EngineError(f"it ended: {self._last_words()}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = self._log_path.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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
    """What a stretch of time took."""

    engine_s: float  # CPU time of the engine that ran
    idle_engines_s: float  # CPU time of the engines that waited for their turn
    foreign_s: float  # of everything else; the hypervisor's share too, where it tells it
    foreign_share: float  # of all cores; includes the idle engines


class LoadMeter:
    """Reads the counters at its making and at `stop`.

    Args:
        engine: Process of the engine that runs.
        idle_engines: Processes of the other engines.
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
