"""Tests of kernels under NVIDIA's compute-sanitizer: reads and writes beside memory, and races in shared memory.

It comes with the CUDA toolkit, not with torch. What it runs is fifty times slower, so that a few tests have to do.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.part import Progress, SkippedError
from benchmarks.gpu.report import Figure

ROOT = Path(__file__).parents[2]
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
    # Without torch's pool each tensor is an allocation of its own, whose end the tool knows.
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
