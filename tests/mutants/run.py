"""One run of a suite in a copy, and what it says of a mutant."""

import enum
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from executor_svc.native.build import NativeUnavailableError, build_library, cache_directory
from tests.mutants.fault import StaleError, TreeCopy
from tests.mutants.mutant import Mutant

PYTEST = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
QUICK = ["-m", "not slow and not gpu"]  # `make test`, with all cases of its large tables
ALL_PASSED, SOME_FAILED = 0, 1  # pytest's exit codes
LAST_LINES = 15


class Verdict(enum.Enum):
    """What became of a mutant."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    STALE = "stale"
    """The row does not fit the code or the tests any more, so it proves nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on one mutant, with a remark for people: the test that failed, or what is wrong."""

    mutant: Mutant
    verdict: Verdict
    remark: str
    duration_s: float = 0.0


def failing_without_mutants(copy: TreeCopy, suites: Sequence[str]) -> list[str]:
    """Run all suites together in a sound copy; return the tests that fail all the same.

    Raises: RuntimeError: pytest could not run them, with its last words.
    """
    exit_code, output = _run_suites(copy, suites, None)
    if exit_code not in (ALL_PASSED, SOME_FAILED):
        raise RuntimeError(f"pytest ended with code {exit_code}\n{_last_lines(output)}")
    return _failed_tests(output)


def try_mutant(copy: TreeCopy, mutant: Mutant, failing: Sequence[str], timeout_s: float) -> Outcome:
    """Plant a mutant, run its suite, and take it out again; `failing` are the tests that fail without it."""
    if useless := [test for test in failing if test.startswith(mutant.suite)]:
        return Outcome(mutant, Verdict.STALE, f"{useless[0]} fails without it")
    begin_s = time.monotonic()
    try:
        with copy.with_fault(mutant):
            if mutant.is_c:  # else a compiler's error would pass for a catch
                build_library(cache_directory(), sources=(copy.root / mutant.path).parent)
            exit_code, output = _run_suites(copy, [mutant.suite], timeout_s)
    except (StaleError, NativeUnavailableError) as error:
        return Outcome(mutant, Verdict.STALE, str(error))
    verdict, remark = _judge(exit_code, output)
    return Outcome(mutant, verdict, remark, time.monotonic() - begin_s)


def _judge(exit_code: int | None, output: str) -> tuple[Verdict, str]:
    if exit_code is None:
        return Verdict.CAUGHT, "hung, and was killed"
    if exit_code == SOME_FAILED:
        return Verdict.CAUGHT, "".join(_failed_tests(output)[:1])
    if exit_code == ALL_PASSED:
        return Verdict.SURVIVED, ""
    # No test ran: the code cannot be imported, or the suite is not there.
    return Verdict.STALE, f"pytest ended with code {exit_code}\n{_last_lines(output)}"


def _run_suites(copy: TreeCopy, suites: Sequence[str], timeout_s: float | None) -> tuple[int | None, str]:
    """Return the exit code and the output; None: still running after `timeout_s`, and killed with all its processes.

    With a time limit the run ends with the first test that fails.
    """
    process = copy.start([*PYTEST, *QUICK, *(["--exitfirst"] if timeout_s else []), *suites])
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        copy.stop()
        return None, process.communicate()[0]
    return process.returncode, output


def _failed_tests(output: str) -> list[str]:
    return [str(test) for test in re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)]


def _last_lines(output: str) -> str:
    return "\n".join(output.splitlines()[-LAST_LINES:])
