"""`make gpu-check` on a machine without a GPU: it says so, and a rehearsal shows that its code works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu.report import Figure, Outcome, Report
from benchmarks.gpu.settings import DEFAULTS, executor_settings
from executor_svc.config import ExecutorConfig
from octavo_shared.process.service_config import ServiceConfig

ROOT = Path(__file__).parents[3]
# What an image with torch and transformers need not have.
MISSING = ("pydantic", "grpc", "grpc_health", "grpc_reflection", "google", "gguf", "pytest_asyncio")
WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"{{name}} is not there")

sys.meta_path.insert(0, Missing())
from benchmarks.gpu_check import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_settings_are_those_of_the_executor() -> None:
    fields = ExecutorConfig.model_fields
    of_the_service = {"listen", *ServiceConfig.model_fields} - {"max_message_bytes"}
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


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, "triton is not installed; install a triton of at least 3.6"),
        ("3.5.1", "triton is 3.5.1; it needs at least 3.6"),
    ],
)
def test_a_library_that_is_missing_or_too_old_is_named(
    found: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "installed_version", lambda name: found if name == "triton" else "99.0+cu130")
    assert gpu_check.why_not_here(rehearse=True) == sentence


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--only", "attention,speed"])
    sentence = "no such part: speed; there are tests, attention, stream, throughput, sampling, invariance"
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        pytest.param(
            "stream,throughput",
            {"decode step, 1 sequence", "idle between steps, 4 sequences", "Octavo beside transformers"},
            marks=pytest.mark.slow,
        ),
        pytest.param("attention,sampling", set(), marks=pytest.mark.slow),
        pytest.param(
            "invariance",
            {
                "positions with other logits, invariant, the same in batches of 2",
                "decode step, 2 sequences, invariant beside fast",
                "step of 64 prompt tokens, invariant beside fast",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rehearsal_needs_only_what_an_image_has(parts: str, expected: set[str], tmp_path: Path) -> None:
    flags = ["--rehearse", "--only", parts, "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=MISSING), *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu-check-rehearsal.md").read_text(encoding="utf-8")
    assert page.startswith("# Rehearsal of the GPU check on a CPU")
    assert "FAILED" not in page
    assert "MISSED" not in page
    figures = json.loads((tmp_path / "gpu-check-rehearsal.json").read_text(encoding="utf-8"))["figures"]
    assert expected <= {figure["name"] for figure in figures}
    assert all(figure["value"] > 0 for figure in figures if figure["unit"] != "%")


def test_a_report_says_what_was_met_and_what_was_missed() -> None:
    report = Report("A card", ["a machine"], "make gpu-check")
    report.figures = [
        Figure("speed", 12.5, "GB/s", target=10.0, detail="fast"),
        Figure("idle", 12.5, "%", target=3.0, at_most=True),
        Figure("copy", 4321.0, "GB/s"),
    ]
    report.outcomes = [Outcome("tests", True, "5 passed")]
    page = report.markdown()
    assert "| speed | 12.5 GB/s | ≥ 10 GB/s: met | fast |" in page
    assert "| idle | 12.5 % | ≤ 3 %: MISSED |  |" in page
    assert "| copy | 4,321 GB/s |  |  |" in page
    assert report.passed  # a target that was missed is reported; a part that failed fails the check
    report.outcomes.append(Outcome("stream", False, "out of memory"))
    assert not report.passed
