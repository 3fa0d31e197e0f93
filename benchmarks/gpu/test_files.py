"""Tests of the suite as a part of the check: each result is kept as it comes, and no failure hides the others."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.part import Progress, SkippedError
from benchmarks.gpu.report import Figure

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
        rehearsed: Those of a rehearsal, in which the interpreter takes a thousand times as long.
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
