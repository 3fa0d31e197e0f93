"""Steps that are launched before the tokens that they feed are known give the tokens of steps one at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from executor_svc.models.decoder import Decoder
from executor_svc.worker.last_tokens import MAX_UNKNOWN_TOKENS
from executor_svc.worker.step_timer import HostTimer
from octavo_shared.errors import DeviceLostError, StepFailedError
from octavo_shared.step_wire.step import NO_LOGPROBS, UNKNOWN_TOKEN, Fork, SamplingRow, StepResult, TableDelta, pairs
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask, pad_words
from tests.numerics.conftest import TinyModel
from tests.numerics.driver import StepDriver
from tests.numerics.launch_ahead import (
    NUM_NEW_TOKENS,
    Ahead,
    OnDevice,
    admit,
    assert_same,
    draw_in_torch,
    one_at_a_time,
)
from tests.numerics.reference import MakeDriver, random_prompt

GREEDY = SamplingRow()
RANDOM = SamplingRow(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=7)
PENALIZED = SamplingRow(temperature=1.1, repetition_penalty=1.7, frequency_penalty=0.4, no_repeat_ngram_size=2, seed=3)
WITH_LOGPROBS = SamplingRow(temperature=0.8, num_logprobs=3, seed=5)


def check_same(drivers: Sequence[StepDriver], deltas: Callable[[StepDriver], list[TableDelta]]) -> list[StepResult]:
    """Run steps one at a time on the first driver, and ahead on the second; return what they answer."""
    expected, ahead = one_at_a_time(drivers[0], deltas(drivers[0])), Ahead(drivers[1])
    for delta in deltas(drivers[1]):
        ahead.launch(delta)
    assert_same(ahead.finish(), expected)
    return expected


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, PENALIZED, WITH_LOGPROBS])
def test_all_steps_are_launched_before_the_first_is_finished(
    sampling: SamplingRow, tiny_models: dict[str, TinyModel], make_driver: MakeDriver, device_sampling: None
) -> None:
    prompts = [random_prompt(length, seed=length) for length in (1, 7, 30)]
    drivers = [make_driver(tiny_models["gqa"]) for _ in range(2)]

    check_same(drivers, lambda driver: [admit(driver, prompts, sampling), *[TableDelta()] * NUM_NEW_TOKENS])

    tables = [driver.worker.table for driver in drivers]
    assert [tables[1].tokens_of(slot).tolist() for slot in range(3)] == [
        tables[0].tokens_of(slot).tolist() for slot in range(3)
    ]


def test_nobody_waits_for_tokens_that_only_the_device_needs(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver, device_sampling: None
) -> None:
    ahead = Ahead(make_driver(tiny_models["gqa"]))
    ahead.launch(admit(ahead.driver, [random_prompt(5)], RANDOM))
    for _ in range(3):
        ahead.launch(TableDelta())

    assert ahead.driver.worker.table.tokens_of(0)[5:].tolist() == [UNKNOWN_TOKEN] * 4
    answers = [result.sampled_token_ids[0] for result in ahead.finish()]
    assert ahead.driver.worker.table.tokens_of(0)[5:].tolist() == answers


VOCAB_SIZE = 97
RULES = TokenRules(
    biased_token_ids=np.array([3, 9], np.int32),
    biases=np.array([4.0, -7.0], np.float32),
    stop_token_ids=np.array([5], np.int32),
    banned_token_ids=np.array([11, 12], np.int32),
    banned_words=pad_words([*([token, 7] for token in range(40)), *([first, 8, 9] for first in range(20))]),
    allowed_mask=pack_mask(np.arange(0, 60, dtype=np.int32), VOCAB_SIZE),
)
# Whatever a row may ask for: how it is sampled, and what of its prompt is told.
MIX: list[tuple[SamplingRow, TokenRules | None, int]] = [
    (GREEDY, None, NO_LOGPROBS),
    (RANDOM, None, 2),
    (PENALIZED, None, NO_LOGPROBS),
    (replace(PENALIZED, presence_penalty=1.5, num_logprobs=0), RULES, 0),
    (SamplingRow(repetition_penalty=1.3, num_logprobs=4), None, 5),
    (SamplingRow(temperature=0.7, typical_p=0.8, min_tokens=9, seed=8), RULES, NO_LOGPROBS),
    (WITH_LOGPROBS, RULES, NO_LOGPROBS),
]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let logits be on a stand-in for a device; return what made the host wait."""
    to_logits = Decoder.logits

    def logits_on_device(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        logits = to_logits(self, hidden)
        assert logits is not None
        return logits.as_subclass(OnDevice)

    monkeypatch.setattr(Decoder, "logits", logits_on_device)
    monkeypatch.setattr(OnDevice, "waits", found := [])
    monkeypatch.setattr(HostTimer, "wait", lambda _: found.append("wait"))
    return found


@pytest.mark.parametrize("num_candidates", [0, 3])
@pytest.mark.parametrize("rows_at_once", [1, 100])
def test_no_row_makes_a_launch_wait_and_all_get_what_the_host_answers(
    rows_at_once: int,
    num_candidates: int,
    tiny_models: dict[str, TinyModel],
    make_driver: MakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    waits: list[str],
) -> None:
    mix = list(MIX)
    if num_candidates:
        mix.append((SamplingRow(num_candidates=num_candidates, repetition_penalty=1.4), RULES, 1))
    monkeypatch.setattr("executor_svc.sampler.device_sampler.VALUES_AT_ONCE", rows_at_once * VOCAB_SIZE)

    def deltas(driver: StepDriver) -> list[TableDelta]:
        prompts = [random_prompt(3 + 2 * slot, seed=slot) for slot in range(len(mix))]
        admissions = []
        for slot, (prompt, (sampling, rules, num_prompt_logprobs)) in enumerate(zip(prompts, mix, strict=True)):
            admission = driver.admission(slot, prompt, 2 * NUM_NEW_TOKENS, sampling)
            admission.token_rules, admission.num_prompt_logprobs = rules, num_prompt_logprobs
            admissions.append(admission)
        chunks = pairs(*[(slot, len(prompt)) for slot, prompt in enumerate(prompts)])
        return [TableDelta(admissions=tuple(admissions), prefill_chunks=chunks), *[TableDelta()] * NUM_NEW_TOKENS]

    with monkeypatch.context() as patch:  # the same logits to the last bit
        patch.setattr("executor_svc.worker.assembly.native_forward", lambda *_: None)
        patch.setattr("executor_svc.worker.assembly.load_sampling", lambda _: None)
        expected = one_at_a_time(host := make_driver(tiny_models["gqa"]), deltas(host))
    monkeypatch.setattr("executor_svc.worker.assembly.device_sampling", lambda _: draw_in_torch)
    ahead = Ahead(make_driver(tiny_models["gqa"]))
    waits.clear()
    for index, delta in enumerate(deltas(ahead.driver)):
        ahead.launch(delta)
        # So many tokens are kept on the device; the oldest of more is waited for.
        assert waits == ["wait"] * max(0, index + 1 - MAX_UNKNOWN_TOKENS)
    assert UNKNOWN_TOKEN in ahead.driver.worker.table.tokens_of(2)
    assert_same(ahead.finish(), expected)


def test_sequences_come_and_go_while_tokens_are_in_flight(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver, device_sampling: None
) -> None:
    prompts = [random_prompt(length, seed=length) for length in (9, 3)]
    drivers = [make_driver(tiny_models["gqa"]) for _ in range(2)]

    def deltas(driver: StepDriver) -> list[TableDelta]:
        first = admit(driver, prompts[:1], RANDOM)
        second = admit(driver, prompts[1:], GREEDY, first_slot=1)
        # Slot 0 is given to another sequence while the last tokens of the first are in flight.
        block_ids = driver.take_blocks(40)
        again = driver.admission(0, prompts[1], 20, RANDOM)
        again = type(again)(0, 2, again.token_ids, again.num_prompt_tokens, 0, block_ids, RANDOM)
        replaced = TableDelta(
            released_slots=np.array([0], np.int32), admissions=(again,), prefill_chunks=pairs((0, len(prompts[1])))
        )
        return [first, TableDelta(), second, TableDelta(), replaced, TableDelta(), TableDelta()]

    check_same(drivers, deltas)


def test_forks_feed_the_token_of_their_own(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver, device_sampling: None
) -> None:
    drivers = [make_driver(tiny_models["gqa"]) for _ in range(2)]

    def deltas(driver: StepDriver) -> list[TableDelta]:
        admission = driver.admission(0, random_prompt(8), 0, RANDOM)
        fork = Fork(0, 1, 1, SamplingRow(temperature=1.0, seed=7, output_index=1))
        first = TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 8)), forks=(fork,))
        blocks = driver.take_blocks(8)
        grown = TableDelta(appended_blocks=pairs((0, int(blocks[0])), (1, int(blocks[1]))))
        return [first, grown, TableDelta(), TableDelta()]

    expected = check_same(drivers, deltas)
    assert any(
        len(set(result.sampled_token_ids.tolist())) == 2 for result in expected[:-1]
    )  # they feed different tokens


