"""`make gpu-check` on a machine without a GPU: it says so, and a rehearsal shows that its code works."""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import gpu_check
from benchmarks.gpu import machine
from benchmarks.gpu.models import DEFAULTS, executor_settings
from benchmarks.gpu.part import Figure, PartResult, Report, Status
from benchmarks.gpu.parts import PARTS
from executor_svc.config import ExecutorConfig
from octavo.bench.provenance import provenance
from octavo_shared.process.service_config import ServiceConfig
from tests.support.each_row import each_row

ROOT = Path(__file__).parents[3]
WITHOUT = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec

class Find:  # no function: pytest keeps it as an attribute of a class
    def __call__(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked} else find(name, path, target)

PathFinder.find_spec = Find()
"""
STATUSES: tuple[Status, ...] = ("failed", "not run", "running")
NEED_MORE = {"libraries", "memcheck", "racecheck"}  # a card, the CUDA toolkit
NAMES = [part.name for part in PARTS]


def test_the_settings_are_those_of_the_executor() -> None:
    fields = ExecutorConfig.model_fields
    of_the_service = {"listen", "transfer_address", *ServiceConfig.model_fields} - {"max_message_bytes"}
    assert DEFAULTS.keys() == fields.keys() - of_the_service - {"model"}
    assert {name: fields[name].default for name in DEFAULTS} == DEFAULTS


def test_a_setting_that_there_is_not_is_named() -> None:
    with pytest.raises(TypeError, match="no settings of an executor: dtpye"):
        executor_settings(dtpye="bfloat16")


def test_a_machine_without_a_gpu_gets_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == (
        "gpu-check cannot run: torch finds no CUDA device; --rehearse shows on a CPU that the check itself works\n"
    )


@each_row(
    ({"triton": None}, "triton is not installed; install a triton of at least 3.6"),
    ({"triton": "3.5.1"}, "triton is 3.5.1; it needs at least 3.6"),
    (
        {"triton": "3.6.0", "numpy": "2.5.0"},
        "NumPy 2.5.0 breaks the interpreter of Triton 3.6.0, which a rehearsal runs kernels in; "
        "install a NumPy before 2.4",
    ),
    ({"triton": "3.6.0", "numpy": "2.3.5"}, None),
    ({"triton": "3.9.0", "numpy": "2.5.0"}, None),
)
def test_a_library_that_will_not_do_is_named(found: dict[str, str | None], sentence: str | None) -> None:
    assert machine.why_not_installed(is_rehearsal=True, find=lambda name: found.get(name, "99.0+cu130")) == sentence


def test_on_a_card_the_interpreter_does_not_matter() -> None:
    found = {"triton": "3.6.0", "numpy": "2.5.0"}
    assert machine.why_not_installed(is_rehearsal=False, find=lambda name: found.get(name, "99.0")) is None


def test_versions_come_first_and_missing_wheels_in_one_line() -> None:
    found = {"torch": "2.11.0+cu130", "triton": "3.6.0", "pytest": "9.0"}

    versions, driver, *_ = machine.describe(found.get)
    wheels = machine.describe_wheels(found.get)

    assert versions.endswith(", torch 2.11.0+cu130, triton 3.6.0, pytest 9.0")
    assert driver.startswith("driver: ")
    assert "\n" not in wheels
    assert "missing here: gguf, iniconfig, pluggy, hypothesis, sortedcontainers, grpcio, " in wheels


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--only", "attention,speed"])
    assert f"no such part: speed; there are {', '.join(NAMES)}" in capsys.readouterr().err


def test_the_parts_are_listed_and_what_they_run_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == NAMES
    assert len(set(NAMES)) == len(NAMES)
    for part in PARTS:
        module, _, function = part.function.partition(":")
        assert callable(getattr(import_module(module), function))
        if part.function == "benchmarks.gpu.test_files:run_tests":
            paths = [
                word.partition("::")[0] for words in part.arguments[:2] for word in json.loads(words) if ".py" in word
            ]
            assert all((ROOT / path).is_file() for path in paths), part


@pytest.mark.slow
def test_on_a_card_every_part_finds_its_tests() -> None:
    for part in PARTS:
        if part.function == "benchmarks.gpu.test_files:run_tests" and part.arguments[2].startswith("1/"):
            words = json.loads(part.arguments[0])[:-2]  # on a CPU some are marked slow
            command = [sys.executable, "-m", "pytest", *words, "--collect-only", "-q"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
            num_found = sum("::" in line for line in done.stdout.splitlines())
            assert num_found >= int(part.arguments[2][2:]), (part.name, done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("is_service", [False, True])
def test_a_rehearsal_needs_only_the_wheels_that_are_named(is_service: bool, tmp_path: Path) -> None:
    """No part but the service needs more than torch, Triton, transformers, gguf and pytest: nothing else is there."""
    wheels = {*machine.MODEL_WHEELS, *machine.TEST_WHEELS, *(machine.SERVICE_WHEELS if is_service else ())}
    blocked = modules_of_all_but(wheels | required_by("torch", "triton", "transformers"))
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(blocked=blocked), encoding="utf-8")
    names = [name for name in NAMES if (name == "service") == is_service]
    flags = ["--rehearse", "--budget-s", "500", "--results", str(tmp_path), "--only", ",".join(names)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'shared'}"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu-check-rehearsal.md").read_text(encoding="utf-8")
    assert page.startswith("# Rehearsal of the GPU check on a CPU")
    assert "FAILED" not in page
    assert "MISSED" not in page
    parts = json.loads((tmp_path / "gpu-check-rehearsal.json").read_text(encoding="utf-8"))["parts"]
    assert [part["name"] for part in parts] == names
    assert {part["name"] for part in parts if part["status"] == "skipped"} <= NEED_MORE
    for part in parts:
        assert part["figures"] or part["name"] in NEED_MORE, part
        assert all(figure["value"] > 0 for figure in part["figures"] if figure["unit"] in ("s", "ms", "tokens/s")), part


def required_by(*packages: str) -> set[str]:
    """Return packages with all that they require, extras left out."""
    found: set[str] = set()
    waiting = [normalized(name) for name in packages]
    while waiting:
        name = waiting.pop()
        if name in found or machine.installed_version(name) is None:
            continue
        found.add(name)
        wanted = [Requirement(line) for line in requires(name) or ()]
        waiting += [
            normalized(each.name) for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    return found


def modules_of_all_but(packages: set[str]) -> list[str]:
    """Return the modules of all other installed packages."""
    kept = {*map(normalized, packages), "octavo", "pip", "setuptools"}
    return [name for name, owners in packages_distributions().items() if kept.isdisjoint(map(normalized, owners))]


def normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def test_the_wheels_are_missing_where_the_service_is_skipped() -> None:
    """Else a machine would be told that all is there, and the part would fail."""
    owners = packages_distributions()
    needed = {normalized(name) for part in PARTS for module in part.needs for name in owners[module.split(".")[0]]}
    assert needed <= {*machine.SERVICE_WHEELS}


def test_a_report_says_what_was_met_and_what_was_missed() -> None:
    report = Report("A card", ["a machine"], provenance("make", "gpu-check"))
    figures = [
        Figure("speed", 12.5, "GB/s", target=10.0, detail="fast"),
        Figure("idle", 12.5, "%", target=3.0, at_most=True),
        Figure("copy", 4321.0, "GB/s"),
    ]
    report.parts = [PartResult("tests", "passed", "5 | 6 passed", seconds=3.2), PartResult("stream", figures=figures)]
    report.parts[1].status = "skipped"
    page = report.markdown()
    assert "| tests | passed | 3 | 5 \\| 6 passed |" in page
    assert "| speed | 12.5 GB/s | ≥ 10 GB/s: met | fast |" in page
    assert "| idle | 12.5 % | ≤ 3 %: MISSED |  |" in page
    assert "| copy | 4,321 GB/s |  |  |" in page
    assert report.passed  # a target that was missed is reported; a part that failed, or was not run, fails the check
    for status in STATUSES:
        report.parts[1].status = status
        assert not report.passed
