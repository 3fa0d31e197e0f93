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
from tests.mutants.fault import REPOSITORY, StaleError, TreeCopy
from tests.mutants.mutant import Mutant, read_mutants
from tests.mutants.run import Verdict, try_mutant

MUTANTS = read_mutants()
MOST_ROWS = 64
INVARIANTS = range(1, 10)


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


def test_names_are_distinct_rows_are_few_and_each_invariant_has_one() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) <= MOST_ROWS
    assert {name.split(":")[0] for name in names} >= set(map(str, INVARIANTS))


PYTHON = "class A:\n  def f(self):\n    return ['é', a  <  c, a < b, (a\n < b)]\n\ndef f(a, b):\n    return a < b\n"
C = "static int f(int a,\n             int b) {\n    return a+b  * b;\n}\n\nint g(int a) {\n    return a + b * b;\n}\n"


def test_an_expression_is_found_in_its_function_however_it_is_laid_out() -> None:
    of_python = Mutant("", "a:f", "a<b", "a, b", "")
    assert of_python.plant(PYTHON).endswith("    return (a, b)\n")
    assert Mutant("", "a:A.f", "a<c", "0", "").plant(PYTHON) == PYTHON.replace("a  <  c", "(0)")
    assert Mutant("", "c/a.c:f", "a + b*b", "0", "").plant(C) == C.replace("a+b  * b", "0")
    assert (of_python.path, Mutant("", "c/a.c:f", "", "", "").path) == ("a.py", "c/a.c")


@pytest.mark.parametrize(
    ("place", "old", "new", "text", "problem"),
    [
        ("a:A.f", "a < b", "0", PYTHON, "has a < b 2 times; it must be there once"),
        ("a:g", "a < b", "0", PYTHON, "has a < b 0 times"),
        ("a:f", "a < b", "return", PYTHON, "a:f: invalid syntax"),
        ("c/a.c:g", "a * b", "0", C, "has a \\* b 0 times"),
    ],
)
def test_a_row_that_does_not_fit_is_stale(place: str, old: str, new: str, text: str, problem: str) -> None:
    with pytest.raises(StaleError, match=problem):
        Mutant("", place, old, new, "").plant(text)


def test_a_mutant_is_planted_in_a_copy_and_taken_out_again(tmp_path: Path) -> None:
    copy, mutant = TreeCopy(tmp_path / "copy"), MUTANTS[0]
    copied, sound = copy.root / mutant.path, read(mutant.path)
    with copy.with_fault(mutant):
        assert copied.read_text(encoding="utf-8") == mutant.plant(sound)
        planted_second = int(copied.stat().st_mtime)
    assert copied.read_text(encoding="utf-8") == sound
    assert int(copied.stat().st_mtime) != planted_second, "Python would take the compiled fault for current"
    assert (REPOSITORY / mutant.path).read_text(encoding="utf-8") == sound


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
