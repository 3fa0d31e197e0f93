"""The simulated network behaves as grpc.aio does: scenes are played on both, and all must have seen the same.

What grpc.aio itself leaves open is not in the scenes: which of two tasks goes on first, whether the reason of a broken
connection is wrapped in "Stream removed (...)" and which system call met it, and whether a call that meets a server's
graceful end is UNAVAILABLE or CANCELLED.
"""

import contextlib

import pytest

from tests.simulation.scenes import breaks, streams, unary
from tests.simulation.scenes.stage import Scene, play_really, play_simulated

SCENES = [*unary.SCENES, *streams.SCENES, *breaks.SCENES]

# On each seed, tasks meet in another order and messages take another time.
NUM_SEEDS = 10
NUM_PLAYS = 10


@pytest.mark.parametrize("scene", [pytest.param(scene, id=scene.__name__) for scene in SCENES])
def test_clients_and_handlers_see_what_grpc_shows_them(scene: Scene) -> None:
    shown = play_simulated(scene, "0")
    assert any(shown.values()), "the scene notes nothing"
    for seed in range(1, NUM_SEEDS):
        assert play_simulated(scene, str(seed)) == shown, f"seed {seed}"
    really = []
    for _ in range(NUM_PLAYS):  # on a busy machine gRPC's threads may come late, and it shows what it seldom does
        with contextlib.suppress(TimeoutError):
            really.append(play_really(scene))
        if shown in really:
            return
    pytest.fail(f"gRPC shows {really}, the simulated network {shown}")
