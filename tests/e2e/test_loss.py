"""A lost executor changes no bit of what a client gets: real models, whichever step the executor is lost at.

The scenes are those of `tests/property/test_loss.py`, with shorter outputs. Two executors differ in block size and in
threads, so that a request goes on where the work is cut in another way.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.worker.interface import Worker
from scheduler_svc.core.sequence import SequenceGroup
from tests.numerics.real_model import RealModel
from tests.numerics.tiny_models import save_tiny_model
from tests.support.kills import Kill, Point, Pools, Scene, check_kill, make_groups, num_steps_of, outcomes_alone

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_BLOCKS = 130
SHORTENED = 4
FIRST_ID = 3
POOLS = Pools(alone=26, first=80, second=30, host=40)
LAYOUTS = ((1, 1), (1, 2), (1, 3), (2, 1), (2, 3))


def workers_of(model: RealModel) -> Callable[[int, int], Worker]:
    def make_worker(index: int, num_blocks: int) -> Worker:
        return model.worker(block_size_tokens=(4, 8)[index], num_threads=1 + index)

    return make_worker


def check_kills(model: RealModel, layout: tuple[int, int], *, at_any_step: bool) -> None:
    """Kill an executor of a scene: at any step and point, or at each point once."""
    scene = Scene(*layout, workers_of(model), POOLS)

    def groups() -> list[SequenceGroup]:
        return make_groups(SHORTENED, FIRST_ID)

    alone = outcomes_alone(scene, groups())
    num_steps = num_steps_of(scene, groups(), alone)
    kills = [Kill(number * num_steps // 4, point) for number, point in enumerate(Point, start=1)]
    if at_any_step:
        kills = [Kill(step, point) for step in range(num_steps) for point in Point]
    for kill in kills:
        check_kill(scene, groups(), kill, alone)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    directory = tmp_path_factory.mktemp("loss")
    save_tiny_model(directory)
    return RealModel(directory, 4, NUM_BLOCKS)


@pytest.mark.parametrize("layout", [(1, 2), (2, 3)], ids=str)
def test_a_killed_executor_changes_no_output(tiny: RealModel, layout: tuple[int, int]) -> None:
    check_kills(tiny, layout, at_any_step=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_executor_killed_at_any_step_changes_no_output(tiny: RealModel, layout: tuple[int, int]) -> None:
    check_kills(tiny, layout, at_any_step=True)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("layout", [(1, 2), (2, 3)], ids=str)
def test_an_executor_of_the_demo_model_killed_at_any_step_changes_no_output(
    float32_model: Path, layout: tuple[int, int], quantization: str
) -> None:
    check_kills(RealModel(float32_model, 4, NUM_BLOCKS, quantization=quantization), layout, at_any_step=True)
