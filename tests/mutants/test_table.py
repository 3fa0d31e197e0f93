"""Every row of the table fits the code and names tests that exist. `make mutants` says whether each is caught."""

import functools
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from executor_svc.native.build import (
    COMPILERS,
    SOURCE_DIRECTORY,
    NativeUnavailableError,
    build_library,
    cache_directory,
)
from tests.mutants.fault import REPOSITORY, TreeCopy
from tests.mutants.mutant import Mutant, read_mutants
from tests.mutants.run import Verdict, try_mutant

MUTANTS = read_mutants()


@functools.cache
def read(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_row_fits_the_code_and_names_tests_that_exist(mutant: Mutant) -> None:
    text = mutant.plant(read(mutant.path))
    assert text != read(mutant.path)
    if not mutant.is_c:
        compile(text, mutant.path, "exec")
    path, *names = mutant.suite.split("::")
    tests = re.findall(r"^ *(?:async )?def (test_\w+)", read(path), re.MULTILINE)
    assert tests, f"{path} has no tests"
    assert not names or names[-1] in tests, f"{path} has no {names[-1]}"


@pytest.mark.slow
def test_c_compiles_with_all_mutants_at_once(tmp_path: Path) -> None:
    try:
        build_library(cache_directory())
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    sources = shutil.copytree(SOURCE_DIRECTORY, tmp_path / "csrc")
    for mutant in MUTANTS:
        if mutant.is_c:
            path = sources / Path(mutant.path).name
            path.write_text(mutant.plant(path.read_text(encoding="utf-8")), encoding="utf-8")
    flags = ["-fsyntax-only", "-std=c11", "-march=native", "-fopenmp"]
    checked = subprocess.run([compiler, *flags, *sources.glob("*.c")], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
def test_a_mutant_is_caught_or_survives_and_a_row_without_a_run_is_stale(tmp_path: Path) -> None:
    copy, mutant = TreeCopy(tmp_path / "copy"), MUTANTS[0]
    elsewhere = "tests/unit/octavo_shared/process/test_histogram.py"

    def verdict(mutant: Mutant, failing: tuple[str, ...] = ()) -> Verdict:
        return try_mutant(copy, mutant, failing, timeout_s=300).verdict

    assert verdict(mutant) is Verdict.CAUGHT
    assert verdict(replace(mutant, suite=elsewhere)) is Verdict.SURVIVED
    assert verdict(replace(mutant, new="no Python")) is Verdict.STALE
    assert verdict(replace(mutant, suite=f"{elsewhere}::test_that_is_not_there")) is Verdict.STALE
    assert verdict(mutant, failing=(f"{mutant.suite}::test_that_fails_anyway",)) is Verdict.STALE
