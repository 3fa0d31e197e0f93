"""The threads of the C library: how many there are, and how they wait for each other."""

import ctypes
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from executor_svc.native import NativeLibrary
from executor_svc.native.library import TeamStruct
from executor_svc.native.matrix import PackedMatrix
from tests.numerics.native import LANES, NUM_THREADS, library_path, native_library

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
        pytest.param(25, 95, 0, 4, id="all have worked"),
        pytest.param(25, 30, 25, 2, id="one was put off its core, and all have waited for it"),
        pytest.param(25, 75, 15, 4, id="one was put off its core, but the others had work"),
        pytest.param(25, 30, 2, 4, id="they have waited for each other, with cores for all"),
        pytest.param(15, 18, 15, 4, id="too little was seen"),
    ],
)
def test_a_team_shrinks_when_other_work_makes_it_wait(elapsed: int, worked: int, lost: int, size: int) -> None:
    assert Judged().run(elapsed, worked, lost) == size


def test_short_regions_are_judged_together() -> None:
    judged = Judged()

    assert [judged.run(8, 9, 8) for _ in range(3)] == [4, 4, 2]


def test_a_small_team_grows_again_later_each_time_that_this_was_wrong() -> None:
    judged = Judged(TeamStruct(num_threads=2, size=2))
    pauses = []
    for _ in range(8):
        assert judged.run(25, 25, 15) == 1
        shrank_ms = judged.now_ms
        while judged.judge() == 1:
            judged.now_ms += 1
        pauses.append(judged.now_ms - shrank_ms)

    assert pauses == [100, 200, 400, 800, 1600, 3200, 3200, 3200]


def test_a_team_that_works_well_forgets_that_it_was_small() -> None:
    judged = Judged(TeamStruct(num_threads=2, size=2, pause_ns=800 * MS))
    for _ in range(4):
        assert judged.run(25, 45) == 2

    judged.run(25, 25, 15)

    assert judged.team.grows_at_ns == (judged.now_ms + 100) * MS


@pytest.mark.parametrize("is_int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("lanes", LANES)
def test_results_do_not_depend_on_the_size_of_the_team(lanes: str, is_int8: bool) -> None:
    library = NativeLibrary(library_path(lanes), NUM_THREADS)
    matrix = PackedMatrix(library, 700, [900], has_bias=False, is_int8=is_int8)
    matrix.weights[0].copy_(torch.randn(900, 700))
    x, results = torch.randn(33, 700), []

    for size in range(1, NUM_THREADS + 1):
        library._team = TeamStruct(num_threads=size, size=size)
        results.append(matrix(x))

    assert all(torch.equal(result, results[0]) for result in results)


def test_a_thread_that_waits_long_sleeps_and_is_woken() -> None:
    # One panel of columns is work for one thread only.
    matrix = PackedMatrix(native_library("widest"), 400_000, [8], has_bias=False, is_int8=False)
    x = torch.zeros(1, 400_000)
    matrix(x)

    process_s, thread_s = time.process_time(), time.thread_time()
    for _ in range(10):
        matrix(x)

    assert time.process_time() - process_s < 1.6 * (time.thread_time() - thread_s)
