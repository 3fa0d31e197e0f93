"""Every row of the table fits the code and names tests that exist. `make mutants` says whether each fault is caught."""

import ast
import functools
import re

import pytest

from tests.mutants.fault import REPOSITORY, Fault, StaleError
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
