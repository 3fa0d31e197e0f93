"""Tests of the suite as a part of the check: each result is kept as it comes, and no failure hides the others.

Some of them run under NVIDIA's compute-sanitizer, which finds reads and writes beside memory, and races of threads.
It comes with the CUDA toolkit, not with torch. What it runs is fifty times slower, so that a few tests have to do.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.part import Figure, Progress, SkippedError

ROOT = Path(__file__).parents[2]
# Failures that the report names one by one.
MAX_NAMED = 5


class TestFailuresError(Exception):
    """Tests failed."""

    __test__ = False


def run_tests(progress: Progress, on_a_card: str, rehearsed: str, shard: str = "1/1") -> str:
    """Run tests; return how many passed.

    Args:
        progress: Gets the test that runs now.
        on_a_card: Arguments of pytest as JSON.
        rehearsed: Arguments in a rehearsal, in which the interpreter takes a thousand times as long.
        shard: Which share of them, such as 2/3: each compiles its own kernels.

    Raises: TestFailuresError: some failed; it names them.
    """
    number, num_shards = map(int, shard.split("/"))
    recorder = _Recorder(progress, number, num_shards)
    chosen = json.loads(rehearsed if progress.is_rehearsal else on_a_card)
    command = [*chosen, "-q", "--rootdir", str(ROOT), "--confcutdir", str(ROOT), "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "benchmarks" / "gpu" / "pytest.ini"), "--tb=short", "--show-capture=no"]
    code = pytest.main(command, plugins=[recorder])
    progress.add(Figure(f"tests, {progress.result.name}", recorder.num_passed, "passed", detail=recorder.summary()))
    if recorder.failures or code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        named = "; ".join(recorder.failures[:MAX_NAMED]) or f"pytest ended with {code!r}"
        more = len(recorder.failures) - MAX_NAMED
        raise TestFailuresError(f"{recorder.summary()}: {named}" + (f"; {more} more" if more > 0 else ""))
    if not recorder.num_passed:
        raise SkippedError(recorder.reason or "no test of this part runs here")
    return recorder.summary()


class _Recorder:
    """A plugin of pytest that tells the progress, and stops when the device computes nothing any more."""

    def __init__(self, progress: Progress, shard: int, num_shards: int) -> None:
        self._progress = progress
        self._shard, self._num_shards = shard, num_shards
        self.num_passed = self.num_skipped = 0
        self.num_collected = 0
        self.failures: list[str] = []
        self.reason = ""  # why the last one was skipped
        self.is_lost = False

    def summary(self) -> str:
        parts = [f"{self.num_passed} passed"]
        parts += [f"{len(self.failures)} failed"] if self.failures else []
        parts += [f"{self.num_skipped} skipped"] if self.num_skipped else []
        rest = self.num_collected - self.num_passed - len(self.failures) - self.num_skipped
        lost = ", the device is lost" if self.is_lost else ""
        return ", ".join([*parts, *([f"{rest} not run"] if rest > 0 else [])]) + lost

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._shard - 1 :: self._num_shards]

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.num_collected = len(session.items)

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid}: {_last_line(report.longreprtext)}")

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        del location
        self._progress.result.detail = self.summary()
        self._progress.doing(nodeid)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid}: {_last_line(report.longreprtext)}")
        elif report.when == "call" and report.passed:
            self.num_passed += 1
        elif report.skipped:
            self.num_skipped += 1
            self.reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""

    @pytest.hookimpl
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """After an error, see whether the device still computes: if not, all later tests would only repeat it."""
        if call.excinfo is None or call.excinfo.errisinstance((pytest.skip.Exception, AssertionError)):
            return
        if not self.is_lost and _is_device_lost():
            self.is_lost = True
            item.session.shouldstop = "the device computes nothing any more"


def _is_device_lost() -> bool:
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


def _last_line(text: str) -> str:
    """Return what went wrong: the last line of pytest's that begins with E, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no text"]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors[0] if errors else lines[-1])[:200]


FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
# Each kernel of attention, sampling and dense work at least once.
TESTS = (
    "tests/kernels/test_triton_attention.py::test_a_window_begins_anywhere_in_a_tile",
    "tests/kernels/test_triton_attention.py::test_long_contexts",
    "tests/kernels/test_block_copy.py",
    "tests/kernels/test_row_kernels.py",
)
_ERRORS = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
_FINDING = re.compile(r"^========= (?!COMPUTE-SANITIZER)(\S.*)$", re.MULTILINE)


class SanitizerError(Exception):
    """The tool found something."""


def sanitize(progress: Progress, tool: str) -> str:
    """Run tests under a tool, memcheck or racecheck. Raises: SanitizerError: it found something, or did not run."""
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))
    if found is None:
        raise SkippedError("compute-sanitizer is not there; it comes with the CUDA toolkit")
    tests = [sys.executable, "-m", "pytest", *TESTS, "-q", "-c", "benchmarks/gpu/pytest.ini", "--rootdir", "."]
    command = [found, "--tool", tool, "--target-processes", "all", *tests, "-p", "no:cacheprovider"]
    # Without torch's pool each tensor is an allocation of its own, with an end that the tool knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-8000:], done.stderr[-4000:], flush=True)
    counts = [int(count) for count in _ERRORS.findall(done.stdout)]
    if not counts:
        raise SanitizerError(f"compute-sanitizer said nothing; it ended with exit code {done.returncode}")
    progress.add(Figure(f"errors that {tool} found", sum(counts), "", target=0.0, at_most=True))
    if sum(counts):
        findings = [line for line in _FINDING.findall(done.stdout) if "SUMMARY" not in line]
        raise SanitizerError(f"{tool} found {sum(counts)}, first: {findings[0] if findings else 'see the log'}")
    if done.returncode:
        raise SanitizerError(f"{tool} found nothing, but tests failed under it; see the log")
    return f"{tool} found nothing in {len(TESTS)} files of tests"
