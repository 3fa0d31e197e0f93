"""What parts of `make gpu-check` do with tools that a CPU lacks, shown with stand-ins."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import measurements
from benchmarks.gpu.part import Progress, SkippedError
from benchmarks.gpu.test_files import SanitizerError, sanitize
from benchmarks.gpu.workloads import nano_vllm_prompts, sharegpt_prompts
from executor_svc.worker import assembly
from executor_svc.worker.graph_capture import Capture, Replay

FINDING = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at decode_kernel+0x1a0
========= ERROR SUMMARY: 2 errors
"""


def sanitizer_that_prints(text: str, exit_code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of the tool's name onto the path."""
    (folder / "found").write_text(text, encoding="utf-8")
    tool = folder / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\ncat {folder}/found\nexit {exit_code}\n', "utf-8")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def progress_in(folder: Path) -> Progress:
    return Progress("memcheck", folder / "memcheck.json", is_rehearsal=True)


@pytest.mark.parametrize(
    ("text", "exit_code", "sentence"),
    [
        (FINDING, 0, "memcheck found 2, first: Invalid __global__ read of size 16 bytes"),
        ("", 4, "compute-sanitizer said nothing; it ended with exit code 4"),
        ("========= ERROR SUMMARY: 0 errors\n", 1, "memcheck found nothing, but tests failed under it; see the log"),
    ],
)
def test_what_the_sanitizer_finds_fails_the_part(
    text: str, exit_code: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanitizer_that_prints(text, exit_code, tmp_path, monkeypatch)
    with pytest.raises(SanitizerError) as caught:
        sanitize(progress_in(tmp_path), "memcheck")
    assert str(caught.value) == sentence


def test_a_sanitizer_that_finds_nothing_passes_and_runs_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    sanitizer_that_prints(found, 0, tmp_path, monkeypatch)
    progress = progress_in(tmp_path)
    assert sanitize(progress, "racecheck").startswith("racecheck found nothing")
    assert [figure.value for figure in progress.result.figures] == [0.0]
    arguments = (tmp_path / "arguments").read_text(encoding="utf-8")
    assert arguments.startswith("--tool racecheck --target-processes all")
    assert "tests/kernels/test_block_copy.py" in arguments


def test_without_a_sanitizer_the_part_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SkippedError, match="compute-sanitizer is not there"):
        sanitize(progress_in(tmp_path), "memcheck")


def test_captures_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(run: Replay) -> Replay:
        run()
        return run

    monkeypatch.setattr(measurements, "graph_capture", lambda device: capture if device.type == "cuda" else None)
    with measurements.timed_captures() as captures:
        find: Callable[[torch.device], Capture | None] = vars(assembly)["graph_capture"]
        none, some = find(torch.device("cpu")), find(torch.device("cuda"))
        assert some is not None
        replay = some(lambda: torch.ones(2))
    assert none is None
    assert [len(each.seconds) for each in captures] == [1]
    assert replay().tolist() == [1, 1]


def test_the_lengths_that_others_publish_are_those_that_are_run() -> None:
    ours = nano_vllm_prompts(256, 1024, 151_936)
    assert sum(prompt.num_new_tokens for prompt in ours) == 133_966  # as its README has it
    lengths = sharegpt_prompts(1000, 1024, 128_256)
    assert sum(len(prompt.token_ids) for prompt in lengths) == pytest.approx(216_000, rel=0.02)
    assert sum(prompt.num_new_tokens for prompt in lengths) == pytest.approx(198_000, rel=0.02)
