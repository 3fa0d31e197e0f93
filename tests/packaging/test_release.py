"""What a release says of itself agrees; `check_wheels.py` looks into what is built of it."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import octavo
from tests.packaging.published_files import PACKAGES, version_of
from tests.support.each_row import each_row

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_of_the_package_is_that_of_the_code() -> None:
    assert version_of(ROOT) == octavo.__version__
    assert PROJECT["dynamic"] == ["version"], "octavo/__init__.py is the only place that has it"


def test_the_changelog_has_a_section_for_what_is_here() -> None:
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sections[0] in ("Unreleased", octavo.__version__)


def test_every_recorded_release_has_a_dated_section() -> None:
    dated = re.findall(
        r"^## (\S+) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    recorded = [archive.stem.removeprefix("octavo-") for archive in (ROOT / "tests/skew").glob("octavo-*.zip")]
    assert {version for version in recorded if ".dev" not in version} <= set(dated)


def test_the_upgrade_table_has_the_release() -> None:
    assert f"| {octavo.__version__} |" in (ROOT / "docs/upgrades.md").read_text(encoding="utf-8")


@each_row(*PACKAGES)
def test_each_package_says_that_it_has_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@each_row("octavo", "octavo-scheduler", "octavo-executor")
def test_each_command_has_its_function(command: str) -> None:
    module, _, function = PROJECT["scripts"][command].partition(":")
    assert callable(getattr(import_module(module), function))


def test_the_checklist_names_only_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    named = set(re.findall(r"`make ([\w-]+)`", (ROOT / "docs/releasing.md").read_text(encoding="utf-8")))
    assert {"check", "test-all", "baseline", "record-release"} <= named
    assert named <= targets | {"wheels", "docs"}
