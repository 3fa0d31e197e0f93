"""The images run without root, have versions, and the scheduler's has no torch; the linters see what they should."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.k8s.manifests import BIN, K8S, REPOSITORY

CONTAINERFILES = sorted((REPOSITORY / "images").glob("*.Containerfile"))
MODULES = {"scheduler": "scheduler_svc", "executor": "executor_svc"}


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )


def check_containerfile(name: str, text: str) -> list[str]:
    """Return what an image must not be."""
    final = text.rpartition("\nFROM ")[2]
    findings = []
    if re.findall(r"^USER (.+)$", final, re.MULTILINE) != ["65532:65532"]:
        findings.append("does not run as 65532")
    base = re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    if base is None or ":" not in base[1] or base[1].endswith(":latest"):
        findings.append("its base has no version")
    if len(re.findall(r"^FROM ", text, re.MULTILINE)) != 2 or "COPY --from=build" not in final:
        findings.append("takes what it was built with along")
    findings += [
        f"has no label {label}"
        for label in ("title", "description", "version", "licenses")
        if f"org.opencontainers.image.{label}=" not in final
    ]
    module = MODULES.get(name)
    entry = f'ENTRYPOINT ["python", "-P", "-m", "{module}"]' if module else 'ENTRYPOINT ["smg", "launch"]'
    if entry not in final:
        findings.append("starts something else")
    for imported in re.findall(r'python -c "import ([\w.]+)', text):
        if not (REPOSITORY / imported.replace(".", "/")).with_suffix(".py").exists():
            findings.append("imports a module that does not exist")
    if name == "scheduler" and re.search(r"^ARG EXTRAS=.*(executor|demo)", text, re.MULTILINE):
        findings.append("has torch")
    return findings


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: str(path.stem))
def test_an_image_is_as_it_should_be(path: Path) -> None:
    assert check_containerfile(path.stem, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("USER 65532:65532\n", "", "does not run as 65532"),
        ("python:3.11-slim-bookworm", "python:latest", "its base has no version"),
        ("COPY --from=build /opt/octavo /opt/octavo\n", "", "takes what it was built with along"),
        ("org.opencontainers.image.licenses", "licenses", "has no label licenses"),
        ('"scheduler_svc"]', '"executor_svc"]', "starts something else"),
        ("import scheduler_svc.service", "import scheduler_svc.gone", "imports a module that does not exist"),
        ("EXTRAS=scheduler", "EXTRAS=executor", "has torch"),
    ],
)
def test_a_planted_mistake_in_an_image_is_found(old: str, new: str, finding: str) -> None:
    text = (REPOSITORY / "images/scheduler.Containerfile").read_text(encoding="utf-8")
    assert old in text

    assert finding in check_containerfile("scheduler", text.replace(old, new))


def test_the_three_images_are_there() -> None:
    assert [path.stem for path in CONTAINERFILES] == ["executor", "gateway", "scheduler"]


def test_the_gateway_is_the_one_that_the_tests_run() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = [requirement for requirement in extras["openai"] if requirement.startswith("smg==")]

    assert f"ARG SMG={pinned[0]}\n" in (REPOSITORY / "images/gateway.Containerfile").read_text()


def test_hadolint_finds_nothing() -> None:
    result = run(BIN / "hadolint", "--config", ".hadolint.yaml", *CONTAINERFILES)

    assert (result.returncode, result.stdout) == (0, "")


def test_hadolint_finds_a_planted_mistake(tmp_path: Path) -> None:
    text = (REPOSITORY / "images/executor.Containerfile").read_text(encoding="utf-8")
    planted = tmp_path / "Containerfile"
    planted.write_text(text.replace("--no-install-recommends ", ""), encoding="utf-8")

    result = run(BIN / "hadolint", "--config", ".hadolint.yaml", planted)

    assert result.returncode == 1
    assert "DL3015" in result.stdout


def test_yamllint_finds_nothing() -> None:
    result = run(BIN / "yamllint", "--strict", K8S)

    assert (result.returncode, result.stdout) == (0, "")


def test_yamllint_finds_a_planted_mistake(tmp_path: Path) -> None:
    planted = tmp_path / "twice.yaml"
    planted.write_text("kind: Service\nkind: Deployment\n", encoding="utf-8")

    result = run(BIN / "yamllint", "--strict", "--config-file", ".yamllint.yaml", planted)

    assert result.returncode == 1
    assert "duplication of key" in result.stdout


def test_the_scripts_are_valid_shell() -> None:
    for script in sorted((REPOSITORY / "images").glob("*.sh")):
        assert run("bash", "-n", script).returncode == 0, script.name
