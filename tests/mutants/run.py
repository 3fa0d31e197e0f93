"""One run of a suite in a copy, and what it says of a fault."""

import enum
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.mutants.fault import Fault, StaleError, TreeCopy

PYTEST = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
QUICK = ["-m", "not slow and not gpu"]  # `make test`, with all cases of its large tables
ALL_PASSED, SOME_FAILED = 0, 1  # pytest's exit codes
LAST_LINES = 15


class Verdict(enum.Enum):
    """What became of a fault."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    STALE = "stale"
    """The row does not fit the code or the tests any more, so it proves nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on one fault, with a remark for people: the test that failed, or what is wrong."""

    fault: Fault
    verdict: Verdict
    duration_s: float
    remark: str


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """How a run of pytest ended; `exit_code` None: it was still running at the time limit, and was killed."""

    exit_code: int | None
    output: str
    duration_s: float

    @property
    def failed_tests(self) -> list[str]:
        """The tests that failed, as pytest names them."""
        found = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", self.output, re.MULTILINE)
        return list(map(str, found))

    @property
    def last_lines(self) -> str:
        """The end of what pytest wrote."""
        return "\n".join(self.output.splitlines()[-LAST_LINES:])


def run_suite(copy: TreeCopy, tests: Sequence[str], timeout_s: float, *options: str) -> SuiteRun:
    """Run tests in the copy, with all processes that they start; after `timeout_s` all of them are killed."""
    begin_s = time.monotonic()
    process = copy.start([*PYTEST, *QUICK, *options, *tests])
    try:
        output, _ = process.communicate(timeout=None if math.isinf(timeout_s) else timeout_s)
        exit_code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        copy.stop()
        output, _ = process.communicate()
        exit_code = None
    return SuiteRun(exit_code, output, time.monotonic() - begin_s)


def failing_without_faults(copy: TreeCopy, tests: Sequence[str]) -> list[str]:
    """Run all suites together in a sound copy; return the tests that fail all the same.

    Raises: RuntimeError: pytest could not run them, with its last words.
    """
    run = run_suite(copy, tests, timeout_s=math.inf)
    if run.exit_code not in (ALL_PASSED, SOME_FAILED):
        raise RuntimeError(f"pytest ended with code {run.exit_code}\n{run.last_lines}")
    return run.failed_tests


def try_fault(copy: TreeCopy, fault: Fault, failing: Sequence[str], timeout_s: float) -> Outcome:
    """Plant a fault, run its suite, and take it out again; `failing` are the tests that fail without a fault."""
    useless = [test for test in failing if test.startswith(fault.tests)]
    if useless:
        return Outcome(fault, Verdict.STALE, 0.0, f"{_short(useless[0])} fails without the fault")
    try:
        with copy.with_fault(fault):
            run = run_suite(copy, fault.tests, timeout_s, "--exitfirst")
    except StaleError as error:
        return Outcome(fault, Verdict.STALE, 0.0, str(error))
    if run.exit_code is None:
        return Outcome(fault, Verdict.CAUGHT, run.duration_s, f"hung, killed after {timeout_s:.0f} s")
    if run.exit_code == ALL_PASSED:
        return Outcome(fault, Verdict.SURVIVED, run.duration_s, " ".join(map(_short, fault.tests)))
    if run.exit_code == SOME_FAILED:
        return Outcome(fault, Verdict.CAUGHT, run.duration_s, " ".join(map(_short, run.failed_tests[:1])))
    # No test ran: the fault is no valid Python, or the suite is not there.
    remark = f"pytest ended with code {run.exit_code}\n{run.last_lines}"
    return Outcome(fault, Verdict.STALE, run.duration_s, remark)


def _short(test: str) -> str:
    """Return the name of a test without its folders."""
    path, *names = test.split("::", 1)
    return "::".join([path.rpartition("/")[2], *names])
