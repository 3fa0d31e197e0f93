"""What `check_wheels.py` demands of the archives: right ones pass, and each planted mistake is found."""

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.published_files import PACKAGES, REQUIRED, check_archives

README = "# Octavo\n\nWhat it is.\n"
PYPROJECT = """\
[project]
name = "octavo"
version = "1.2.3"
description = "Inference"
readme = "README.md"
license = "Apache-2.0"
requires-python = ">=3.11"

[project.optional-dependencies]
scheduler = ["numpy"]
"""
METADATA = f"""\
Metadata-Version: 2.4
Name: octavo
Version: 1.2.3
Summary: Inference
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Provides-Extra: scheduler
Description-Content-Type: text/markdown

{README}"""
INFO = "octavo-1.2.3.dist-info/METADATA"

Files = dict[str, str]


def mistakes_of(folder: Path, change: Callable[[Files, Files, Files], None]) -> list[str]:
    """Return what is found in the archives of a small project after `change` of its wheel, sdist and direct wheel."""
    source = {f"{Path(package).name}/__init__.py": "" for package in PACKAGES} | dict.fromkeys(REQUIRED, "")
    source |= {"octavo/__init__.py": '__version__ = "1.2.3"\n', "scheduler_svc/page/index.html": "<html></html>"}
    for name, text in {**source, "README.md": README, "pyproject.toml": PYPROJECT}.items():
        path = folder / "source" / (f"shared/{name}" if name.startswith("octavo_shared/") else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wheel, sdist, direct = {**source, INFO: METADATA}, dict(source), {**source, INFO: METADATA}
    change(wheel, sdist, direct)
    for archive, files in (("wheel.whl", wheel), ("direct.whl", direct)):
        with zipfile.ZipFile(folder / archive, "w") as zipped:
            for name, text in files.items():
                zipped.writestr(name, text)
    with tarfile.open(folder / "sdist.tar.gz", "w:gz") as tarred:
        for name, text in sdist.items():
            member = tarfile.TarInfo(f"octavo-1.2.3/{name}")
            member.size = len(text.encode())
            tarred.addfile(member, io.BytesIO(text.encode()))
    return check_archives(
        folder / "source",
        wheel=folder / "wheel.whl",
        sdist=folder / "sdist.tar.gz",
        direct=folder / "direct.whl",
        private=[Path("/home/somebody/octavo")],
    )


def test_right_archives_pass(tmp_path: Path) -> None:
    assert mistakes_of(tmp_path, lambda wheel, sdist, direct: None) == []


def remove(name: str) -> Callable[[Files, Files, Files], None]:
    def change(wheel: Files, sdist: Files, direct: Files) -> None:
        del wheel[name], direct[name]

    return change


def add(archive: int, name: str, text: str) -> Callable[[Files, Files, Files], None]:
    def change(*archives: Files) -> None:
        archives[archive][name] = text

    return change


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        (remove("octavo/py.typed"), "octavo/py.typed is not in the wheel"),
        (
            remove("scheduler_svc/page/index.html"),
            "scheduler_svc/page/index.html is in the checkout and not in the wheel",
        ),
        (add(0, "tests/test_octavo.py", ""), "tests/test_octavo.py is in the wheel and not in the checkout"),
        (add(2, "octavo/new.py", ""), "octavo/new.py is in the checkout's and not in the sdist's wheel"),
        (add(2, "octavo/__init__.py", "other"), "octavo/__init__.py differs"),
        (
            add(1, "notes", "see /home/somebody/octavo/notes"),
            "notes in sdist.tar.gz names /home/somebody/octavo, a folder of this machine",
        ),
        (
            add(0, INFO, METADATA.replace("Version: 1.2.3", "Version: 1.2")),
            "the metadata's Version is '1.2'; it must be '1.2.3'",
        ),
        (add(0, INFO, METADATA.replace("scheduler", "other")), "the metadata's extras are ['other']"),
        (add(0, INFO, METADATA.replace("What it is", "")), "the metadata's description is not README.md"),
    ],
)
def test_a_planted_mistake_is_found(
    change: Callable[[Files, Files, Files], None], mistake: str, tmp_path: Path
) -> None:
    assert mistake in mistakes_of(tmp_path, change)
