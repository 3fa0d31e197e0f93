"""Beam search through the real core and the real worker finds what transformers' `generate` finds.

All searches of one width run in one batch, among sampled and greedy requests, and by schedules that
swap them out or let them be computed again in the middle. `tests/numerics/ties.py` says what is the same. The
other requests get, bit for bit, what they get alone.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.executors.serving_limits import PlannerSettings
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from tests.numerics.real_model import RealModel
from tests.numerics.test_beam_search_oracle import Case, generated
from tests.numerics.ties import assert_same_search
from tests.numerics.tiny_models import VARIANTS, VOCAB_SIZE, save_tiny_model
from tests.support.fleet import assert_same_outcomes
from tests.support.schedules import GREEDY, Play, Request, Schedule

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTHS = (2, 4, 8)
PENALTIES = (0.0, 1.0, 2.0)
BLOCK_SIZE = 4
NUM_BLOCKS = 2000
TINY_END_TOKEN_IDS = tuple(range(5, VOCAB_SIZE, 12))


@dataclass(frozen=True)
class Way:
    """How the searches run: with so many steps in flight, preempted by this mode or not at all."""

    num_steps_in_flight: int
    preemption: PreemptionMode | None = None

    def schedule(self, cases: Sequence[Case], all_blocks: int) -> Schedule:
        """Return a schedule for these searches; with a preemption it has blocks for two of them."""
        num_blocks = all_blocks if self.preemption is None else 2 * max(map(most_blocks, cases))
        settings = PlannerSettings(preemption_mode=self.preemption, watermark=0.0, max_num_batched_tokens=160)
        return Schedule(num_blocks, all_blocks, settings, self.num_steps_in_flight)


WAYS = [Way(1), Way(2), *(Way(depth, mode) for mode in PreemptionMode for depth in (1, 2))]


def most_blocks(case: Case) -> int:
    """Return the blocks of a search whose beams share nothing but the full blocks of the prompt."""
    num_shared_blocks, num_own_prompt_tokens = divmod(len(case.prompt), BLOCK_SIZE)
    return num_shared_blocks + case.params.beam_width * -(-(num_own_prompt_tokens + case.max_new_tokens) // BLOCK_SIZE)


class Oracle:
    """What transformers finds, computed once for each case."""

    def __init__(self, model: RealModel) -> None:
        self.model = model
        self._found: dict[str, list[tuple[list[int], float]]] = {}

    def expected(self, case: Case) -> list[tuple[list[int], float]]:
        """Return (output tokens, score) of each hypothesis, best first."""
        if repr(case) not in self._found:
            self._found[repr(case)] = generated(self.model.reference, case)
        return self._found[repr(case)]

    def check(self, way: Way, cases: Sequence[Case], others: Sequence[Request]) -> None:
        """Run all in one batch, and fail unless every search and every other request gets what it should."""
        searches = [
            Request(
                case.prompt,
                StopConditions(case.max_new_tokens, frozenset(case.end_token_ids), ignore_eos=True),
                SamplingRow(),
                beam_search=case.params,
            )
            for case in cases
        ]

        play = Play(way.schedule(cases, self.model.num_blocks), [*others, *searches], self.model.worker).run()

        for arrival, case in enumerate(cases, start=len(others)):
            assert_same_search(
                play.searches[arrival],
                self.expected(case),
                case.prompt,
                case.params.length_penalty,
                self.model.logits,
            )
        lone = Schedule(self.model.num_blocks)
        alone = [Play(lone, [request], self.model.worker).run().outcome_of(0) for request in others]
        assert_same_outcomes(map(play.outcome_of, range(len(others))), alone, "beside searches")
        in_the_middle = {
            preempted.mode
            for preempted in play.preemptions
            if preempted.arrival >= len(others) and preempted.num_output_tokens > 1
        }
        assert way.preemption is None or way.preemption in in_the_middle, "no search was preempted in the middle"


def grid(
    beam_width: int, prompts: Sequence[list[int]], end_token_ids: tuple[int, ...], max_new_tokens: int
) -> list[Case]:
    """Return a case for each length penalty and mode of early stopping; they share the prompts in turn."""
    return [
        Case(BeamSearchParams(beam_width, beam_width, penalty, mode), prompt, end_token_ids, max_new_tokens)
        for (penalty, mode), prompt in zip(
            itertools.product(PENALTIES, EarlyStopping), itertools.cycle(prompts), strict=False
        )
    ]


def bystanders(prompts: Sequence[list[int]], max_tokens: int) -> list[Request]:
    """Return a greedy and a sampled request."""
    conditions = StopConditions(max_tokens, ignore_eos=True)
    sampled = SamplingRow(temperature=0.8, top_p=0.95, seed=17, num_logprobs=0)
    return [Request(prompts[0], conditions, GREEDY), Request(prompts[-1], conditions, sampled)]


@pytest.fixture(scope="module")
def tiny_oracle(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Oracle:
    """A variant of the tiny models, by name."""
    directory = tmp_path_factory.mktemp("oracle") / request.param
    save_tiny_model(directory, **VARIANTS[request.param])
    return Oracle(RealModel(directory, BLOCK_SIZE, NUM_BLOCKS))


def tiny_prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(len(lengths))
    return [random.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


one_model = pytest.mark.parametrize("tiny_oracle", ["gqa"], indirect=True)
other_models = pytest.mark.parametrize("tiny_oracle", [name for name in VARIANTS if name != "gqa"], indirect=True)
widths = pytest.mark.parametrize("beam_width", WIDTHS)
ways = pytest.mark.parametrize("way", WAYS, ids=str)


@one_model
@pytest.mark.parametrize(
    ("beam_width", "way"),
    [(2, Way(1)), (4, Way(2)), (4, Way(2, PreemptionMode.SWAP)), (8, Way(2, PreemptionMode.RECOMPUTE))],
    ids=str,
)
def test_searches_in_one_batch_equal_transformers(tiny_oracle: Oracle, beam_width: int, way: Way) -> None:
    prompts = tiny_prompts(5, 16, 1)
    cases = grid(beam_width, prompts, TINY_END_TOKEN_IDS, max_new_tokens=10)

    tiny_oracle.check(way, cases, bystanders(prompts, 15))


def check_long_searches(oracle: Oracle, way: Way, beam_width: int) -> None:
    prompts = tiny_prompts(3, 33, 8, 50)
    cases = grid(beam_width, prompts, TINY_END_TOKEN_IDS, max_new_tokens=24)

    oracle.check(way, cases, bystanders(prompts, 40))


@pytest.mark.slow
@pytest.mark.timeout(600)
@one_model
@widths
@ways
def test_long_searches_equal_transformers(tiny_oracle: Oracle, way: Way, beam_width: int) -> None:
    check_long_searches(tiny_oracle, way, beam_width)


@pytest.mark.slow
@pytest.mark.timeout(600)
@other_models
@pytest.mark.parametrize("mode", PreemptionMode)
def test_long_searches_on_other_models_equal_transformers(tiny_oracle: Oracle, mode: PreemptionMode) -> None:
    check_long_searches(tiny_oracle, Way(2, mode), beam_width=4)


@dataclass(frozen=True)
class DemoText:
    """The demo model, prompts from a text, and what ends a sentence or a line of it."""

    oracle: Oracle
    prompts: list[list[int]]
    end_token_ids: tuple[int, ...]


@pytest.fixture(scope="module")
def demo(float32_model: Path) -> DemoText:
    tokenizer = AutoTokenizer.from_pretrained(float32_model)
    ids = tokenizer((Path(__file__).parents[2] / "LICENSE").read_text()).input_ids
    prompts = [ids[start : start + length] for start, length in ((400, 17), (900, 30))]
    ends = tuple(tokenizer.convert_tokens_to_ids([".", ",", "\u010a", tokenizer.eos_token]))
    return DemoText(Oracle(RealModel(float32_model, BLOCK_SIZE, 400)), prompts, ends)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_searches_on_the_demo_model_equal_transformers(demo: DemoText) -> None:
    cases = [
        Case(BeamSearchParams(width, width), prompt, demo.end_token_ids, max_new_tokens=5)
        for width, prompt in itertools.product((2, 4), demo.prompts)
    ]

    demo.oracle.check(Way(2), cases, bystanders(demo.prompts, 5))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(3600)
@widths
@pytest.mark.parametrize("way", [Way(2), Way(1, PreemptionMode.SWAP), Way(2, PreemptionMode.RECOMPUTE)], ids=str)
def test_the_whole_grid_on_the_demo_model_equals_transformers(demo: DemoText, way: Way, beam_width: int) -> None:
    cases = grid(beam_width, demo.prompts, demo.end_token_ids, max_new_tokens=10)

    demo.oracle.check(way, cases, bystanders(demo.prompts, 20))
