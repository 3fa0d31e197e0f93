"""Runs parts, each in a process of its own, and merges what each has written into the report as it comes.

Nothing here imports torch. A part that crashes, hangs, runs out of memory or loses the device ends alone; if the driver
itself is killed, the report has all that was written until then, and the parts that run end with it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.part import Part, PartResult, Report

ROOT = Path(__file__).parents[2]
POLL_S = 0.02
# A part that would get less is not begun.
LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run parts."""

    folder: Path  # of the report
    file_name: str  # of the report, without an ending; the parts' files lie in a folder of that name
    budget_s: float  # for all parts
    num_jobs: int  # parts at once, except parts that measure
    is_rehearsal: bool = False


def run_parts(parts: Sequence[Part], report: Report, plan: Plan) -> None:
    """Run parts in their order. The report is written again whenever a part has written something.

    Raises: KeyboardInterrupt: SIGINT or SIGTERM came; the report says so.
    """
    results = {part.name: PartResult(part.name) for part in parts}
    report.parts = list(results.values())
    files = plan.folder / plan.file_name
    files.mkdir(parents=True, exist_ok=True)
    waiting, running = list(parts), list[_RunningPart]()
    end_s = time.monotonic() + plan.budget_s

    def merge(result: PartResult) -> None:
        results[result.name] = result
        report.parts = list(results.values())
        report.write(plan.folder, plan.file_name)

    report.write(plan.folder, plan.file_name)
    try:
        with _signals_interrupt():
            while waiting or running:
                while waiting and _may_begin(waiting[0], running, plan.num_jobs):
                    part, rest_s = waiting.pop(0), end_s - time.monotonic()
                    missing = [name for name in part.needs if not _is_installed(name)]
                    if missing:
                        merge(PartResult(part.name, "skipped", f"it needs {', '.join(missing)}, not installed here"))
                    elif rest_s < LEAST_S:
                        merge(PartResult(part.name, detail=f"the budget of {plan.budget_s:g} s was used up"))
                    else:
                        running.append(_RunningPart(part, files, rest_s, is_rehearsal=plan.is_rehearsal))
                for each in running:
                    if (news := each.news()) is not None:
                        merge(news)
                running = [each for each in running if not each.is_over]
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        for each in running:
            merge(each.end("failed", "the check was interrupted"))
        for part in waiting:
            merge(PartResult(part.name, detail="the check was interrupted"))
        raise
    finally:
        for each in running:
            each.kill()


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would lie in
        return False


def _may_begin(part: Part, running: Sequence["_RunningPart"], num_jobs: int) -> bool:
    if part.is_alone or any(each.part.is_alone for each in running):
        return not running
    return len(running) < num_jobs


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM do what SIGINT does: raise KeyboardInterrupt here, once."""

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _RunningPart:
    """One part, its process, its file and its log."""

    def __init__(self, part: Part, files: Path, rest_s: float, *, is_rehearsal: bool) -> None:
        self.part = part
        self.is_over = False
        self._path = files / f"{part.name}.json"
        self._path.unlink(missing_ok=True)
        self._read_at_ns = 0
        self._begin_s = time.monotonic()
        self._limit_s = min(part.limit_s, rest_s)
        order = {
            "name": part.name,
            "function": part.function,
            "arguments": part.arguments,
            "path": str(self._path),
            "is_rehearsal": is_rehearsal,
        }
        print(f"\n== {part.name}: {part.about} (at most {self._limit_s:.0f} s)", flush=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.run_part", json.dumps(order)],
            cwd=ROOT,
            env=_environment(is_rehearsal=is_rehearsal),
            stdin=subprocess.PIPE,  # its end is the driver's
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._stream, args=(files / f"{part.name}.log",), daemon=True)
        self._reader.start()

    def news(self) -> PartResult | None:
        """Return what is known of the part if something is new."""
        if self._process.poll() is not None:
            return self.end("failed", _how_it_ended(self._process.returncode))
        if time.monotonic() - self._begin_s > self._limit_s:
            return self.end("failed", f"it did not end within {self._limit_s:.3g} s")
        try:
            written_at_ns = self._path.stat().st_mtime_ns
        except OSError:
            return None  # it is still importing
        if written_at_ns == self._read_at_ns:
            return None
        self._read_at_ns = written_at_ns
        return self._read()

    def end(self, status: str, detail: str) -> PartResult:
        """End the process, with all that it started; return what the part wrote.

        If it had not come to its end, or the process failed behind that, the result is as the arguments say.
        """
        was_over = self._process.poll() is not None
        self.kill()
        self.is_over = True
        result = self._read()
        if result.status == "running" or (was_over and self._process.returncode and result.status != "failed"):
            place = f" in {result.doing}" if result.doing else ""
            found = f"; until then: {result.detail}" if result.detail else ""
            result.status, result.detail = ("failed" if status == "failed" else "not run"), f"{detail}{place}{found}"
            result.seconds = time.monotonic() - self._begin_s
            result.write(self._path)
        print(f"== {self.part.name}: {result.status}  {result.detail}", flush=True)
        return result

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=1.0)
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()

    def _read(self) -> PartResult:
        try:
            return PartResult.read(self._path)
        except (OSError, ValueError):
            return PartResult(self.part.name, "running")

    def _stream(self, path: Path) -> None:
        """Print each line of the process as it comes, and keep it."""
        assert self._process.stdout is not None, "it is a pipe"
        with path.open("w", encoding="utf-8") as log, self._process.stdout:
            for line in self._process.stdout:
                print(f"{self.part.name} | {line}", end="", flush=True)
                log.write(line)
                log.flush()


def _environment(*, is_rehearsal: bool) -> dict[str, str]:
    """Return the environment of a part: our packages, and what Triton reads when it is imported."""
    paths = [str(ROOT), str(ROOT / "shared"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # an image may have any, also broken ones
    environment.pop("TRITON_INTERPRET", None)
    # A rehearsal leaves a card alone, also where there is one.
    return environment | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if is_rehearsal else {})


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"its process was ended by {name}{' (too little memory?)' if name == 'SIGKILL' else ''}"
