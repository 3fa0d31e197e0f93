"""A lost executor changes nothing that a client sees, whichever step it is lost at.

The real fleet runs on fake workers, on a virtual transport. One executor is killed once in a run, at a
step of its own and at one of three points; tokens, log-probabilities and hypotheses must be those
that each request gets when it runs alone and nobody is killed.
"""

import pytest

from executor_svc.fake.worker import FakeWorker
from tests.support.fleet import Outcome
from tests.support.kills import (
    NUM_TOKENS,
    Kill,
    Point,
    Pools,
    Scene,
    check_kill,
    make_groups,
    num_steps_of,
    outcomes_alone,
)


def make_worker(index: int, num_blocks: int) -> FakeWorker:
    return FakeWorker(
        block_size_tokens=(4, 8)[index],
        num_device_blocks=num_blocks,
        num_host_blocks=(60, 0)[index],
        max_model_len=112,
        max_num_seqs=(16, 12)[index],
        max_num_batched_tokens=(40, 24)[index],
        eos_probability=0.02,
        sleep=lambda seconds: None,
    )


POOLS = Pools(alone=80, first=130, second=50, host=60)
ALL_SCENES = [Scene(num_executors, depth, make_worker, POOLS) for num_executors in (1, 2) for depth in (1, 2, 3)]


@pytest.fixture(scope="module")
def alone() -> list[Outcome]:
    outcomes = outcomes_alone(ALL_SCENES[0], make_groups())
    outputs = [output for outcome in outcomes for output in outcome.outputs]
    assert [len(output.token_ids) for output in outputs].count(NUM_TOKENS) == 5
    assert {len(output.logprobs) for output in outputs} >= {0, NUM_TOKENS}
    assert sum(bool(outcome.search) for outcome in outcomes) == 2
    of_prompts = [outcome.prompt_logprobs for outcome in outcomes if outcome.prompt_logprobs[0]]
    assert [[len(values) for values in prompt] for prompt in of_prompts] == [[16, 0, 0], [69, 138, 138], [11, 11, 11]]
    assert {len(output.alternatives) for output in outputs} >= {0, 30}
    return outcomes


@pytest.mark.parametrize("scene", ALL_SCENES, ids=str)
def test_an_executor_killed_now_and_then_costs_no_token(scene: Scene, alone: list[Outcome]) -> None:
    num_steps = num_steps_of(scene, make_groups(), alone)
    for number, point in enumerate(Point, start=1):
        check_kill(scene, make_groups(), Kill(number * num_steps // 4, point), alone)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", Point, ids=lambda point: point.name)
@pytest.mark.parametrize("scene", ALL_SCENES, ids=str)
def test_an_executor_killed_at_any_step_costs_no_token(scene: Scene, point: Point, alone: list[Outcome]) -> None:
    for step_index in range(num_steps_of(scene, make_groups(), alone)):
        check_kill(scene, make_groups(), Kill(step_index, point), alone)
