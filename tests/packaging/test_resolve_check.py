"""The check that pins fit each other finds those that do not; the index here is a folder of empty wheels."""

import zipfile
from pathlib import Path

import pytest

from tests.packaging import resolve_check
from tests.packaging.resolve_check import NEWEST, OLDEST, PINNED, PLATFORMS, Case, NoIndexError, cases, resolve

PROJECT = '[project]\nname = "octavo"\nversion = "1"\n[project.optional-dependencies]\nexecutor = ["torch>=2"]\n'


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with torch 2 and 3, which need triton 2 and 3; torch 2 is for Linux alone."""
    for name, version, tag, needs in (
        ("torch", 2, "manylinux_2_28_x86_64", "triton==2"),
        ("torch", 3, "any", "triton==3"),
        ("triton", 2, "any", ""),
        ("triton", 3, "any", ""),
    ):
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-{tag}.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            wheel.writestr(
                f"{name}-{version}.dist-info/METADATA", metadata + (f"Requires-Dist: {needs}\n" if needs else "")
            )
            wheel.writestr(f"{name}-{version}.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: py3-none-{tag}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("versions", "platform", "pins", "finds"),
    [
        (PINNED, "Linux x86-64", "torch==3\ntriton==3", []),
        (PINNED, "Linux x86-64", "torch==3\ntriton==2", ["depends on triton==3 and triton==2"]),
        (PINNED, "macOS arm64", "torch==2", ["torch==2 has no wheels with a matching platform tag"]),
        (NEWEST, "Linux aarch64", "torch==3\ntriton==2", []),
        (OLDEST, "Linux x86-64", "", []),
    ],
)
def test_pins_that_contradict_each_other_are_found_and_named(
    versions: str, platform: str, pins: str, finds: list[str], wheels: Path
) -> None:
    (wheels / "pyproject.toml").write_text(PROJECT)
    (wheels / "constraints.txt").write_text(pins)
    index = ("--no-index", "--find-links", str(wheels))
    said = resolve(Case(versions, "3.11", platform), wheels / "pyproject.toml", wheels / "constraints.txt", index)
    assert bool(said) == bool(finds)
    assert [each for each in finds if each not in " ".join(said.split())] == []


def test_without_an_index_it_says_that_it_needs_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(case: Case) -> str:
        return resolve(case, index=("--default-index", "http://127.0.0.1:1/"))

    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(NoIndexError, match="Failed to fetch"):
        refuse(cases()[0])
    monkeypatch.setattr(resolve_check, "resolve", refuse)
    monkeypatch.setattr(resolve_check, "cases", lambda: cases()[:1])
    assert resolve_check.main() == 1
    assert "resolve-check: needs the package index, and it does not answer" in capsys.readouterr().err


def test_every_python_that_we_name_and_the_next_is_tried_on_every_platform() -> None:
    assert {(case.python, case.platform) for case in cases() if case.versions == PINNED} == {
        (python, platform) for python in ("3.11", "3.12", "3.13", "3.14") for platform in PLATFORMS
    }
