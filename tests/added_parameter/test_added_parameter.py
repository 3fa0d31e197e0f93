"""A sampling parameter is added in the files that CONTRIBUTING names, and in no others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.added_parameter.edits import EDITED_FILES, EDITS
from tests.mutants.fault import REPOSITORY, Change, TreeCopy
from tests.support.each_row import each_row

MOST_FILES = 5


def test_contributing_names_the_edited_files() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [section] = re.findall(r"\*\*A sampling parameter\*\*.*?\n\n((?:\d\. .*\n(?:   .*\n)*)+)", text)
    named = re.findall(r"`([a-z_0-9]+/[a-z_0-9/.]+\.\w+)`", section)
    of_processors = {
        "executor_svc/sampler/torch_backend.py",
        "executor_svc/native/csrc/processors.h",
        "executor_svc/native/csrc/processors.c",
        "executor_svc/fake/sampling.py",
    }

    assert len(EDITED_FILES) <= MOST_FILES
    assert set(named) == EDITED_FILES | of_processors


@each_row(*EDITS)
def test_an_edit_fits_its_file(edit: Change) -> None:
    edit.plant((REPOSITORY / edit.path).read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_parameter_added_to_a_copy_works_from_the_flag_to_the_samplers(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "protos/generate.py", "--check"], cwd=REPOSITORY, check=True)  # the generators
    copy = TreeCopy(tmp_path)
    (tmp_path / ".venv-protos").symlink_to(REPOSITORY / ".venv-protos")
    for edit in EDITS:
        path = tmp_path / edit.path
        path.write_text(edit.plant(path.read_text(encoding="utf-8")), encoding="utf-8")

    for command in (["protos/generate.py"], ["-m", "pytest", "-q", "tests/added_parameter/checks_in_copy.py"]):
        process = copy.start([sys.executable, *command])
        output, _ = process.communicate()
        assert process.returncode == 0, output
