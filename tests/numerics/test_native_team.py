"""The threads of the C library: how many there are, and how they wait for each other."""

import ctypes
import shutil
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.native.binding import WeightMemory
from executor_svc.native.build import SOURCE_DIRECTORY, build_library
from executor_svc.native.library import NativeLibrary, TeamStruct
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import NumberFormat
from tests.numerics.native import FORMATS, LANES, NUM_THREADS, library_path
from tests.support.each_row import each_row

MS = 1_000_000


@cache
def judge_team() -> Any:
    """Return the function of the library."""
    judge = ctypes.CDLL(str(library_path("widest"))).octavo_judge_team
    judge.restype, judge.argtypes = None, (ctypes.c_void_p, ctypes.c_long)
    return judge


@dataclass
class Judged:
    """A team that is judged after regions of so many ms."""

    team: TeamStruct = field(default_factory=lambda: TeamStruct(num_threads=4, size=4))
    now_ms: int = 0

    def run(self, elapsed: int, worked: int, lost: int = 0) -> int:
        """Return the size after regions; `worked` and `lost` are sums over the threads."""
        self.now_ms += elapsed
        self.team.elapsed_ns += elapsed * MS
        self.team.worked_ns += worked * MS
        self.team.lost_ns += lost * MS
        return self.judge()

    def judge(self) -> int:
        judge_team()(ctypes.byref(self.team), self.now_ms * MS)
        return int(self.team.size)


@pytest.mark.parametrize(
    ("elapsed", "worked", "lost", "size"),
    [
        pytest.param(60, 220, 0, 4, id="all have worked"),
        pytest.param(60, 110, 30, 2, id="one was put off its core, and the others have waited for it"),
        pytest.param(60, 130, 30, 4, id="one was put off its core, but the others had work"),
        pytest.param(60, 80, 5, 4, id="they have waited for each other, with cores for all"),
        pytest.param(45, 50, 45, 4, id="too little was seen"),
    ],
)
def test_a_team_shrinks_when_other_work_makes_it_wait(elapsed: int, worked: int, lost: int, size: int) -> None:
    assert Judged().run(elapsed, worked, lost) == size


def test_short_regions_are_judged_together() -> None:
    judged = Judged()

    assert [judged.run(20, 25, 20) for _ in range(3)] == [4, 4, 2]


def test_a_small_team_grows_again_later_each_time_that_this_was_wrong() -> None:
    judged = Judged(TeamStruct(num_threads=2, size=2))
    pauses = []
    for _ in range(6):
        assert judged.run(60, 50, 30) == 1
        shrank_ms = judged.now_ms
        while judged.judge() == 1:
            judged.now_ms += 1
        pauses.append(judged.now_ms - shrank_ms)

    assert pauses == [100, 200, 400, 800, 800, 800]


def test_a_team_that_works_well_forgets_that_it_was_small() -> None:
    judged = Judged(TeamStruct(num_threads=2, size=2, pause_ns=800 * MS))
    for _ in range(4):
        assert judged.run(60, 110) == 2

    judged.run(60, 50, 30)

    assert judged.team.grows_at_ns == (judged.now_ms + 100) * MS


@each_row(*product(FORMATS, LANES))
def test_results_do_not_depend_on_the_size_of_the_team(number_format: NumberFormat, lanes: str) -> None:
    library = NativeLibrary(library_path(lanes), NUM_THREADS)
    matrix = PackedMatrix(library, 700, [(number_format, [900])], has_bias=False, memory=WeightMemory())
    matrix.weights[0].copy_(torch.randn(900, 700))
    x, results = torch.randn(33, 700), []

    for size in range(1, NUM_THREADS + 1):
        library._team = TeamStruct(num_threads=size, size=size)
        results.append(matrix(x))

    assert all(torch.equal(result, results[0]) for result in results)


TEAM_SOURCES = ("team.c", "team.h", "region.c", "region.h", "vec.h")


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return `stress_team` of team/stress.c, with the threads of the library."""
    sources = tmp_path_factory.mktemp("sources")
    for path in (Path(__file__).parent / "team/stress.c", *(SOURCE_DIRECTORY / name for name in TEAM_SOURCES)):
        shutil.copy(path, sources)
    function = ctypes.CDLL(str(build_library(tmp_path_factory.mktemp("library"), sources=sources))).stress_team
    function.restype = None
    function.argtypes = (ctypes.c_void_p, *(ctypes.c_long,) * 3, ctypes.c_uint, ctypes.c_void_p)
    return function


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("delay_us", [0, 300])
def test_each_task_counts_once_whoever_is_late(stress: Any, num_threads: int, delay_us: int) -> None:
    team, results = TeamStruct(num_threads=num_threads, size=num_threads), (ctypes.c_long * 3)()

    # Team sizes change from region to region.
    stress(ctypes.byref(team), 8, 30, delay_us, num_threads, results)

    num_faults, num_in_vain, num_by_others = results
    assert num_faults == 0
    if delay_us and num_threads > 1:
        assert num_in_vain > 0, "a task of a thread that sleeps is done by another one"
        assert num_by_others > 0, "threads are woken"