def test_an_error_on_the_device_is_an_error_of_the_step(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver, device_sampling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = Ahead(make_driver(tiny_models["gqa"]))
    ahead.launch(admit(ahead.driver, [random_prompt(5)], RANDOM))

    def fail(_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("executor_svc.worker.step_timer.HostTimer.wait", fail)
    with pytest.raises(StepFailedError, match="step 1 failed: RuntimeError: an illegal memory access"):
        ahead.finish()


def test_a_new_epoch_knows_nothing_of_steps_that_were_not_finished(
    tiny_models: dict[str, TinyModel], make_driver: MakeDriver, device_sampling: None
) -> None:
    ahead = Ahead(make_driver(tiny_models["gqa"]))
    ahead.launch(admit(ahead.driver, [random_prompt(5)], RANDOM))
    ahead.driver.worker.reset()
    ahead.running.clear()

    prompt = random_prompt(9, seed=1)
    ahead.launch(admit(ahead.driver, [prompt], RANDOM))  # the same slot and generation
    [result] = ahead.finish()
    assert ahead.driver.worker.table.tokens_of(0).tolist() == [*prompt, *result.sampled_token_ids]


@pytest.mark.parametrize("recorded_before", [False, True])
def test_a_device_that_dies_under_a_step_is_lost(
    recorded_before: bool,
    tiny_models: dict[str, TinyModel],
    make_driver: MakeDriver,
    device_sampling: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("executor_svc.worker.assembly.device_probe", lambda _: die)
    ahead = Ahead(make_driver(tiny_models["gqa"]))
    ahead.launch(admit(ahead.driver, [random_prompt(5)], RANDOM))
    if recorded_before:  # a step with a penalty looks at the tokens of those before it
        ahead.launch(admit(ahead.driver, [random_prompt(6)], PENALIZED, first_slot=1))
    monkeypatch.setattr("executor_svc.worker.step_timer.HostTimer.wait", die)
    with pytest.raises(DeviceLostError, match=r"step 1 failed: .*; the device is lost: an illegal memory access"):
        ahead.finish()
