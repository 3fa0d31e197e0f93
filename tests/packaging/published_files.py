"""What must be in the sdist and in the wheel, and what must not; `check_wheels.py` builds them."""

import email.message
import email.parser
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

# Where each is in the checkout; what is in a wheel begins with its last part.
PACKAGES = ("executor_svc", "octavo", "scheduler_svc", "shared/octavo_shared")

# Read at run time, so without one of them the wheel would break, and nothing would say so before.
REQUIRED = (
    *(f"{Path(package).name}/py.typed" for package in PACKAGES),
    "executor_svc/native/csrc/attention.c",
    "executor_svc/native/csrc/step.h",
    "octavo/generation/v1/generation_pb2.pyi",
)


def check_archives(source: Path, *, wheel: Path, sdist: Path, direct: Path, private: Sequence[Path]) -> list[str]:
    """Return a sentence for each thing that is wrong.

    Args:
        source: What they were built from.
        wheel: Built from the sdist.
        sdist: The archive of the sources.
        direct: Built from `source`.
        private: Folders of this machine, which nothing that is published may name.
    """
    in_wheel, in_direct, in_sdist = _read_wheel(wheel), _read_wheel(direct), _read_sdist(sdist)
    mistakes = _differences("the sdist's wheel", in_wheel, "the checkout's", in_direct)
    of_source = {
        str(path.relative_to((source / package).parent)): path.read_bytes()
        for package in PACKAGES
        for path in (source / package).rglob("*")
        if path.is_file()
    }
    code = {name: data for name, data in in_wheel.items() if ".dist-info/" not in name}
    mistakes += _differences("the wheel", code, "the checkout", of_source)
    mistakes += [f"{name} is not in the wheel" for name in REQUIRED if name not in in_wheel]
    mistakes += [
        f"{name} in {archive.name} names {folder}, a folder of this machine"
        for archive, files in ((wheel, in_wheel), (sdist, in_sdist))
        for name, data in files.items()
        for folder in private
        if str(folder).encode() in data
    ]
    [metadata] = [data for name, data in in_wheel.items() if name.endswith(".dist-info/METADATA")]
    return mistakes + check_metadata(email.parser.Parser().parsestr(metadata.decode()), source)


def check_metadata(metadata: "email.message.Message[str, str]", source: Path) -> list[str]:
    """Return a sentence for each field of the wheel's metadata that is not what the project says of itself."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected = {
        "Name": project["name"],
        "Version": version_of(source),
        "Summary": project["description"],
        "License-Expression": project["license"],
        "License-File": "LICENSE",
        "Requires-Python": project["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    mistakes = [
        f"the metadata's {field} is {metadata[field]!r}; it must be {value!r}"
        for field, value in expected.items()
        if metadata[field] != value
    ]
    if sorted(metadata.get_all("Provides-Extra", [])) != sorted(project["optional-dependencies"]):
        mistakes.append(f"the metadata's extras are {metadata.get_all('Provides-Extra')}")
    readme = (source / project["readme"]).read_text(encoding="utf-8")
    if str(metadata.get_payload()).strip() != readme.strip():
        mistakes.append(f"the metadata's description is not {project['readme']}")
    return mistakes


def version_of(source: Path) -> str:
    """Return what octavo/__init__.py says. Raises ValueError: it says none."""
    found = re.search(
        r'^__version__ = "(.+)"$', (source / "octavo/__init__.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    if found is None:
        raise ValueError("octavo/__init__.py has no __version__")
    return found[1]


def _differences(one: str, files: dict[str, bytes], other: str, others: dict[str, bytes]) -> list[str]:
    return [
        *(f"{name} is in {one} and not in {other}" for name in sorted(files.keys() - others.keys())),
        *(f"{name} is in {other} and not in {one}" for name in sorted(others.keys() - files.keys())),
        *(f"{name} differs" for name in sorted(files.keys() & others.keys()) if files[name] != others[name]),
    ]


def _read_wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _read_sdist(path: Path) -> dict[str, bytes]:
    """Return the files by their names below the folder that all of them are in."""
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                files[member.name.partition("/")[2]] = file.read()
    return files
