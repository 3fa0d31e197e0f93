"""The driver of `make gpu-check` keeps every figure, whatever a part does and whatever becomes of the driver."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu.driver import ROOT, Plan, run_parts
from benchmarks.gpu.part import Figure, Part, PartResult, Report
from octavo.bench.provenance import provenance
from tests.unit.benchmarks.planted_parts import part

DRIVER = """
import sys
from pathlib import Path
from benchmarks.gpu.driver import Plan, run_parts
from benchmarks.gpu.part import Report
from octavo.bench.provenance import provenance
from tests.unit.benchmarks.planted_parts import part
parts = [part("sound"), part("hang"), part("sound", name="late")]
run_parts(parts, Report("A card", [], provenance()), Plan(Path(sys.argv[1]), "report", 60.0, num_jobs=1))
"""

MADE = provenance("make", "gpu-check")


def found_in(folder: Path) -> dict[str, PartResult]:
    parts = json.loads((folder / "report.json").read_text(encoding="utf-8"))["parts"]
    return {
        each["name"]: PartResult(**{**each, "figures": [Figure(**figure) for figure in each["figures"]]})
        for each in parts
    }


def test_whatever_a_part_does_the_figures_of_all_are_in_the_report(tmp_path: Path) -> None:
    parts = [
        part("segmentation_fault"),
        part("hang", limit_s=3.0),
        part("exception"),
        part("out_of_memory"),
        part("no_more_memory_for_the_system"),
        part("crash_at_exit"),
        part("other_standard_input"),
        part("skipped"),
        part("sound", name="lacking", needs=("no_such_library",)),
        part("sound"),
    ]
    report = Report("A card", ["a machine"], MADE)

    run_parts(parts, report, Plan(tmp_path, "report", 60.0, num_jobs=4))

    found = found_in(tmp_path)
    assert {name: (each.status, each.detail) for name, each in found.items()} == {
        "segmentation_fault": ("failed", "its process was ended by SIGSEGV in test_that_crashes"),
        "hang": ("failed", "it did not end within 3 s"),
        "exception": ("failed", "ValueError: logits differ"),
        "out_of_memory": ("failed", "MemoryError: "),
        "no_more_memory_for_the_system": ("failed", "its process was ended by SIGKILL (too little memory?)"),
        "crash_at_exit": ("failed", "its process was ended by SIGABRT; until then: all well"),
        "other_standard_input": ("passed", "all well"),
        "skipped": ("skipped", "compute-sanitizer is not there"),
        "lacking": ("skipped", "it needs no_such_library, not installed here"),
        "sound": ("passed", "all well"),
    }
    have_figures = {name for name, each in found.items() if each.figures == [Figure(f"before, {name}", 1.0, "s")]}
    assert have_figures == found.keys() - {"skipped", "lacking"}
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert all(f"| before, {name} | 1 s |" in page for name in have_figures)
    assert "Segmentation fault" in (tmp_path / "report" / "segmentation_fault.log").read_text(encoding="utf-8")
    assert not report.passed


def test_when_the_budget_is_used_up_the_rest_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.driver.LEAST_S", 0.1)
    report = Report("A card", [], MADE)
    parts = [part("sound"), part("hang"), part("sound", name="late")]

    run_parts(parts, report, Plan(tmp_path, "report", 0.6, num_jobs=1))

    found = found_in(tmp_path)
    assert found["sound"].status == "passed"
    assert found["hang"].detail.startswith("it did not end within")
    assert (found["late"].status, found["late"].detail) == ("not run", "the budget of 0.6 s was used up")
    assert not report.passed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_in_the_middle_leaves_the_figures_and_no_process(number: signal.Signals, tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'shared'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    pid = next(int(line.split()[-1]) for line in driver.stdout if " pid " in line)
    wait_until(lambda: bool(found_in(tmp_path)["hang"].figures))

    driver.send_signal(number)

    driver.wait(timeout=20)
    driver.stdout.close()
    found = found_in(tmp_path)
    assert found["sound"].status == "passed"
    assert all(found[name].figures for name in ("sound", "hang"))
    if number == signal.SIGTERM:
        assert found["hang"].detail == found["late"].detail == "the check was interrupted"
    else:
        assert (found["hang"].status, found["late"].status) == ("running", "not run")
    wait_until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    """Return whether a process runs: one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_the_driver_imports_no_torch() -> None:
    """What crashes with torch, or with a device, is to crash in the process of a part."""
    code = "import sys, benchmarks.gpu_check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_failing_test_hides_the_others(tmp_path: Path) -> None:
    """In one process: each result stands, the first line of what each failure says, and the test that ran last."""
    path = "tests/unit/benchmarks/planted_failures.py"
    planted = Part("kernels", "", "benchmarks.gpu.test_files:run_tests", 60.0, ("[]", json.dumps([path])))
    only_skipped = Part(
        "library", "", "benchmarks.gpu.test_files:run_tests", 60.0, ("[]", json.dumps([f"{path}::test_of_a_library"]))
    )
    report = Report("A card", [], MADE)

    parts = [planted, only_skipped, part("lost_device"), part("environment")]
    run_parts(parts, report, Plan(tmp_path, "report", 60.0, num_jobs=3, is_rehearsal=True))

    found = found_in(tmp_path)
    assert found["kernels"].status == "failed"
    for part_of_it in ("2 passed, 2 failed, 1 skipped", "test_too_far: assert 0.5 < 0.1", "ValueError: NaN at row 3"):
        assert part_of_it in found["kernels"].detail
    assert [figure.value for figure in found["kernels"].figures] == [2.0]
    assert (found["library"].status, found["library"].detail) == ("skipped", "Skipped: the library is not there")
    lost = "TestFailuresError: 1 passed, 2 failed, 2 not run, the device is lost: "
    assert found["lost_device"].detail.startswith(lost)
    assert found["environment"].detail == "1, ''"
