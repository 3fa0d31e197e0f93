"""Which rank a process is, by the variables of launchers."""

import pytest

from executor_svc.parallel.ranks import RankAssignment, assignment_from
from octavo_shared.errors import ModelLoadError
from tests.support.each_row import each_row

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_the_variables_of_a_launcher_say_it_all() -> None:
    assert assignment_from(TORCHRUN, 4) == RankAssignment(3, 4, 1, "10.0.0.1", 29500)


def test_what_a_rank_tells_its_children_is_read_back() -> None:
    assignment = RankAssignment(1, 2, 1, "127.0.0.1", 4000)
    assert assignment_from(assignment.to_environment(), 2) == assignment


@each_row({}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"})
def test_nobody_assigned_anything(environ: dict[str, str]) -> None:
    assert assignment_from(environ, 2) is None


@each_row(
    ({}, 2, r"a group of 4 processes \(WORLD_SIZE\), but --tp is 2"),
    ({"RANK": "4"}, 4, "RANK is 4; in a group of 4 it must be 0 to 3"),
    ({"RANK": "x"}, 4, "RANK is 'x'"),
    ({"MASTER_PORT": ""}, 4, "MASTER_PORT is ''"),
)
def test_a_wrong_assignment_is_refused_in_a_sentence(change: dict[str, str], size: int, sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=sentence):
        assignment_from({**TORCHRUN, **change}, size)


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(ModelLoadError, match="MASTER_PORT is unset"):
        assignment_from({"RANK": "1", "WORLD_SIZE": "2"}, 2)
