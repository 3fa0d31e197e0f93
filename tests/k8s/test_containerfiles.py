"""The images run without root, have versions, and the scheduler's has no torch; the linters see what they should.

No image is built here: the tests look at the files.
"""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.k8s.manifests import BIN, K8S, REPOSITORY
from tests.support.each_row import each_row

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
    if f'ENTRYPOINT ["python", "-m", "{MODULES[name]}"]' not in final:
        findings.append("starts something else")
    for imported in re.findall(r'python -c "import ([\w.]+)', text):
        if not (REPOSITORY / imported.replace(".", "/")).with_suffix(".py").exists():
            findings.append("imports a module that does not exist")
    installs = re.findall(r"pip install [^&]*", text)
    if not installs or not all("--constraint" in install for install in installs):
        findings.append("installs versions that nothing pins")
    uninstalls = re.findall(r"pip uninstall [^&\n]*\bpip\b", text.rpartition("\nFROM ")[0])
    if len(uninstalls) != 1 or "rm -rf /usr/local/bin/pip*" not in final or "site-packages/pip*" not in final:
        findings.append("has pip")
    if not re.search(r"^RUN \S+/python \S+/bill_of_materials.py >/opt/", final, re.MULTILINE):
        findings.append("has no bill of materials")
    if name == "scheduler" and re.search(r"^ARG EXTRAS=.*executor", text, re.MULTILINE):
        findings.append("has torch")
    return findings


@each_row(*CONTAINERFILES)
def test_an_image_is_as_it_should_be(path: Path) -> None:
    assert check_containerfile(path.stem, path.read_text(encoding="utf-8")) == []


@each_row(
    ("USER 65532:65532\n", "", "does not run as 65532"),
    ("python:3.11-slim-bookworm", "python:latest", "its base has no version"),
    ("COPY --from=build /opt/octavo /opt/octavo\n", "", "takes what it was built with along"),
    ("org.opencontainers.image.licenses", "licenses", "has no label licenses"),
    ('"scheduler_svc"]', '"executor_svc"]', "starts something else"),
    ("import scheduler_svc.processes.service", "import scheduler_svc.gone", "imports a module that does not exist"),
    ("EXTRAS=scheduler", "EXTRAS=executor", "has torch"),
    ("--constraint constraints.txt", "", "installs versions that nothing pins"),
    ("setuptools pip", "setuptools", "has pip"),
    ("/usr/local/bin/pip* ", "", "has pip"),
    ("RUN /opt/octavo/bin/python", "# RUN", "has no bill of materials"),
)
def test_a_planted_mistake_in_an_image_is_found(old: str, new: str, finding: str) -> None:
    text = (REPOSITORY / "images/scheduler.Containerfile").read_text(encoding="utf-8")
    assert old in text

    assert finding in check_containerfile("scheduler", text.replace(old, new))


def test_both_images_are_there() -> None:
    assert [path.stem for path in CONTAINERFILES] == ["executor", "scheduler"]


def installed_with(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """Yield the names of a package and of all that it needs, as they are installed here."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    yield name
    for line in importlib.metadata.requires(name) or ():
        needed = Requirement(line)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield from installed_with(canonicalize_name(needed.name), frozenset(needed.extras), seen)


def pinned() -> set[str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}


@each_row(*MODULES)
def test_whatever_an_image_installs_is_pinned(name: str) -> None:
    text = (REPOSITORY / f"images/{name}.Containerfile").read_text()
    found = re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert found is not None
    installed = set(installed_with("octavo", frozenset(found[1].split(",")), set())) - {"octavo"}
    assert len(installed) > 30
    # What torch brings for CUDA it pins itself.
    assert {each for each in installed - pinned() if not each.startswith("nvidia-")} == set()


def test_the_build_of_octavo_itself_is_pinned() -> None:
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {Requirement(each).name for each in build} <= pinned()
    for name in MODULES:
        text = (REPOSITORY / f"images/{name}.Containerfile").read_text()
        assert "PIP_BUILD_CONSTRAINT=/src/constraints.txt" in text.partition("pip install")[0]


DIGEST = "docker.io/library/python@sha256:" + "0" * 64


@pytest.mark.parametrize("script", ["build.sh", "rehearse.sh"])
@pytest.mark.parametrize(
    ("version", "base", "is_refused"),
    [
        ("0.2.0", "", True),
        ("0.2.0", "docker.io/library/python:3.11-slim-bookworm", True),
        ("0.2.0", DIGEST[:-1], True),
        ("0.2.0", DIGEST + "0", True),
        ("0.2.0", DIGEST, False),
        ("0.2.0.dev0", "", False),
    ],
)
def test_the_base_of_a_release_has_a_digest(
    script: str, version: str, base: str, is_refused: bool, tmp_path: Path
) -> None:
    shutil.copytree(REPOSITORY / "images", tmp_path / "images")
    (tmp_path / "octavo").mkdir()
    (tmp_path / "octavo/__init__.py").write_text(f'__version__ = "{version}"\n')
    (tmp_path / "bin").mkdir()
    for name in ("buildah", "mmdebstrap"):  # which may be installed here, and would work for minutes
        (tmp_path / "bin" / name).write_text('#!/bin/sh\necho "$0 $*"\nexit 3\n')
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path}/bin:/usr/bin:/bin"

    result = subprocess.run(
        [tmp_path / "images" / script, tmp_path],
        env={"PATH": path, "BASE": base},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    sentence = f"octavo: {version} is a release, and its base image '{base}' has no digest: set BASE=NAME@sha256:DIGEST"
    default = "docker.io/library/python:3.11-slim-bookworm"
    if is_refused:
        assert result.returncode == 1
        assert result.stderr == sentence.replace("''", f"'{default}'") + "\n"
        assert "buildah" not in result.stdout
    elif script == "build.sh":
        assert f"--build-arg BASE={base or default} " in result.stdout
    else:
        assert "is a release" not in result.stderr


def test_the_bill_of_materials_names_every_package_of_the_python_that_writes_it(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(
        "Package: libc6\nStatus: install ok installed\nVersion: 2:2.36-9+deb12u1\nDescription: C\n Package: no\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    code = f"""if True:
        import json, pathlib, runpy
        bill = runpy.run_path("images/bill_of_materials.py")["bill_of_materials"]
        print(json.dumps(bill(pathlib.Path({str(status)!r}))))
    """
    result = run(sys.executable, "-c", code)
    assert result.stderr == ""
    bill = json.loads(result.stdout)

    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    purls = [component["purl"] for component in bill["components"]]
    assert purls == sorted(set(purls))
    assert [purl for purl in purls if purl.startswith("pkg:deb/")] == ["pkg:deb/debian/libc6@2%3A2.36-9%2Bdeb12u1"]
    for each in importlib.metadata.distributions():
        name, version = canonicalize_name(each.metadata["Name"]), each.version.replace("+", "%2B")
        assert f"pkg:pypi/{name}@{version.replace('!', '%21')}" in purls
    for component in bill["components"]:
        assert component["type"] == "library"
        assert component["bom-ref"] == component["purl"]
        assert component["name"]
        assert component["version"]


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
