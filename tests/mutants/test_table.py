"""Every row of the table fits the code and names tests that exist. `make mutants` says whether each fault is caught."""

import ast
import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.fault import REPOSITORY, Fault, StaleError, TreeCopy
from tests.mutants.run import Verdict, try_fault
from tests.mutants.table import FAULTS


@functools.cache
def read(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")


@functools.cache
def names_of_tests(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"^ *(?:async )?def (test_\w+)", read(path), re.MULTILINE))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_row_fits_the_code_and_names_tests_that_exist(fault: Fault) -> None:
    text = fault.plant(read(fault.path))
    assert fault.old != fault.new
    if fault.path.endswith(".py"):
        ast.parse(text)  # a suite that cannot import the code says nothing
    assert fault.tests
    for test in fault.tests:
        path, *names = test.split("[")[0].split("::")
        assert not names or names[-1] in names_of_tests(path), f"{path} has no {names[-1]}"
        assert names_of_tests(path), f"{path} has no tests"


def test_names_are_distinct_and_there_are_enough() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert len(names) >= 60


def test_a_text_that_is_not_there_once_makes_a_row_stale() -> None:
    with pytest.raises(StaleError, match="has the old text 2 times; it must be there once"):
        Fault("", "a.py", "x", "y", ()).plant("x = x")


def test_a_fault_is_planted_in_a_copy_and_taken_out_again(tmp_path: Path) -> None:
    copy, fault = TreeCopy(tmp_path / "copy"), FAULTS[0]
    copied, sound = copy.root / fault.path, read(fault.path)
    with copy.with_fault(fault):
        assert copied.read_text(encoding="utf-8") == fault.plant(sound)
        planted_second = int(copied.stat().st_mtime)
    assert copied.read_text(encoding="utf-8") == sound
    assert int(copied.stat().st_mtime) != planted_second, "Python would take the compiled fault for current"
    assert (REPOSITORY / fault.path).read_text(encoding="utf-8") == sound


@pytest.mark.slow
def test_a_fault_is_caught_or_survives_and_a_row_without_a_run_is_stale(tmp_path: Path) -> None:
    copy, fault = TreeCopy(tmp_path / "copy"), FAULTS[0]
    elsewhere = ("tests/unit/shared/test_histogram.py",)

    def verdict(fault: Fault, failing: tuple[str, ...] = ()) -> Verdict:
        return try_fault(copy, fault, failing, timeout_s=300).verdict

    assert verdict(fault) is Verdict.CAUGHT
    assert verdict(replace(fault, tests=elsewhere)) is Verdict.SURVIVED
    assert verdict(replace(fault, new="  no Python\n")) is Verdict.STALE
    assert verdict(replace(fault, tests=(f"{elsewhere[0]}::test_that_is_not_there",))) is Verdict.STALE
    assert verdict(fault, failing=(f"{fault.tests[0]}::test_that_fails_anyway",)) is Verdict.STALE
