"""The command's flags, as a person gives them; loads that run are in tests/contract/test_bench.py."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from octavo.commands.command_line import run
from tests.support.each_row import each_row

NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OCTAVO_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def said(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Run `octavo bench` and return its status and what it said on stderr."""
    status = run(["bench", *args])
    return status, capsys.readouterr().err


@each_row(
    ("--rate -1", "Invalid value for '--rate': -1.0 is not in the range"),
    ("--rate 0", "Invalid value for '--rate': 0.0 is not in the range 1e-06<=x<=1000000.0"),
    ("--rate nan", "Invalid value for '--rate': 'nan' is not a number"),
    ("--rate 1e-300", "Invalid value for '--rate': 1e-300 is not in the range"),
    ("--rate 5 --burstiness 1e-9", "Invalid value for '--burstiness': 1e-09 is not in the range 0.01<=x<=1000000.0"),
    ("--duration 1e308", "Invalid value for '--duration': 1e+308 is not in the range 0.001<=x<=1000000000.0"),
    ("--timeout 1e18", "Invalid value for '--timeout': 1e+18 is not in the range 0.001<=x<=1000000000.0"),
    ("--temperature nan", "Invalid value for '--temperature': 'nan' is not a number"),
    ("--rate 5 --concurrency 2", "--concurrency is a closed loop and --rate is an open loop: give only one of them"),
    ("--burstiness 2", "--burstiness needs --rate"),
    ("--rate 1e6 --duration 60", "--rate and --duration make about 60000000 requests; give --num-requests"),
    (
        "--input-len zipf:2:3",
        "Invalid value for '--input-len': 'zipf:2:3' is not a length: 'zipf' is not a distribution",
    ),
    ("--output-len 0", "Invalid value for '--output-len': '0' is not a length: lengths go from 1"),
    ("--num-prefixes 3", "--num-prefixes needs --shared-prefix-len"),
    ("--dataset x --input-len 5", "--input-len generates prompts, and --dataset supplies them"),
    ("--dataset-name copy --dataset x", "--dataset does not go with --dataset-name, which has prompts and lengths"),
    ("--dataset-name copy --output-len 5", "--output-len does not go with --dataset-name"),
    ("--dataset-name novel", "Invalid value for '--dataset-name': 'novel' is not one of"),
    ("--samples", "--samples needs --json"),
    ("--slo fast", "Invalid value for '--slo': 'fast' is not an objective"),
    ("--plot x.gif", "Invalid value for '--plot': 'x.gif' does not end in .png, .svg, .pdf"),
    ("--openai-api chat", "--openai-api needs --openai"),
    ("--openai http://x/v1 --address a:1", "--address works only with an Octavo scheduler, not with --openai"),
    ("--openai http://x/v1 --tenant red", "--tenant works only with an Octavo scheduler, not with --openai"),
    (
        "--openai http://x/v1 --compare-speculation",
        "--compare-speculation works only with an Octavo scheduler, not with --openai",
    ),
    ("--no-speculate --compare-speculation", "--no-speculate does not go with --compare-speculation, which sends both"),
    ("--rate 5 --compare-speculation", "--compare-speculation needs a closed loop, and --rate is an open loop"),
    ("--openai http://x/v1 --one-stream", "--one-stream works only with an Octavo scheduler, not with --openai"),
    ("--openai gpu:8000", "--openai: 'gpu:8000' is not a URL of an API, such as http://127.0.0.1:8080/v1"),
)
def test_flags_that_mean_nothing_are_refused(args: str, what: str, *, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, *args.split())
    assert status == 2
    assert text.startswith(f"octavo: {what}")
    assert text.endswith('; see "octavo bench --help"\n')
    assert text.count("\n") == 1


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_path_that_cannot_be_written_is_found_before_the_load(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "out.png"
    assert said(capsys, flag, str(path), "--address", NOBODY) == (
        1,
        f"octavo: {path} cannot be written: No such file or directory\n",
    )


def test_a_path_that_can_be_written_is_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.png"
    old.write_text("kept")
    assert said(capsys, "--json", str(old), "--plot", str(new), "--address", NOBODY)[0] == 1
    assert old.read_text() == "kept"
    assert not new.exists()


@each_row(
    (("--address", NOBODY), f'no scheduler is reachable at {NOBODY}; start one with "octavo up"'),
    (
        ("--openai", f"http://{NOBODY}/v1"),
        f"no OpenAI-compatible server answers at http://{NOBODY}/v1: connection refused",
    ),
)
def test_a_dead_endpoint_is_one_sentence(
    args: tuple[str, str], what: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["bench", *args])
    captured = capsys.readouterr()
    assert (status, captured.out, captured.err) == (1, "", f"octavo: {what}\n")


def test_a_missing_dataset_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "--dataset", str(tmp_path / "none"), "--address", NOBODY)
    assert (status, text) == (1, f"octavo: the dataset {tmp_path / 'none'} cannot be read: No such file or directory\n")


def test_a_key_of_the_environment_is_not_sent_in_the_clear(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    status, text = said(capsys, "--openai", "http://gpu.invalid/v1")
    assert status == 2
    assert "the key in OPENAI_API_KEY would travel to gpu.invalid unencrypted" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("args", "missing"),
    [
        ([], "numpy"),
        (["--openai", "http://127.0.0.1:1/v1"], "numpy and aiohttp"),
        (["--plot", "x.png"], "numpy and matplotlib"),
    ],
)
def test_without_the_extra_there_is_one_sentence(
    args: list[str], missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def find_all_but_the_extra(name: str, package: str | None = None) -> Any:
        return None if name in ("numpy", "aiohttp", "matplotlib") else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_the_extra)
    assert said(capsys, *args) == (1, f"octavo: octavo bench needs {missing}: pip install '.[bench]' in a clone\n")


def test_the_help_needs_nothing_of_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    help_text = capsys.readouterr().out
    for flag in ("--rate", "--concurrency", "--openai", "--slo", "--plot", "--tls-ca"):
        assert flag in help_text
