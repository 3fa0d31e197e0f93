"""What a client gets does not depend on how it was scheduled: bit for bit, on the fake executor.

Each example draws requests and a schedule: batch and arrivals, budget, pools, kind of preemption, prefix
cache, prefill mode, neighbours that leave, an executor that is lost. The fake worker checks every block
that attention reads. The tokens, log-probabilities and hypotheses of each request are those that
it gets alone, whole prompt in one step, in lock-step, with nothing cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.fake.tokenizer import EOS_TOKEN_ID
from executor_svc.fake.worker import FakeWorker
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind
from octavo_shared.step_wire.step import SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.core.limits import PreemptionMode, PrefillMode
from scheduler_svc.executors.serving_limits import PlannerSettings
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from tests.support.fleet import Outcome
from tests.support.schedules import GREEDY, Play, Request, Schedule

MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 40, 12
MAX_LENGTH = MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS
MAX_SEQUENCES = 4
LETTERS = range(65, 91)


@dataclass(frozen=True)
class Example:
    """Requests, the executor that runs them, and how."""

    requests: list[Request]
    schedule: Schedule
    block_size: int
    max_num_seqs: int
    budget: int
    sliding_window: int = 0
    window_blocks: int = 0
    """Of a second cache group, whose layers see 8 tokens; 0: there is none."""
    has_states: bool = False
    num_states: int = 0
    """Saved states on the device; there are as many host blocks for them as for others."""

    def play(self) -> Play:
        return Play(self.schedule, self.requests, self.make_worker).run()

    def make_worker(self) -> FakeWorker:
        return FakeWorker(
            block_size_tokens=self.block_size,
            num_device_blocks=self.schedule.num_blocks,
            num_host_blocks=self.schedule.num_host_blocks,
            max_model_len=MAX_LENGTH,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            eos_probability=0.05,
            sliding_window_tokens=self.sliding_window,
            cache_groups=self.groups if self.window_blocks else (),
            has_states=self.has_states,
            num_device_states=self.num_states,
            num_host_states=self.schedule.num_host_blocks if self.num_states else 0,
            sleep=lambda _: None,
        )

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        pools = (self.schedule.num_blocks, self.schedule.num_host_blocks)
        window_pools = (self.window_blocks, self.schedule.num_host_blocks // 2)
        full = CacheGroup(CacheKind.FULL, (0,), self.block_size, *pools)
        return full, CacheGroup(CacheKind.WINDOW, (1,), self.block_size, *window_pools, window_tokens=8)

    def outcome_alone(self, request: Request) -> Outcome:
        """What the request gets from an executor that has room for everything."""
        num_blocks = MAX_SEQUENCES * -(-MAX_LENGTH // 16)
        schedule = Schedule(num_blocks, settings=PlannerSettings(prefix_caching=False))
        alone = replace(self, requests=[request], schedule=schedule, budget=100, block_size=16, window_blocks=0)
        alone = replace(alone, has_states=False, num_states=0)
        return alone.play().outcome_of(0)


def check_every_request_gets_what_it_gets_alone(example: Example) -> None:
    play = example.play()
    for arrival, request in enumerate(example.requests):
        alone = example.outcome_alone(request)
        if arrival not in example.schedule.abort_rounds:
            assert play.outcome_of(arrival) == alone


@st.composite
def requests(draw: st.DrawFn, common: Sequence[int]) -> Request:
    """Draw a request; half of the prompts begin like the others."""
    start = draw(st.sampled_from([[], common]))
    prompt = [*start, *draw(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=MAX_PROMPT_TOKENS))]
    num_logprobs = draw(st.sampled_from([-1, 0, 3]))
    sampled = SamplingRow(
        temperature=1.0,
        seed=draw(st.integers(0, 2**64 - 1)),
        num_logprobs=num_logprobs,
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        min_tokens=draw(st.sampled_from([0, 0, 1, 5])),
    )
    kind = draw(st.sampled_from(["greedy", "seeded", "seeded", "several", "beams"]))
    width = draw(st.integers(2, MAX_SEQUENCES))
    penalty, early_stopping = draw(st.sampled_from([0.0, 1.0])), draw(st.sampled_from(EarlyStopping))
    return Request(
        prompt=prompt[:MAX_PROMPT_TOKENS],
        conditions=StopConditions(max_tokens=draw(st.integers(1, MAX_OUTPUT_TOKENS)), ignore_eos=draw(st.booleans())),
        sampling=replace(GREEDY, num_logprobs=num_logprobs) if kind in ("greedy", "beams") else sampled,
        num_sequences=width if kind == "several" else 1,
        beam_search=BeamSearchParams(width, width, penalty, early_stopping) if kind == "beams" else None,
        cache_salt=draw(st.sampled_from([0, 0, 1])),
        token_rules=TokenRules(stop_token_ids=np.array([EOS_TOKEN_ID], np.int32)),
        num_prompt_logprobs=-1 if kind == "beams" else draw(st.sampled_from([-1, -1, 0, 2])),
    )


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Draw requests and a schedule under which every request just fits."""
    common = draw(st.lists(st.sampled_from(LETTERS), max_size=MAX_PROMPT_TOKENS))
    drawn = draw(st.lists(requests(common), min_size=1, max_size=8))
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    max_num_seqs = MAX_SEQUENCES + draw(st.integers(0, 8))
    most_blocks = MAX_SEQUENCES * -(-MAX_LENGTH // block_size) + 1
    budget = max_num_seqs + draw(st.sampled_from([0, 1, 7, 30, 200]))
    settings = PlannerSettings(
        watermark=draw(st.sampled_from([0.0, 0.01, 0.3])),
        preemption_mode=draw(st.sampled_from([None, *PreemptionMode])),
        prefill_mode=draw(st.sampled_from(PrefillMode)),
        long_prefill_threshold=draw(st.sampled_from([0, 0, 5])),
        prefix_caching=draw(st.booleans()),
    )
    uses_groups, has_states = draw(st.booleans()), draw(st.sampled_from([False, False, True]))
    fewest_in_window = min(most_blocks, MAX_SEQUENCES * (-(-(8 + budget) // block_size) + 2))
    window_blocks = fewest_in_window + draw(st.sampled_from([0, 0, 9])) if uses_groups else 0
    indices = st.integers(0, len(drawn) - 1)
    schedule = Schedule(
        num_blocks=most_blocks + draw(st.sampled_from([0, 0, 9, 300])),
        num_host_blocks=draw(st.sampled_from([0, 5, 40, 300])),
        settings=settings,
        num_steps_in_flight=draw(st.integers(1, 4)),
        arrival_rounds=[0, *draw(st.lists(st.integers(0, 20), max_size=len(drawn) - 1))],
        abort_rounds=draw(st.dictionaries(indices, st.integers(1, 20), max_size=2)),
        loss_round=draw(st.sampled_from([None, None, 1, 6])),
        uses_groups=uses_groups or has_states,
    )
    window = 0 if uses_groups else draw(st.sampled_from([0, 0, 0, 8]))
    num_states = draw(st.sampled_from([0, 1, 3, 12, 40])) if has_states else 0
    return Example(drawn, schedule, block_size, max_num_seqs, budget, window, window_blocks, has_states, num_states)


@pytest.mark.timeout(300)
@settings(max_examples=20)
@given(examples())
def test_every_request_gets_what_it_gets_alone(example: Example) -> None:
    check_every_request_gets_what_it_gets_alone(example)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(settings.get_profile("thorough"), max_examples=2000)
@given(examples())
def test_every_request_gets_what_it_gets_alone_over_thousands_of_schedules(example: Example) -> None:
    check_every_request_gets_what_it_gets_alone(example)


def crowd() -> list[Request]:
    """Return requests of four kinds; the last two ask for what the first two asked."""
    prompt, conditions = list(LETTERS), StopConditions(max_tokens=MAX_OUTPUT_TOKENS, ignore_eos=True)
    seeded = SamplingRow(temperature=1.0, seed=3, num_logprobs=0)
    kinds = [
        Request(prompt, conditions, num_prompt_logprobs=2),
        Request(prompt[:20], conditions, seeded),
        Request(prompt[:9], conditions, seeded, num_sequences=4),
        Request(prompt[9:], conditions, beam_search=BeamSearchParams(3, 3)),
    ]
    return [*kinds, *kinds[:2]]


def crowded(
    mode: PreemptionMode | None, *, prefix_caching: bool, num_steps_in_flight: int, num_states: int | None = None
) -> Example:
    """Let the crowd meet in a pool that holds two of them; the last two come when the others have gone."""
    settings = PlannerSettings(preemption_mode=mode, prefix_caching=prefix_caching, watermark=0.0)
    arrival_rounds = [0, 0, 0, 0, 40, 40]
    has_states = num_states is not None
    schedule = Schedule(32, 64, settings, num_steps_in_flight, arrival_rounds=arrival_rounds, uses_groups=has_states)
    example = Example(crowd(), schedule, block_size=4, max_num_seqs=12, budget=20)
    return replace(example, has_states=has_states, num_states=num_states or 0)


@pytest.fixture(scope="module")
def crowd_alone() -> list[Outcome]:
    example = crowded(None, prefix_caching=False, num_steps_in_flight=1)
    return [example.outcome_alone(request) for request in example.requests]


@pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("mode", PreemptionMode)
def test_a_crowd_is_preempted_and_found_again_and_gets_what_each_gets_alone(
    mode: PreemptionMode, prefix_caching: bool, num_steps_in_flight: int, crowd_alone: list[Outcome]
) -> None:
    play = crowded(mode, prefix_caching=prefix_caching, num_steps_in_flight=num_steps_in_flight).play()

    assert [play.outcome_of(arrival) for arrival in range(len(crowd_alone))] == crowd_alone
    assert any(preempted.mode is mode and preempted.num_output_tokens for preempted in play.preemptions)
    assert (play.num_cached_tokens > 0) == prefix_caching


@pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])
def test_a_model_whose_states_are_not_saved_computes_each_sequence_from_its_first_token(
    num_steps_in_flight: int, crowd_alone: list[Outcome]
) -> None:
    in_flight = num_steps_in_flight
    play = crowded(PreemptionMode.SWAP, prefix_caching=True, num_steps_in_flight=in_flight, num_states=0).play()

    assert [play.outcome_of(arrival) for arrival in range(len(crowd_alone))] == crowd_alone
    assert {preempted.mode for preempted in play.preemptions} == {PreemptionMode.RECOMPUTE}
    assert play.num_cached_tokens == 0


@pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("num_blocks", [32, 200])
def test_a_model_with_saved_states_swaps_in_a_tight_pool_and_finds_prefixes_in_a_large_one(
    num_blocks: int, mode: PreemptionMode, num_steps_in_flight: int, crowd_alone: list[Outcome]
) -> None:
    example = crowded(mode, prefix_caching=True, num_steps_in_flight=num_steps_in_flight, num_states=24)
    play = replace(example, schedule=replace(example.schedule, num_blocks=num_blocks)).play()

    assert [play.outcome_of(arrival) for arrival in range(len(crowd_alone))] == crowd_alone
    if num_blocks == 32:
        assert any(preempted.mode is mode and preempted.num_output_tokens for preempted in play.preemptions)
    else:
        assert play.num_cached_tokens > 0


def test_outputs_have_log_probabilities_differ_and_follow_their_seed(crowd_alone: list[Outcome]) -> None:
    """Keep the comparisons above from comparing nothing."""
    outputs = [output for outcome in crowd_alone[:3] for output in outcome.outputs]
    assert [len(output.logprobs) for output in outputs] == [MAX_OUTPUT_TOKENS] * 6
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    assert len(crowd_alone[3].search) == 3
    assert [len(values) for values in crowd_alone[0].prompt_logprobs] == [25, 50, 50]

    request = crowd()[1]
    example = crowded(None, prefix_caching=False, num_steps_in_flight=1)
    other_seed = replace(request, sampling=replace(request.sampling, seed=4))
    assert example.outcome_alone(other_seed) != crowd_alone[1]
